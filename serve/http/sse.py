"""Server-sent events."""

DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One event. `data` is JSON as an encoder writes it: no line breaks."""
    return b"data: " + data + b"\n\n"

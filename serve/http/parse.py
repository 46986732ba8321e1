"""From h11's request event to a `Request`, refusing what could be read in two ways."""

from __future__ import annotations

import secrets

import h11

from .limits import Limits
from .message import HttpError, Request


def parse_head(event: h11.Request, limits: Limits) -> tuple[Request, int | None]:
    """Gives the request, still without a body, and its declared body length (None: chunked, or none declared).

    h11 has checked the syntax. Refused here: headers over the limit (h11 only limits headers that arrive in pieces),
    and the shapes in which a proxy before us and we could disagree about where the body ends.
    """
    headers = tuple(event.headers)
    if header_size(event.method, event.target, headers) > limits.header_bytes:
        raise HttpError(431, f"the request's headers exceed {limits.header_bytes} bytes")
    if event.http_version not in (b"1.1", b"1.0"):
        raise HttpError(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
    lengths = [value for name, value in headers if name == b"content-length"]
    if any(name == b"transfer-encoding" for name, _ in headers):
        if lengths:
            raise HttpError(400, "a request may not have both Content-Length and Transfer-Encoding")
        if event.http_version == b"1.0":
            raise HttpError(400, "Transfer-Encoding is not part of HTTP/1.0")
    length = int(lengths[0]) if lengths else None
    if length is not None and length > limits.body_bytes:
        raise body_too_large(limits)
    path, query = _split_target(event.target.decode("ascii"))
    return Request(f"req_{secrets.token_hex(16)}", event.method.decode("ascii"), path, query, headers), length


def header_size(method: bytes, target: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> int:
    """Bytes of the head on the wire, blank space aside."""
    return len(method) + len(target) + 12 + sum(len(name) + len(value) + 4 for name, value in headers)


def body_too_large(limits: Limits) -> HttpError:
    return HttpError(413, f"the request's body exceeds {limits.body_bytes} bytes")


def _split_target(target: str) -> tuple[str, str]:
    """Path and query of a request target, which may be a whole URL (RFC 9112, 3.2.2)."""
    if not target.startswith("/"):
        scheme, separator, rest = target.partition("://")
        if separator and scheme.lower() in ("http", "https"):
            target = "/" + rest.partition("/")[2]
    path, _, query = target.partition("?")
    return path, query

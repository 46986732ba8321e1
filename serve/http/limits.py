"""What one client may take from the server: bytes, connections, time."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds."""

    header_bytes: int = 32 * 1024  # request line and all header fields together; also trailers
    body_bytes: int = 16 * 1024 * 1024
    pipelined_bytes: int = 64 * 1024  # read ahead while a request is being answered; then the socket is left unread
    connections: int = 4096
    header_seconds: float = 15.0  # from the first byte of a request to the end of its headers
    body_seconds: float = 60.0  # from the end of the headers to the end of the body
    idle_seconds: float = 120.0  # a connection between requests
    write_seconds: float = 60.0  # a client that reads so slowly that nothing more can be written
    linger_seconds: float = 2.0  # after the last response: time for the client to read it and close
    linger_bytes: int = 64 * 1024 * 1024  # what is still read, and thrown away, during that time

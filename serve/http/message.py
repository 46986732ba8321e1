"""Requests and responses as handlers see them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

Headers = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Request:
    """One complete request: the body has been read."""

    id: str
    method: str
    path: str  # as sent, percent-encoding kept, query removed
    query: str
    headers: tuple[tuple[bytes, bytes], ...]  # names in lower case
    body: bytes = b""
    route: str = ""  # the pattern of the route that matched
    parameters: dict[str, str] = field(default_factory=dict)  # what the pattern's parameter matched, decoded
    notes: dict[str, object] = field(default_factory=dict)  # what a handler wants in the access log

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header, `name` in lower case."""
        return next((value for key, value in self.headers if key == name), None)


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class StreamResponse:
    """A response whose body is written piece by piece; a piece is asked for only when the client keeps up.

    `close` is called exactly once when the response has ended in whatever way, also when the client left before the
    first piece was asked for (which the `finally` of a generator that never started would miss).
    """

    pieces: AsyncGenerator[bytes, None]
    close: Callable[[], None]
    content_type: str = "text/event-stream; charset=utf-8"
    status: int = 200
    headers: Headers = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))


AnyResponse = Response | StreamResponse

# A handler that does not wait answers in place; one that waits is a task, cancelled when the client leaves.
Handler = Callable[[Request], AnyResponse | Awaitable[AnyResponse]]


class HttpError(Exception):
    """A request that HTTP itself refuses, with the status to answer."""

    def __init__(self, status: int, message: str, headers: Headers = ()) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers

"""One client connection: bytes in, requests out to the handler, responses back, with every wait bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import aclosing
from enum import Enum, auto
from typing import TYPE_CHECKING, cast

import h11

from .message import AnyResponse, HttpError, Request, Response, StreamResponse
from .parse import body_too_large, header_size, parse_head

if TYPE_CHECKING:
    from .server import HttpServer

_WRITE_BUFFER_BYTES = 64 * 1024
_EVENTS_PER_TURN = 500  # pieces of a body taken before other connections get their turn: some milliseconds


class _Phase(Enum):
    HEAD = auto()  # between requests, or inside the headers of one
    BODY = auto()
    ANSWER = auto()  # the handler has the request
    LINGER = auto()  # nothing more is written; the client may still be reading
    CLOSED = auto()


class Connection(asyncio.Protocol):
    """Requests on one connection are answered one after the other, in order, pipelined or not.

    A client that closes its sending side while a request is being answered has left: the handler's task is cancelled.
    (An orderly close looks the same as a half-close, and work for nobody is the worse mistake.) Requests that are
    answered in place are answered in either case.
    """

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._limits = server.limits
        self._loop = asyncio.get_running_loop()
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=server.limits.header_bytes)
        self._transport: asyncio.Transport
        self._client: str  # its address
        self._phase = _Phase.HEAD
        self._head_begun = False  # the first byte of a request has come
        self._request: Request | None = None
        self._body = bytearray()
        self._began = 0.0  # loop time at which the current request was complete
        self._status = 0
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._writable: asyncio.Future[None] | None = None  # waited for by a stream while writing is paused
        self._write_paused = False
        self._advance_scheduled = False
        self._ahead = 0  # bytes read but not looked at: pipelined requests
        self._lingered = 0
        self._unsent = 0
        self._ended = False  # the client has sent everything it will ever send
        self._last = False  # no request is taken after the current one

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self._client = peer[0] if peer else "-"
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        if self._server.admit(self):
            self._arm(self._limits.idle_seconds)
        else:
            self._refuse(HttpError(503, "the server holds as many connections as it may", (("retry-after", "1"),)))

    def data_received(self, data: bytes) -> None:
        if self._phase is _Phase.LINGER:
            self._lingered += len(data)
            if self._lingered > self._limits.linger_bytes:
                self._transport.abort()
            return
        self._h11.receive_data(data)
        if self._phase is _Phase.ANSWER or self._write_paused or self._advance_scheduled:
            self._ahead += len(data)
            if self._ahead > self._limits.pipelined_bytes:
                self._transport.pause_reading()
            return
        if not self._head_begun:
            self._head_begun = True
            self._arm(self._limits.header_seconds)
        self._advance()

    def eof_received(self) -> bool:
        """True keeps the other direction open."""
        self._ended = True
        if self._phase is _Phase.LINGER:
            return False
        self._h11.receive_data(b"")
        if self._task is not None:
            self._task.cancel()
        elif not (self._write_paused or self._advance_scheduled):
            self._advance()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._phase = _Phase.CLOSED
        for timer in (self._timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._server.forget(self)

    def pause_writing(self) -> None:
        self._write_paused = True
        self._stall_timer = self._loop.call_later(self._limits.write_seconds, self._transport.abort)

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        if self._phase in (_Phase.HEAD, _Phase.BODY):
            self._schedule_advance()

    # Called by the server.

    def drain(self) -> None:
        """The server is stopping: an idle connection closes; a busy one closes after its response."""
        if self._phase is _Phase.HEAD and not self._head_begun:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    # Reading.

    def _schedule_advance(self) -> None:
        if not self._advance_scheduled:
            self._advance_scheduled = True
            self._loop.call_soon(self._advance_later)

    def _advance_later(self) -> None:
        self._advance_scheduled = False
        self._advance()
        if self._phase in (_Phase.HEAD, _Phase.BODY) and not (self._advance_scheduled or self._write_paused):
            self._ahead = 0
            self._transport.resume_reading()

    def _advance(self) -> None:
        """Reads up to the end of one request. The next one waits for another turn of the loop, to be fair to others."""
        try:
            for _ in range(_EVENTS_PER_TURN):
                if self._phase not in (_Phase.HEAD, _Phase.BODY) or self._write_paused:
                    return
                event = self._h11.next_event()
                if isinstance(event, h11.Request):
                    self._begin(event)
                elif isinstance(event, h11.Data):
                    self._body += event.data
                    if len(self._body) > self._limits.body_bytes:
                        raise body_too_large(self._limits)
                elif isinstance(event, h11.EndOfMessage):
                    if header_size(b"", b"", tuple(event.headers)) > self._limits.header_bytes:
                        raise HttpError(431, f"the request's trailers exceed {self._limits.header_bytes} bytes")
                    self._dispatch()
                    return
                elif isinstance(event, h11.ConnectionClosed):
                    self._transport.close()
                    return
                else:  # NEED_DATA
                    return
            self._schedule_advance()
        except h11.RemoteProtocolError as error:
            self._refuse(HttpError(error.error_status_hint, f"malformed HTTP request: {str(error)[:200]}"))
        except HttpError as error:
            self._refuse(error)

    def _begin(self, event: h11.Request) -> None:
        self._request, length = parse_head(event, self._limits)
        self._phase = _Phase.BODY
        self._arm(self._limits.body_seconds)
        if self._h11.they_are_waiting_for_100_continue and length != 0:
            self._transport.write(self._h11.send(h11.InformationalResponse(status_code=100, headers=[])))

    def _dispatch(self) -> None:
        assert self._request is not None
        self._phase = _Phase.ANSWER
        self._disarm()
        self._request.body = bytes(self._body)
        self._body.clear()
        self._began = self._loop.time()
        try:
            result = self._server.handler(self._request)
        except Exception as error:
            result = self._server.render_error(error)
        if isinstance(result, Response):
            self._respond(result)
            self._finish()
            return
        # Eager: the first step runs now, so that the `finally` inside is reached even if the client leaves at once.
        task = asyncio.Task(self._answer(result), loop=self._loop, eager_start=True)
        if not task.done():
            self._task = task
            if self._ended:
                task.cancel()

    def _refuse(self, error: HttpError) -> None:
        """Answers a request that could not be read to its end; the connection can't be used after that."""
        self._disarm()
        self._last = True
        self._began = self._loop.time()
        self._respond(self._server.render_error(error))
        self._finish()

    # Writing.

    async def _answer(self, result: StreamResponse | Awaitable[AnyResponse]) -> None:
        """Waits for the response if need be and writes it."""
        response: AnyResponse | None = result if isinstance(result, StreamResponse) else None
        try:
            if not isinstance(result, StreamResponse):
                response = await result
            if isinstance(response, StreamResponse):
                await self._stream(response)
            elif response is not None:
                self._respond(response)
        except asyncio.CancelledError:
            self._status = 499  # not sent: the log's sign for a client that left
            self._log()
            self._transport.abort()
            return
        except Exception as error:
            rendered = self._server.render_error(error)
            if self._h11.our_state is not h11.SEND_RESPONSE:
                # Part of the response is out: only a broken connection can tell the client that it is not whole.
                self._transport.abort()
                return
            self._respond(rendered)
        finally:
            self._task = None
            if isinstance(response, StreamResponse):
                response.close()
        self._finish()

    async def _stream(self, response: StreamResponse) -> None:
        assert self._request is not None
        self._send_head(response.status, response.content_type, response.headers)
        async with aclosing(response.pieces) as pieces:
            async for piece in pieces:
                if self._request.method != "HEAD":
                    self._transport.write(self._h11.send(h11.Data(data=piece)))
                if self._write_paused:
                    self._writable = self._loop.create_future()
                    await self._writable
        self._transport.write(self._h11.send(h11.EndOfMessage()))

    def _respond(self, response: Response) -> None:
        length = ("content-length", str(len(response.body)))
        self._send_head(response.status, response.content_type, (length, *response.headers))
        if response.body and not (self._request is not None and self._request.method == "HEAD"):
            self._transport.write(self._h11.send(h11.Data(data=response.body)))
        self._transport.write(self._h11.send(h11.EndOfMessage()))

    def _send_head(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...]) -> None:
        self._status = status
        fields = [("content-type", content_type), *headers, *self._server.common_headers()]
        if self._request is not None:
            fields.append(("x-request-id", self._request.id))
        self._last |= self._server.draining
        if self._last:
            fields.append(("connection", "close"))
        self._transport.write(self._h11.send(h11.Response(status_code=status, headers=fields)))

    def _finish(self) -> None:
        """The response is out: on to the next request, or to the end of the connection."""
        self._log()
        self._request = None
        reusable = self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE
        if self._last or self._server.draining or not reusable:
            self._linger()
            return
        self._h11.start_next_cycle()
        self._phase = _Phase.HEAD
        self._ahead = len(self._h11.trailing_data[0])
        self._head_begun = self._ahead > 0
        self._arm(self._limits.header_seconds if self._head_begun else self._limits.idle_seconds)
        if self._head_begun or self._ended:
            self._schedule_advance()  # which goes on reading, too
        else:
            self._transport.resume_reading()

    def _linger(self) -> None:
        """Stops writing and waits for the client's end before closing.

        Closing at once, with bytes of the client unread, would reset the connection, and a reset can destroy the
        response before the client has read it.
        """
        self._phase = _Phase.LINGER
        if self._ended or self._transport.is_closing():
            self._transport.close()
            return
        try:
            self._transport.write_eof()
        except OSError:  # the client has reset the connection, which reading has not come to yet
            self._transport.abort()
            return
        self._transport.resume_reading()
        self._unsent = self._transport.get_write_buffer_size()
        self._arm(self._limits.write_seconds if self._unsent else self._limits.linger_seconds)

    # Time.

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self._loop.call_later(seconds, self._expired)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expired(self) -> None:
        self._timer = None
        if self._phase is _Phase.LINGER:
            before, self._unsent = self._unsent, self._transport.get_write_buffer_size()
            if 0 < self._unsent < before:
                self._arm(self._limits.write_seconds)
            else:
                self._transport.abort()
        elif self._phase is _Phase.HEAD and not self._head_begun:
            self._transport.close()
        elif self._write_paused:  # the request waits for us, not for the client
            self._arm(self._limits.header_seconds)
        else:
            self._refuse(HttpError(408, "the request did not arrive in time"))

    def _log(self) -> None:
        self._server.log_access(self._client, self._request, self._status, self._loop.time() - self._began)

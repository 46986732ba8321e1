"""Clients that leave, that read slowly, and a server that stops."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field

import pytest

from serve.http.limits import Limits
from serve.http.message import AnyResponse, Request, Response, StreamResponse
from serve.http.router import Route, Router
from tests.serve.http_harness import Harness, RawClient, http_server

HOST = b"host: localhost\r\n"


@dataclass
class Handlers:
    """Handlers that show what happens to them."""

    running: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    closes: int = 0
    pieces: int = 0
    release: threading.Event = field(default_factory=threading.Event)

    async def wait(self, request: Request) -> AnyResponse:
        self.running.set()
        try:
            while not self.release.is_set():
                await asyncio.sleep(0.01)
        finally:
            self.ended.set()
        return Response(200, b"{}")

    def stream(self, request: Request) -> AnyResponse:
        async def pieces() -> AsyncGenerator[bytes, None]:
            try:
                self.running.set()
                while not self.release.is_set():
                    self.pieces += 1
                    yield b"x" * int(request.query)
                    await asyncio.sleep(0.001)
            finally:
                self.ended.set()

        return StreamResponse(pieces(), self._close)

    def broken_stream(self, request: Request) -> AnyResponse:
        async def pieces() -> AsyncGenerator[bytes, None]:
            yield b"first"
            raise RuntimeError("planted")

        return StreamResponse(pieces(), self._close)

    def _close(self) -> None:
        self.closes += 1

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/wait", self.wait),
            Route("GET", "/stream", self.stream),
            Route("GET", "/broken", self.broken_stream),
        ]


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


@pytest.fixture
def server(handlers: Handlers) -> Iterator[Harness]:
    limits = Limits(write_seconds=0.5, idle_seconds=5)
    with http_server(Router(handlers.routes()), limits) as harness:
        yield harness


def get(path: bytes) -> bytes:
    return b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"\r\n"


def close(client: RawClient) -> None:
    client.socket.close()


def half_close(client: RawClient) -> None:
    client.socket.shutdown(socket.SHUT_WR)


def reset(client: RawClient) -> None:
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.socket.close()


@pytest.mark.parametrize("leave", [close, half_close, reset])
@pytest.mark.parametrize("path", [b"/wait", b"/stream?10"])
def test_a_client_that_leaves_cancels_its_handler(
    server: Harness, handlers: Handlers, path: bytes, leave: Callable[[RawClient], None]
) -> None:
    with server.client() as client:
        client.send(get(path))
        assert handlers.running.wait(5)
        assert not handlers.ended.is_set()
        leave(client)
        assert handlers.ended.wait(5)
    if path != b"/wait":
        wait_until(lambda: handlers.closes == 1)


def test_a_stream_is_closed_although_its_client_left_with_the_request(server: Harness, handlers: Handlers) -> None:
    handlers.release.set()  # the generator ends by itself; only `close` is at stake
    with server.client() as client:
        client.send(get(b"/stream?10"))
        half_close(client)
        client.rest()
    wait_until(lambda: handlers.closes == 1)


def test_a_stream_that_fails_breaks_the_connection(server: Harness, handlers: Handlers) -> None:
    with server.client() as client:
        client.send(get(b"/broken"))
        received = read_until_end(client)
    assert b"first" in received
    assert not received.endswith(b"0\r\n\r\n"), "the client would take half an answer for a whole one"
    wait_until(lambda: handlers.closes == 1)


def test_a_reader_that_stops_holds_the_stream_and_is_dropped_in_time(server: Harness, handlers: Handlers) -> None:
    with server.client() as client:
        client.send(get(b"/stream?100000"))
        assert handlers.running.wait(5)
        seen = -1
        while handlers.pieces != seen:  # until the buffers are full
            seen = handlers.pieces
            time.sleep(0.1)
        assert not handlers.ended.is_set()
        assert handlers.pieces < 500, "the stream ran on although nobody read it"
        assert handlers.ended.wait(5)


def test_a_reader_that_is_only_slow_gets_everything(server: Harness, handlers: Handlers) -> None:
    with server.client() as client:
        client.send(get(b"/stream?100000"))
        assert client.response(head_only=True).status == 200
        for _ in range(100):
            assert len(client.chunk()) == 100000
            time.sleep(0.005)
        handlers.release.set()
        while client.chunk():
            pass


def test_drain_lets_a_running_request_end(server: Harness, handlers: Handlers) -> None:
    with server.client() as idle, server.client() as busy, server.client() as streaming:
        assert idle.exchange(get(b"/nothing")).status == 404
        busy.send(get(b"/wait"))
        streaming.send(get(b"/stream?10") + get(b"/wait"))
        assert handlers.running.wait(5)
        drained: list[bool] = []
        thread = threading.Thread(target=lambda: drained.append(server.drain(10)))
        thread.start()
        assert idle.rest() == b""
        with pytest.raises(ConnectionRefusedError):
            server.client()
        assert not handlers.ended.is_set()
        handlers.release.set()
        response = busy.response()
        assert response.status == 200
        assert response.headers["connection"] == "close"
        assert set(streaming.response().body) == {ord("x")}
        assert streaming.rest() == b"", "a pipelined request is not begun while the server stops"
        busy.socket.close()
    thread.join(10)
    assert drained == [True]


def test_drain_gives_up_at_its_deadline(server: Harness, handlers: Handlers) -> None:
    with server.client() as client:
        client.send(get(b"/wait"))
        assert handlers.running.wait(5)
        assert server.drain(0.1) is False
        server.loop.call_soon_threadsafe(server.server.abort)
        assert handlers.ended.wait(5)
        assert read_until_end(client) == b""


def read_until_end(client: RawClient) -> bytes:
    """What comes until the connection ends, in whatever way."""
    received = b""
    try:
        while data := client.socket.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_client_that_resets_after_the_last_byte_leaves_nothing_behind(
    server: Harness, handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reset may come between the last write and the end of writing, which then fails."""

    def reset(transport: object) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr("asyncio.selector_events._SelectorSocketTransport.write_eof", reset)
    with server.client() as client:
        client.send(b"GET /wait HTTP/1.1\r\nconnection: close\r\n" + HOST + b"\r\n")
        assert handlers.running.wait(10)
        handlers.release.set()
        assert client.response().status == 200
        assert client.socket.recv(1) == b""

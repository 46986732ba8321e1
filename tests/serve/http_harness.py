"""An HttpServer with handlers of the test's own, in a thread, and a client that speaks raw bytes."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from serve.endpoints.errors import render_error
from serve.http.limits import Limits
from serve.http.message import Handler
from serve.http.server import HttpServer
from serve.listen import bind


@dataclass
class Harness:
    port: int
    server: HttpServer
    loop: asyncio.AbstractEventLoop

    def client(self) -> RawClient:
        return RawClient(socket.create_connection(("127.0.0.1", self.port), timeout=10))

    def drain(self, seconds: float) -> bool:
        return asyncio.run_coroutine_threadsafe(self.server.drain(seconds), self.loop).result(timeout=20)


@dataclass
class RawResponse:
    status: int
    headers: dict[str, str]
    body: bytes


class RawClient:
    """Sends bytes and reads responses off one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received = b""

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def exchange(self, data: bytes) -> RawResponse:
        self.send(data)
        return self.response()

    def response(self, *, head_only: bool = False) -> RawResponse:
        head = self._until(b"\r\n\r\n").decode("ascii")
        status_line, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
        match = re.fullmatch(r"HTTP/1\.1 (\d{3}) .*", status_line)
        assert match, status_line
        headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
        if head_only or match[1] == "100":
            body = b""
        elif headers.get("transfer-encoding") == "chunked":
            body = b"".join(self._chunks())
        elif "content-length" in headers:
            body = self.exactly(int(headers["content-length"]))
        else:
            body = self.rest()
        return RawResponse(int(match[1]), headers, body)

    def exactly(self, count: int) -> bytes:
        while len(self._received) < count:
            self._receive()
        data, self._received = self._received[:count], self._received[count:]
        return data

    def rest(self) -> bytes:
        """Everything up to the server's end of the connection."""
        while data := self.socket.recv(65536):
            self._received += data
        data, self._received = self._received, b""
        return data

    def chunk(self) -> bytes:
        """The next chunk of a chunked body, b"" for the last."""
        size = int(self._until(b"\r\n"), 16)
        return self.exactly(size + 2)[:-2]

    def _chunks(self) -> Iterator[bytes]:
        while data := self.chunk():
            yield data

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._received:
            self._receive()
        end = self._received.index(mark) + len(mark)
        return self.exactly(end)

    def _receive(self) -> None:
        data = self.socket.recv(65536)
        assert data, f"the server closed the connection after {self._received!r}"
        self._received += data


@contextmanager
def http_server(handler: Handler, limits: Limits | None = None) -> Iterator[Harness]:
    listener = bind("127.0.0.1", 0)
    started = threading.Event()
    found: list[Harness] = []
    stop: list[Callable[[], object]] = []

    async def main() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        server = HttpServer(handler, render_error, "test", limits or Limits())
        await server.start(listener)
        found.append(Harness(listener.getsockname()[1], server, loop))
        stop.append(lambda: loop.call_soon_threadsafe(stopping.set))
        started.set()
        await stopping.wait()
        await server.drain(0.5)
        server.abort()
        await asyncio.sleep(0)  # connections are told of their end in the next turn

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="http server")
    thread.start()
    assert started.wait(10)
    try:
        yield found[0]
    finally:
        stop[0]()
        thread.join(timeout=20)
        assert not thread.is_alive()

"""An HTTP/1.1 client on asyncio that costs little a token: one connection a request, bodies as they come."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

_READ = 1 << 16
_HEAD_LIMIT = 1 << 18


class HttpError(OSError):
    """The peer does not speak as expected, or left in the middle of a response."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where an endpoint is.

    Attributes:
      host, port: to connect to.
      path: that all targets begin with, without a slash at its end.
      tls: whether the connection is encrypted.
    """

    host: str
    port: int
    path: str
    tls: bool = False

    @classmethod
    def of(cls, url: str) -> Address:
        """From a URL such as http://127.0.0.1:8000/v1 or http://127.0.0.1:8000. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r}: expected http://HOST:PORT, with or without /v1")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), path, tls)


class Response:
    """A response whose head has come."""

    def __init__(self, status: int, reader: asyncio.StreamReader, head: dict[bytes, bytes]) -> None:
        self.status = status
        self._reader = reader
        self._head = head

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, in the pieces that the network gives. Raises HttpError where it ends too early."""
        if b"chunked" in self._head.get(b"transfer-encoding", b"").lower():
            chunks = Chunks()
            while not chunks.over:
                if piece := chunks.feed(await self._some()):
                    yield piece
            return
        length = self._head.get(b"content-length")
        if length is None:
            while data := await self._reader.read(_READ):
                yield data
            return
        left = int(length)
        while left:
            data = await self._some(left)
            left -= len(data)
            yield data

    async def _some(self, most: int = _READ) -> bytes:
        data = await self._reader.read(min(most, _READ))
        if not data:
            raise HttpError("the connection ended in the middle of a response")
        return data


class Chunks:
    """Decodes a chunked body from any cuts of it."""

    def __init__(self) -> None:
        self.over = False
        self._data = bytearray()
        self._left = -1  # of the chunk at hand; -1: its size line comes next

    def feed(self, data: bytes) -> bytes:
        """What these bytes add to the body."""
        self._data += data
        out = []
        while not self.over:
            if self._left < 0:
                end = self._data.find(b"\r\n")
                if end < 0:
                    break
                try:
                    self._left = int(bytes(self._data[:end]).partition(b";")[0], 16)
                except ValueError:
                    raise HttpError(f"a chunk of size {bytes(self._data[:end])[:40]!r}") from None
                del self._data[: end + 2]
                self.over = self._left == 0  # what may follow, trailers, concerns nobody
                continue
            if len(self._data) < self._left + 2:
                break  # events are smaller than what is read at once: waiting for the rest delays nothing
            out.append(bytes(self._data[: self._left]))
            del self._data[: self._left + 2]
            self._left = -1
        return b"".join(out)


class Exchange:
    """One request and its response, as a context: leaving it closes the connection, whatever has come."""

    def __init__(self, address: Address, method: str, target: str, body: bytes | None, key: str | None = None) -> None:
        self._address = address
        lines = [f"{method} {address.path}{target} HTTP/1.1", f"host: {address.host}:{address.port}"]
        lines += [f"authorization: Bearer {key}"] if key else []
        lines += ["content-type: application/json", f"content-length: {len(body)}"] if body is not None else []
        self._bytes = "\r\n".join([*lines, "connection: close", "", ""]).encode() + (body or b"")
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Response:
        """Sends it; gives the response as soon as its head is there. Raises OSError."""
        address = self._address
        tls = ssl.create_default_context() if address.tls else None
        reader, self._writer = await asyncio.open_connection(address.host, address.port, ssl=tls, limit=_HEAD_LIMIT)
        self._writer.write(self._bytes)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise HttpError(f"no response: {error}") from None
        first, *lines = head[:-4].split(b"\r\n")
        fields = {}
        for line in lines:
            name, _, value = line.partition(b":")
            fields[name.strip().lower()] = value.strip()
        try:
            status = int(first.split()[1])
        except (IndexError, ValueError):
            raise HttpError(f"no HTTP response: {first[:80]!r}") from None
        return Response(status, reader, fields)

    async def __aexit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError):
                await self._writer.wait_closed()


async def fetch(
    address: Address, target: str, body: bytes | None = None, *, key: str | None = None, timeout_s: float = 60.0
) -> tuple[int, bytes]:
    """A whole response: its status and body. Raises OSError, also for one that takes too long."""
    try:
        exchange = Exchange(address, "GET" if body is None else "POST", target, body, key)
        async with asyncio.timeout(timeout_s), exchange as response:
            return response.status, b"".join([piece async for piece in response.pieces()])
    except TimeoutError:
        raise HttpError(f"{target}: no answer within {timeout_s:g} s") from None

"""The listener and the set of its connections."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from email.utils import formatdate

from .connection import Connection
from .limits import Limits
from .message import Handler, Request, Response

_ACCESS_LOG = logging.getLogger("serve.access")
_BACKLOG = 1024


type Answered = Callable[[str, str, int, float], None]


def _nobody(method: str, route: str, status: int, seconds: float) -> None:
    """Takes no notice of a response."""


class HttpServer:
    """Serves `handler` on a bound socket. `render_error` turns whatever a handler or the parser raised into a response.

    `product` is the value of the Server header. `answered` is told of each response: method, route, status, seconds.
    """

    def __init__(
        self,
        handler: Handler,
        render_error: Callable[[Exception], Response],
        product: str,
        limits: Limits,
        answered: Answered = _nobody,
    ) -> None:
        self.handler = handler
        self.render_error = render_error
        self.limits = limits
        self.draining = False
        self._product = product
        self._answered = answered
        self._connections: set[Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._listener: asyncio.Server | None = None
        self._date = (0, "")

    async def start(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: Connection(self), sock=bound, backlog=_BACKLOG)

    async def drain(self, deadline_s: float) -> bool:
        """Accepts nothing new and lets running requests end. True when all connections are gone within the deadline."""
        self.draining = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.drain()
        try:
            await asyncio.wait_for(self._empty.wait(), deadline_s)
        except TimeoutError:
            return False
        return True

    def abort(self) -> None:
        """Breaks the connections that are left."""
        for connection in list(self._connections):
            connection.abort()

    # Called by connections.

    def admit(self, connection: Connection) -> bool:
        """Registers a connection; False when there are too many and it is to be told so."""
        full = len(self._connections) >= self.limits.connections
        self._connections.add(connection)
        self._empty.clear()
        return not full

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def common_headers(self) -> tuple[tuple[str, str], ...]:
        now = int(time.time())
        if now != self._date[0]:
            self._date = (now, formatdate(now, usegmt=True))
        return (("date", self._date[1]), ("server", self._product))

    def log_access(self, client: str, request: Request | None, status: int, seconds: float) -> None:
        """One line of key=value pairs; a value has no blanks, since a request target and a method have none."""
        self._answered(request.method if request else "", request.route if request else "", status, seconds)
        if _ACCESS_LOG.isEnabledFor(logging.INFO):
            what = (request.method, request.path, request.id) if request else ("-", "-", "-")
            notes = "".join([f" {key}={value}" for key, value in request.notes.items()]) if request else ""
            line = "client=%s method=%s path=%s id=%s status=%d ms=%.1f%s"
            _ACCESS_LOG.info(line, client, *what, status, seconds * 1e3, notes)

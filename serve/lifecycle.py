"""Serving from start to the last response: signals, drain, shutdown."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import north_jax

from .app import make_router
from .endpoints.errors import render_error
from .endpoints.service import Service
from .http.limits import Limits
from .http.server import HttpServer
from .listen import explained, raise_open_files_limit

_PRODUCT = f"north-jax/{north_jax.__version__}"
_SPARE_FILES = 256  # besides connections
_LAST_WORDS_SECONDS = 5.0  # for cancelled requests to tell their clients


async def serve_until_signal(
    make_service: Callable[[], Service], listener: socket.socket, *, drain_seconds: float, ready: Callable[[], None]
) -> None:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends the draining.

    `make_service` is called inside the event loop, `ready` once connections are accepted. Raises BindError.
    """
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    await serve(make_service(), listener, stop=stop, hurry=hurry, drain_seconds=drain_seconds, ready=ready)


async def serve(
    service: Service,
    listener: socket.socket,
    *,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    drain_seconds: float,
    ready: Callable[[], None],
    limits: Limits | None = None,
) -> None:
    """Serves until `stop`; then running requests get `drain_seconds`, or until `hurry`, to finish.

    What is cut off after that is told so: a response still to come becomes an error, a stream ends with one.
    """
    limits = limits or Limits()
    raise_open_files_limit(limits.connections + _SPARE_FILES)
    server = HttpServer(make_router(service), render_error, _PRODUCT, limits, service.metrics.answered)
    try:
        try:
            await server.start(listener)
        except OSError as error:
            raise explained(error, *listener.getsockname()[:2]) from None
        ready()
        await stop.wait()
        await _until(hurry, server.drain(drain_seconds))
    finally:
        await asyncio.to_thread(service.bridge.engine.shutdown, 0.0)
        await server.drain(_LAST_WORDS_SECONDS)
        server.abort()
        service.bridge.close()
        service.text_worker.shutdown(wait=False)


async def _until(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> None:
    """Waits for `work`, or gives it up at `event`."""
    tasks = [asyncio.create_task(work), asyncio.create_task(event.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()

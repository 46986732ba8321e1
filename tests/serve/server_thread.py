"""A server in a thread of the test's own process, on a free port."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import openai

from serve.app import TextSide, make_service
from serve.http.limits import Limits
from serve.lifecycle import serve
from serve.listen import bind
from tests.serve.scripted_engine import ScriptedEngine
from tests.support import tiny_config

MODEL = "scripted"
VOCABULARY = 640


@dataclass
class RunningServer:
    port: int
    engine: ScriptedEngine
    stop: Callable[[], None]  # what SIGTERM does
    hurry: Callable[[], None]  # what a second one does
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def client(self) -> openai.OpenAI:
        """The openai package, without its retries."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=10)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)


def _set_in(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(event.set)


@contextmanager
def running_server(
    engine: ScriptedEngine,
    checkpoint: Path,
    *,
    limits: Limits | None = None,
    drain_seconds: float = 10.0,
    **service: Any,
) -> Iterator[RunningServer]:
    listener = bind("127.0.0.1", 0)
    engine.start()
    started = threading.Event()
    handles: dict[str, Callable[[], None]] = {}
    failures: list[BaseException] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stop, hurry = asyncio.Event(), asyncio.Event()
        handles["stop"] = partial(_set_in, loop, stop)
        handles["hurry"] = partial(_set_in, loop, hurry)
        config = tiny_config(vocab_size=VOCABULARY, eos_token_id=0)
        made = make_service(MODEL, TextSide.read(checkpoint), config, engine, **service)
        await serve(
            made, listener, stop=stop, hurry=hurry, drain_seconds=drain_seconds, ready=started.set, limits=limits
        )

    def target() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=target, name="server")
    thread.start()
    started.wait()
    assert not failures, failures
    running = RunningServer(listener.getsockname()[1], engine, handles["stop"], handles["hurry"], thread)
    try:
        yield running
    finally:
        if thread.is_alive():
            running.stop()
            running.hurry()
        thread.join(timeout=20)
        assert not thread.is_alive(), "the server did not stop"
        assert not failures, failures

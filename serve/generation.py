"""The engine as the event loop sees it: submit requests, wait for their tokens, cancel."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from .engine.types import Engine, EngineRequest, TokenEvent

Arrived = list[tuple[int, TokenEvent]]  # (which of the generation's requests, its event)

_MOST_AT_ONCE = 256  # events; a client that reads slowly leaves thousands behind, and others wait meanwhile


class Watcher(Protocol):
    """Is told how generations fare."""

    def first_token(self, seconds: float) -> None:
        """Of one of a generation's requests, so long after it was submitted."""

    def next_token(self, seconds: float) -> None:
        """So long after the one before it."""

    def ended(self, reason: str) -> None: ...


class Generation:
    """The engine requests behind one client request, and the events that have come from them.

    Its owner calls `close` when it needs no more tokens, in whatever way it ends: that cancels what still runs.
    """

    def __init__(self, engine: Engine, request_ids: Sequence[str], watcher: Watcher) -> None:
        self._engine = engine
        self._watcher = watcher
        now = time.perf_counter()
        self._last = [
            (now, False) for _ in request_ids
        ]  # when a token of each came, or it was submitted; which of both
        self._ids = request_ids
        self._running: set[int] = set()
        self._arrived: deque[tuple[int, TokenEvent]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    async def events(self) -> Arrived:
        """Waits for events and gives those that have come, in order. Empty when every request has ended."""
        if self._arrived:
            await asyncio.sleep(0)  # events were left over: let others run before taking more of them
        while not self._arrived:
            if not self._running:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return [self._arrived.popleft() for _ in range(min(len(self._arrived), _MOST_AT_ONCE))]

    def cancel(self, index: int) -> None:
        """Ends one request: nothing more comes from it."""
        if index in self._running:
            self._running.discard(index)
            self._watcher.ended("cancelled")
            self._engine.cancel(self._ids[index])

    def close(self) -> None:
        for index in list(self._running):
            self.cancel(index)

    # Called by the bridge.

    def begin(self, index: int) -> None:
        self._running.add(index)

    def receive(self, index: int, event: TokenEvent) -> None:
        if index not in self._running:
            return
        if event.token is not None:
            now, (before, begun) = time.perf_counter(), self._last[index]
            self._last[index] = now, True
            (self._watcher.next_token if begun else self._watcher.first_token)(now - before)
        if event.finish_reason is not None:
            self._watcher.ended(event.finish_reason)
            self._running.discard(index)
        self._arrived.append((index, event))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineBridge:
    """Carries events from the engine's thread to the loop it was made in.

    However many tokens the engine delivers before the loop comes round to them, the loop is woken once.
    """

    def __init__(self, engine: Engine, watcher: Watcher) -> None:
        self.engine = engine
        self._watcher = watcher
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[Generation, int, TokenEvent]] = deque()
        self._woken = False
        self._closed = False

    def generate(self, requests: Sequence[EngineRequest]) -> Generation:
        """Submits all requests, or none: what was submitted before a refusal is cancelled. Raises as `submit` does."""
        generation = Generation(self.engine, [request.request_id for request in requests], self._watcher)
        for index, request in enumerate(requests):
            generation.begin(index)
            try:
                self.engine.submit(request, partial(self._deliver, generation, index))
            except BaseException:
                generation.close()
                raise
        return generation

    def close(self) -> None:
        """The loop is about to end: later events are dropped."""
        self._closed = True

    def _deliver(self, generation: Generation, index: int, event: TokenEvent) -> None:
        """In the engine's thread. An event is in the deque before the flag is read, so none is left behind."""
        self._arrived.append((generation, index, event))
        if not self._woken and not self._closed:
            self._woken = True
            self._loop.call_soon_threadsafe(self._distribute)

    def _distribute(self) -> None:
        self._woken = False
        for _ in range(len(self._arrived)):
            generation, index, event = self._arrived.popleft()
            generation.receive(index, event)

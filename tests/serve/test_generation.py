"""The bridge between the engine's thread and the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from north_jax.sampling import SamplingParams
from serve.engine.types import EngineRequest, EngineStats, FinishReason, QueueFull, TokenEvent
from serve.generation import EngineBridge
from serve.metrics import Metrics


class _Engine:
    """Keeps what it is given."""

    def __init__(self, capacity: int = 10) -> None:
        self.delivers: dict[str, Callable[[TokenEvent], None]] = {}
        self.cancelled: list[str] = []
        self._capacity = capacity

    def submit(self, request: EngineRequest, deliver: Callable[[TokenEvent], None]) -> None:
        if len(self.delivers) == self._capacity:
            raise QueueFull(1.0)
        self.delivers[request.request_id] = deliver

    def stats(self) -> EngineStats:
        return EngineStats(queued=0, running=0, pages_used=0, pages_total=0)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


def requests(count: int) -> list[EngineRequest]:
    return [EngineRequest(f"r{index}", (1,), 5, SamplingParams(), frozenset()) for index in range(count)]


def bridge(engine: _Engine) -> EngineBridge:
    return EngineBridge(engine, Metrics(engine))  # type: ignore[arg-type]


def test_many_tokens_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> tuple[list[Any], int]:
        engine = _Engine()
        generation = bridge(engine).generate(requests(1))
        loop = asyncio.get_running_loop()
        wakes = 0
        wake = loop.call_soon_threadsafe

        def counting(*arguments: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return wake(*arguments)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counting)

        def deliver_all() -> None:
            for token in range(100):
                engine.delivers["r0"](TokenEvent(token, None))
            engine.delivers["r0"](TokenEvent(None, FinishReason.STOP))

        thread = threading.Thread(target=deliver_all)
        thread.start()
        thread.join()  # the loop is held meanwhile, as it is by other requests' work
        events = await generation.events()
        assert await generation.events() == []
        monkeypatch.undo()
        return events, wakes

    events, wakes = asyncio.run(main())
    assert [event.token for _, event in events] == [*range(100), None]
    assert wakes == 1


def test_nothing_is_lost_between_wakings() -> None:
    async def main() -> list[int | None]:
        engine = _Engine()
        generation = bridge(engine).generate(requests(1))

        def deliver_all() -> None:
            for token in range(20_000):
                engine.delivers["r0"](TokenEvent(token, None))
            engine.delivers["r0"](TokenEvent(None, FinishReason.LENGTH))

        thread = threading.Thread(target=deliver_all)
        thread.start()
        tokens: list[int | None] = []
        while events := await asyncio.wait_for(generation.events(), 10):
            assert len(events) <= 256, "others must get their turn"
            tokens += [event.token for _, event in events]
        thread.join()
        return tokens

    assert asyncio.run(main()) == [*range(20_000), None]


def test_a_long_backlog_lets_others_run() -> None:
    async def main() -> int:
        engine = _Engine()
        generation = bridge(engine).generate(requests(1))
        for token in range(1000):
            engine.delivers["r0"](TokenEvent(token, None))
        engine.delivers["r0"](TokenEvent(None, FinishReason.STOP))
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        while await generation.events():
            pass
        task.cancel()
        return turns

    assert asyncio.run(main()) >= 1000 // 256


def test_events_are_told_apart_and_cancelled_ones_dropped() -> None:
    async def main() -> None:
        engine = _Engine()
        generation = bridge(engine).generate(requests(2))
        engine.delivers["r1"](TokenEvent(7, None))
        engine.delivers["r0"](TokenEvent(8, None))
        assert await generation.events() == [(1, TokenEvent(7, None)), (0, TokenEvent(8, None))]
        generation.cancel(1)
        generation.cancel(1)
        assert engine.cancelled == ["r1"]
        engine.delivers["r1"](TokenEvent(None, FinishReason.CANCELLED))
        engine.delivers["r0"](TokenEvent(None, FinishReason.STOP))
        assert await generation.events() == [(0, TokenEvent(None, FinishReason.STOP))]
        assert await generation.events() == []
        generation.close()
        assert engine.cancelled == ["r1"], "what has ended is not cancelled"

    asyncio.run(main())


def test_a_refused_request_takes_its_siblings_back() -> None:
    async def main() -> None:
        engine = _Engine(capacity=2)
        with pytest.raises(QueueFull):
            bridge(engine).generate(requests(3))
        assert set(engine.cancelled) >= {"r0", "r1"}

    asyncio.run(main())

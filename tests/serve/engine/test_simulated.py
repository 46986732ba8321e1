"""What the engine makes of an H200: the scenarios of `bench serve`, predicted. A prediction holds the policy alone.

What remains besides: tokenizing and HTTP, and whatever the device does that its table of times does not say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from serve.engine.pace import Pace
from tests.serve.engine.simulated import SLOTS, Simulation, chunk_ms, step_ms

OUTPUT = 256


def gaps(simulation: Simulation, begin: float = 0.0, end: float = float("inf"), besides: str = "") -> np.ndarray:
    """Milliseconds between the tokens of all requests but one, of those gaps that overlap [begin, end]."""
    found = [
        (later - earlier) * 1e3
        for name, stream in simulation.streams.items()
        if name != besides
        for earlier, later in zip(stream.times[:-1], stream.times[1:], strict=True)
        if later >= begin and earlier <= end
    ]
    return np.array(found)


def throughput(prompt: int, **options: object) -> tuple[float, Simulation]:
    """Output tokens a second of 32 requests that arrive within 60 ms."""
    simulation = Simulation(**options)  # type: ignore[arg-type]
    for number in range(32):
        simulation.send(f"r{number}", prompt, OUTPUT, at=0.002 * number)
    simulation.run()
    return 32 * OUTPUT / max(stream.times[-1] for stream in simulation.streams.values()), simulation


@pytest.mark.parametrize(("prompt", "target"), [(1024, 824), (4096, 561)])
def test_throughput(prompt: int, target: float) -> None:
    """Nearly what the device could do if nobody minded a wait: whole prompts one by one, all slots full otherwise."""
    reached, simulation = throughput(prompt)
    context = prompt + OUTPUT / 2
    ideal = 32 * OUTPUT / (32 * chunk_ms(prompt) + 32 / SLOTS * OUTPUT * step_ms(SLOTS, SLOTS * context)) * 1e3
    waits = gaps(simulation)
    print(f"{prompt} in: {reached:.0f} tok/s of {ideal:.0f}, p99 {np.percentile(waits, 99):.1f} ms, {waits.max():.1f}")
    assert reached > target
    assert reached > 0.9 * ideal
    assert np.percentile(waits, 99) < 55 and waits.max() < 60


def test_prompts_that_arrive_together_share_a_chunk() -> None:
    simulation = Simulation()
    for number in range(SLOTS):
        simulation.send(f"r{number}", 1024, 8)
    simulation.run()
    assert simulation.chunks == [(8192, 8192, 8)]


def test_the_cost_of_a_size_that_is_missing_is_no_reason_for_smaller_chunks() -> None:
    """Before others are compiled every chunk runs in the longest: so it had better be full of tokens."""
    reached, simulation = throughput(1024, sizes=[8192], pace=Pace(latency_s=0.052))
    assert min(tokens for _, tokens, _ in simulation.chunks) >= 1024
    assert reached > 600
    reached, simulation = throughput(1024, sizes=[1024, 8192])  # with these a server begins
    assert reached > 800
    assert gaps(simulation).max() < 60


@pytest.mark.parametrize(("long", "share"), [(32768, 0.3), (60000, 0.3), (32768, 0.5), (32768, 0.1)])
def test_a_long_prompt_among_streams(long: int, share: float) -> None:
    simulation = Simulation(pace=Pace(latency_s=0.052, share=share))
    for number in range(7):
        simulation.send(f"r{number}", 1024, 900, at=0.001 * number)
    simulation.send("long", long, 2, at=1.0)
    simulation.run()
    first = simulation.streams["long"].times[0]
    others = [stream for name, stream in simulation.streams.items() if name != "long"]
    before = sum(0.5 <= time < 1.0 for stream in others for time in stream.times) / 0.5
    meanwhile = sum(1.0 <= time < first for stream in others for time in stream.times) / (first - 1.0)
    waits = gaps(simulation, 1.0, first, besides="long")
    print(
        f"{long} tokens after {first - 1:.2f} s, share {meanwhile / before:.2f}, p99 {np.percentile(waits, 99):.1f} ms"
    )
    assert np.percentile(waits, 99) < 55 and waits.max() < 60
    assert meanwhile / before > 0.9 * share
    assert first - 1 < {0.1: 1.5, 0.3: 2.0, 0.5: 2.6}[share] * long / 32768 * (1.35 if long > 32768 else 1)


def test_a_lone_stream_has_the_kernel_s_speed() -> None:
    simulation = Simulation()
    simulation.send("r", 1024, 512)
    simulation.run()
    stream = simulation.streams["r"]
    assert stream.times[0] * 1e3 < chunk_ms(1024) + 4
    reached = 511 / (stream.times[-1] - stream.times[0])
    assert reached > 0.985 * 1e3 / step_ms(1, 1024 + 256)


def test_a_device_that_is_disturbed_recovers() -> None:
    """Half a second in which everything takes thrice as long: afterwards chunks are as before."""
    _, calm = throughput(4096)
    _, disturbed = throughput(4096, slower=lambda now: 3.0 if 4.0 < now < 4.5 else 1.0)
    late = [size for size, _, _ in disturbed.chunks[-20:]]
    assert np.mean(late) > 0.8 * np.mean([size for size, _, _ in calm.chunks[-20:]])


def test_compilations_wait_while_requests_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = threading.Event()

    def warm_up(moment: Callable[[], bool]) -> None:
        if moment():
            compiled.set()

    simulation = Simulation()
    engine = simulation.engine
    monkeypatch.setattr(engine._runner, "warm_up", warm_up, raising=False)
    simulation.send("r", 64, 20)
    simulation._arrive()
    engine.warm_up()
    assert not compiled.wait(0.2)
    assert not engine.stats().warm
    simulation.run()
    assert compiled.wait(10)
    engine.shutdown(0)
    assert engine.stats().warm


def test_a_shutdown_ends_the_wait_for_a_good_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []
    simulation = Simulation()
    engine = simulation.engine
    monkeypatch.setattr(engine._runner, "warm_up", lambda moment: said.append(moment()), raising=False)
    simulation.send("r", 64, 20)
    simulation._arrive()
    engine.warm_up()
    engine.shutdown(0)
    assert said == [False] and not engine.stats().warm


def test_the_engine_accounts_for_its_time() -> None:
    _, simulation = throughput(1024)
    stats = simulation.engine.stats()
    assert sum(stats.seconds.values()) == pytest.approx(simulation.now, rel=0.01)
    assert sum(stats.chunks.values()) == len(simulation.chunks)
    device = sum(chunk_ms(size) for size, _, _ in simulation.chunks) / 1e3
    assert device < stats.seconds["prefill"] < 1.2 * device

"""How long chunks and quanta are while there are both."""

from __future__ import annotations

import pytest

from north_jax.packed.buckets import buckets
from serve.engine.chunk_sizes import chosen
from serve.engine.chunk_times import ChunkTimes
from serve.engine.pace import Pace, pairs_of
from serve.engine.stopwatch import Stopwatch

SIZES = chosen(buckets(8192), "gpu")
STEP = 0.008


def seconds_of(size: int, pairs: int) -> float:
    """Of a chunk on an imaginary GPU: weights, products, attention."""
    return 0.018 + size * 10e-6 + pairs * 0.5e-9


def admitted(pace: Pace, tokens: int, begin: int = 0) -> list[tuple[int, float]]:
    """Chunks of a prompt: their sizes, and how long others waited each time."""
    waits = []
    position = begin
    while position < tokens:
        size = pace.room(SIZES, 2048, position)
        waits.append((size, seconds_of(size, pairs_of(size, position)) + STEP))
        pace.waited(size, pairs_of(size, position), waits[-1][1])
        pace.stepped(STEP)
        position += size
    return waits


def test_nothing_known_yet() -> None:
    assert Pace().steps == 2, "so that one step is timed without a chunk before it"
    assert Pace(latency_s=0.05).room(SIZES, 2048, 0) == 2048
    assert Pace(latency_s=0.05).room([8192], 2048, 0) == 2048, "no size is small enough: it runs in a larger one"


def test_waits_keep_the_bound_as_attention_grows() -> None:
    waits = admitted(Pace(latency_s=0.05), 60_000)
    late = [seconds for _, seconds in waits if seconds > 0.0505]
    assert len(late) <= 2 and max(seconds for _, seconds in waits) < 0.058
    assert waits[4][0] >= 1536 and waits[-1][0] <= 512
    # As many tokens as fit: the next size would have been too long.
    position = 0
    for size, _ in waits[:-1]:
        if position > 8192:
            larger = min(other for other in SIZES if other > size)
            assert seconds_of(larger, pairs_of(larger, position)) + STEP > 0.049
        position += size


def test_a_short_prompt_behind_a_long_one_gets_long_chunks_again() -> None:
    pace = Pace(latency_s=0.05)
    admitted(pace, 40_000)
    assert pace.room(SIZES, 2048, 38_000) <= 768
    assert pace.room(SIZES, 2048, 0) >= 1536


def test_few_tokens_do_not_make_chunks_small() -> None:
    """Below some 500 tokens a chunk takes what its weights take: to halve it saves nothing."""
    pace = Pace(latency_s=0.02)  # which the shortest chunk and a step exceed
    admitted(pace, 4096)
    assert pace.room(SIZES, 2048, 4096) >= 256


def test_a_single_long_wait_changes_nothing() -> None:
    pace = Pace(latency_s=0.06)
    admitted(pace, 32768)
    before = pace.room(SIZES, 2048, 0)
    pace.waited(before, pairs_of(before, 0), 3.0)
    assert pace.room(SIZES, 2048, 0) == before


def test_a_size_that_was_too_slow_is_tried_again() -> None:
    pace = Pace(latency_s=0.05)
    pace.stepped(STEP)
    for _ in range(8):
        pace.waited(2048, pairs_of(2048, 0), 0.2)  # the GPU was another's
    rooms = [pace.room(SIZES, 2048, 0)]
    for _ in range(300):
        pace.waited(rooms[-1], pairs_of(rooms[-1], 0), seconds_of(rooms[-1], pairs_of(rooms[-1], 0)) + STEP)
        rooms.append(pace.room(SIZES, 2048, 0))
    assert rooms[0] < 1024 and rooms[-1] == 2048


def test_decoding_keeps_its_share() -> None:
    pace = Pace(share=0.2)
    pace.stepped(0.008)
    pace.waited(2048, 0, 0.048)
    assert pace.steps == 2  # 16 of 56 ms
    pace.waited(64, 0, 0.009)
    assert pace.steps == 1
    pace.waited(2048, 0, 60.0)
    assert pace.steps == 32


def test_steps_that_come_together_after_a_late_one_change_nothing() -> None:
    pace = Pace(share=0.2)
    for seconds in (0.008, 0.008, 0.008, 0.024, 0.0, 0.0, 0.008):
        pace.stepped(seconds)
    pace.waited(2048, 0, 0.048)
    assert pace.steps == 2


def test_times_of_sizes_that_have_not_run() -> None:
    times = ChunkTimes()
    assert times.expected(1024, 0) is None
    for size, seconds in ((1024, 0.028), (4096, 0.070)):
        times.ran(size, 0, 9.0)  # the first run loads code
        assert times.expected(size, 0) == 9.0
        times.ran(size, 0, seconds)
    assert times.expected(1024, 0) == pytest.approx(0.028)
    assert times.expected(2048, 0) == pytest.approx(0.042), "on the line between"
    assert times.expected(512, 0) == pytest.approx(0.021)
    assert times.expected(8192, 0) == pytest.approx(0.105)


def test_the_slope_of_attention() -> None:
    times = ChunkTimes()
    for size in (1024, 1024, 2048, 2048):
        for context in (0, 8192, 16384, 24576):
            pairs = pairs_of(size, context)
            times.ran(size, pairs, seconds_of(size, pairs))
    pairs = pairs_of(1024, 60_000)
    assert times.expected(1024, pairs) == pytest.approx(seconds_of(1024, pairs), rel=0.05)


def test_the_stopwatch_tells_chunks_from_steps() -> None:
    told: list[object] = []

    class Ears(Pace):
        def stepped(self, seconds: float) -> None:
            told.append(seconds)

        def waited(self, size: int, pairs: int, seconds: float) -> None:
            told.append((size, pairs, seconds))

        def ran(self, size: int, pairs: int, seconds: float) -> None:
            told.append(("ran", size, seconds))

    now = 0.0
    watch = Stopwatch(Ears(), lambda: now)

    def at(time: float, tell: object, *arguments: int, **named: bool) -> None:
        nonlocal now
        now = time
        tell(*arguments, **named)  # type: ignore[operator]

    at(2.0, watch.works)
    at(3.0, watch.prefills, 100, 7, others=False)
    at(5.0, watch.prefilled, drawn=True)
    at(6.0, watch.decodes)
    at(8.0, watch.step)
    at(13.0, watch.step)
    at(13.5, watch.decoded)
    at(14.0, watch.prefills, 64, 9, others=True)
    at(14.5, watch.prefilled, drawn=False)
    at(15.0, watch.decodes)
    at(24.0, watch.step)  # the device computed the chunk first
    assert told == [("ran", 100, 2.0), 5.0, (64, 9, 10.0)]
    # Of the last nine seconds five were the step's, as of the one before it.
    assert watch.seconds == {"idle": 2.0, "host": 3.0, "prefill": 2.0 + 0.5 + 4.0, "decode": 7.5 + 5.0}
    assert watch.chunks == {100: 1, 64: 1}


def test_chunks_that_draw_nothing_are_not_timed_one_by_one() -> None:
    """The device computes them behind each other while the host goes on."""
    told: list[int] = []

    class Ears(Pace):
        def ran(self, size: int, pairs: int, seconds: float) -> None:
            told.append(size)

    watch = Stopwatch(Ears())
    for size, drawn in ((512, False), (256, True), (128, True)):
        watch.prefills(size, 0, others=False)
        watch.prefilled(drawn=drawn)
    assert told == [128]


def test_few_sizes_are_compiled_on_a_gpu_and_the_useful_ones_first() -> None:
    assert SIZES[:3] == (1024, 8192, 2048)
    assert len(SIZES) <= 14
    assert chosen(buckets(256), "cpu") == (64, 256, 128, 192)
    assert set(chosen(buckets(320), "gpu")) == {64, 128, 256, 320}
    assert chosen(buckets(64), "gpu") == (64,)


def test_padding_to_these_sizes_costs_little_time() -> None:
    """Under 15% on average over prompts of any length in an octave, by what chunks take on an H200."""
    ascending = sorted(SIZES)
    for low in (64, 128, 256, 512, 1024, 2048, 4096):
        exact = padded = 0.0
        for tokens in range(low + 1, 2 * low + 1):
            exact += milliseconds(tokens)
            padded += milliseconds(min(size for size in ascending if size >= tokens))
        assert padded / exact < (1.15 if low < 4096 else 1.2), low  # beyond, chunks are mostly full


def milliseconds(tokens: int) -> float:
    """Of a chunk of so many tokens, between those that were measured."""
    known = {64: 19.0, 128: 19.3, 512: 23.8, 1024: 28.0, 2048: 38.0, 4096: 70.0, 8192: 137.0}
    for (low, first), (high, second) in zip(list(known.items())[:-1], list(known.items())[1:], strict=True):
        if tokens <= high:
            return first + (second - first) * (tokens - low) / (high - low)
    raise AssertionError(tokens)

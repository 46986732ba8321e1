"""How long chunks and quanta are while there are both."""

from __future__ import annotations

from serve.engine.pace import Pace, Stopwatch


def device(pace: Pace, most: int, contexts: range) -> list[tuple[int, float]]:
    """Chunks of a prompt on an imaginary GPU: their tokens, and how long others waited each time."""
    waits = []
    position = contexts.start
    while position < contexts.stop:
        tokens = min(pace.room(most), contexts.stop - position)
        seconds = 0.012 + tokens * (16e-6 + 0.4e-9 * position) + 0.008  # weights, products and attention; a step
        waits.append((tokens, seconds))
        pace.waited(tokens, seconds)
        position += tokens
    return waits


def test_nothing_known_yet():
    assert Pace().steps == 1
    assert Pace(latency_s=0.05).room(2048) == 2048


def test_waits_stay_near_the_bound_as_attention_grows():
    waits = device(Pace(latency_s=0.05), 2048, range(0, 32768))
    assert max(seconds for _, seconds in waits) < 0.06
    assert waits[0][0] > waits[-2][0] >= 512
    assert sum(seconds > 0.0505 for _, seconds in waits) <= 8


def test_a_short_chunk_says_nothing_of_long_ones():
    pace = Pace(latency_s=0.05)
    device(pace, 2048, range(30000, 32000))
    before = pace.room(2048)
    pace.waited(10, 0.03)
    assert pace.room(2048) == before


def test_it_recovers_from_a_wait_that_had_another_cause():
    pace = Pace(latency_s=0.05)
    pace.waited(1024, 3.0)
    assert pace.room(2048) == 512
    for _ in range(8):
        pace.waited(pace.room(2048), 0.02)
    assert pace.room(2048) == 2048


def test_decoding_keeps_its_share():
    pace = Pace(share=0.2)
    pace.stepped(0.008)
    pace.waited(2048, 0.048)
    assert pace.steps == 2  # 16 of 56 ms
    pace.waited(64, 0.009)
    assert pace.steps == 1
    pace.waited(2048, 60.0)
    assert pace.steps == 32


def test_the_stopwatch_tells_chunks_from_steps():
    told: list[object] = []

    class Ears(Pace):
        def stepped(self, seconds: float) -> None:
            told.append(seconds)

        def waited(self, tokens: int, seconds: float) -> None:
            told.append((tokens, seconds))

    clock = iter((0.0, 5.0, 6.0, 10.0, 20.0))
    watch = Stopwatch(Ears(), lambda: next(clock))
    watch.prefills(100, others=False)
    watch.decodes()
    watch.step()  # at 0: after a chunk that nobody waited for
    watch.step()
    watch.prefills(64, others=True)  # at 6
    watch.decodes()
    watch.step()
    watch.decodes()
    watch.step()  # the host's work between quanta is no step's
    assert told == [5.0, (64, 4.0)]

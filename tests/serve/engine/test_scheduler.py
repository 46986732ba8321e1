"""The scheduler with an imaginary device: requests, limits, alternation, order.

Random lives are in test_scheduler_random.py, the prefix cache in test_prefix_cache.py.
"""

from __future__ import annotations

import pytest

from north_jax.packed.buckets import buckets
from serve.engine.pace import Pace
from serve.engine.scheduler import QUANTUM, SHORT_QUANTUM
from serve.engine.types import FinishReason, QueueFull, RequestTooLong
from serve.engine.work import DecodeWork, PrefillWork
from tests.serve.engine.imaginary import Model, request, scheduler


def test_prefill_and_decode_alternate():
    plan = scheduler(slots=2, full_pages=20)
    model = Model(plan)
    plan.add(request("a", 10, 40))
    model.step()  # prefills a
    plan.add(request("b", 250, 5))
    kinds = []
    while "b" not in model.received:
        work = plan.next_work()
        kinds.append(type(work))
        if isinstance(work, PrefillWork):
            model.prefill(work)
        else:
            assert work.steps == 2
            model.decode(work, 2)
    assert kinds == [DecodeWork, PrefillWork] * 5


@pytest.mark.parametrize(
    ("max_tokens", "chunk", "expected"),
    [((300, 3), 200, QUANTUM), ((200, 3), 26, 26), ((8, 3), 50, 7), ((2, 2), 50, 1)],
)
def test_a_quantum_lasts_as_long_as_its_longest_row_and_fits_a_chunk(max_tokens, chunk, expected):
    plan = scheduler(slots=2, full_pages=20, sliding_pages=12, chunk=chunk)
    model = Model(plan)
    for name, count in zip("ab", max_tokens, strict=True):
        plan.add(request(name, 10, count))
    model.step()
    work = plan.next_work()
    assert work.steps == expected
    assert len(work.rows) == 2


def test_a_quantum_is_short_while_requests_wait():
    plan = scheduler(slots=1, full_pages=20, sliding_pages=12, chunk=200)
    model = Model(plan)
    plan.add(request("a", 10, 300))
    model.step()
    plan.add(request("b", 10, 5))
    assert plan.next_work().steps == SHORT_QUANTUM


def test_chunks_and_quanta_keep_the_pace():
    """Chunks of two tokens a millisecond, steps of 10 ms, none of which may take longer than 50 with the chunk."""
    pace = Pace(share=0.5, latency_s=0.05)
    sizes = buckets(512)
    plan = scheduler(
        slots=2, full_pages=40, sliding_pages=20, chunk=512, max_context=2000, pace=pace, sizes=lambda: sizes
    )
    model = Model(plan)
    plan.add(request("a", 10, 200))
    model.step()
    pace.stepped(0.01)
    plan.add(request("b", 1500, 5))
    chunks, steps = [], []
    while "b" not in model.received:
        work = plan.next_work()
        if isinstance(work, PrefillWork):
            chunks.append(len(work.rows[0].tokens))
            model.prefill(work)
        else:
            steps.append(work.steps)
            model.decode(work, work.steps)
            if chunks:
                pace.waited(chunks[-1], 0, chunks[-1] / 2000 + 0.01)
    assert chunks[0] == 512 and chunks[1] < 256 and {*chunks[3:-1]} == {64}  # 42 ms; no shorter ones are compiled
    assert set(steps[6:]) == {4}  # 32 ms of chunk, 40 of steps


def test_who_waits_is_a_reason_to_end_a_quantum_when_it_fits():
    plan = scheduler(slots=2, full_pages=8)
    model = Model(plan)
    plan.add(request("a", 200, 30))  # four pages
    plan.add(request("b", 100, 3))  # two
    assert plan.can_admit()
    while "b" not in model.ended:
        model.step(1)
    assert not plan.can_admit()  # nobody waits
    plan.add(request("c", 250, 10))  # five pages, four are free
    plan.add(request("d", 5, 5))
    assert not plan.can_admit()
    model.to_cancel.add("a")
    while "a" not in model.ended:
        assert not plan.can_admit()
        model.step()
    assert plan.can_admit()
    model.step()  # admits both
    assert not plan.can_admit()


def test_a_late_short_prompt_does_not_overtake_in_a_lower_slot():
    """Prefills take the longest admitted first, whatever slot it is in."""
    plan = scheduler(slots=3, full_pages=30)  # two rows in a prefill
    model = Model(plan)
    plan.add(request("first", 10, 1))
    plan.add(request("second", 10, 1))
    plan.add(request("long", 200, 1))
    for i in range(12):
        plan.add(request(f"late{i}", 10, 1))
    while model.step():
        pass
    assert list(model.ended).index("long") < 8


def test_order_of_arrival_holds_when_pages_are_short():
    plan = scheduler(slots=3, full_pages=6)
    model = Model(plan)
    plan.add(request("big", 300, 10))
    plan.add(request("bigger", 370, 10))
    plan.add(request("small", 5, 5))
    while model.step():
        pass
    assert list(model.ended) == ["big", "bigger", "small"]


def test_limits():
    plan = scheduler(slots=1, max_queue=2)
    with pytest.raises(RequestTooLong, match="context of 400"):
        plan.check(request("x", 395, 6))
    with pytest.raises(RequestTooLong, match="10 full pages"):
        scheduler(max_context=1000).check(request("x", 570, 10))
    with pytest.raises(RequestTooLong, match=">= 1"):
        plan.check(request("x", 0, 6))
    for i in range(3):  # one slot and two that wait
        plan.add(request(f"r{i}", 5, 5))
    with pytest.raises(QueueFull):
        plan.add(request("r3", 5, 5))


def test_failed_device_ends_running_requests_only():
    plan = scheduler(slots=1)
    model = Model(plan)
    plan.add(request("a", 5, 5))
    plan.add(request("b", 5, 5))
    plan.next_work()
    failed = plan.fail_running("boom")
    assert [(owner.request_id, event.finish_reason, event.error) for owner, event in failed] == [
        ("a", FinishReason.ERROR, "boom")
    ]
    while model.step():
        pass
    assert model.ended == {"b": FinishReason.LENGTH}

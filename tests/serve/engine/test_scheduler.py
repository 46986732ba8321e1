"""The scheduler alone: random arrivals, lengths, stops and cancellations over small page pools."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_config

from north_jax.kv_cache import NO_PAGE
from north_jax.sampling import SamplingParams
from serve.engine.memory import CachePlan
from serve.engine.scheduler import DecodeWork, PrefillWork, Scheduler
from serve.engine.types import EngineRequest, FinishReason, QueueFull, RequestTooLong

CONFIG = tiny_config()
STOP = 3


def scheduler(slots=3, full_pages=9, sliding_pages=6, max_queue=100, max_context=400):
    plan = CachePlan(
        slots=slots,
        max_context=max_context,
        chunk=50,
        prefill_rows=2,
        full_pages=full_pages,
        sliding_pages=sliding_pages,
        bytes=0,
    )
    return Scheduler(CONFIG, plan, max_queue=max_queue)


def request(name, prompt, max_tokens):
    return EngineRequest(name, tuple(range(1, prompt + 1)), max_tokens, SamplingParams(), frozenset({STOP}))


def answer(name, count):
    """The token an imaginary model gives `name` as its count-th: any but STOP."""
    return 4 + (sum(name.encode()) * 31 + count * 7) % 90


class Model:
    """Stands for the device: checks the work it is given and draws tokens."""

    def __init__(self, scheduler, stops=None):
        self.scheduler = scheduler
        self.stops = stops or {}  # request id → how many tokens before STOP
        self.cached = defaultdict(list)  # request id → tokens whose KV is in pages
        self.received = defaultdict(list)
        self.ended = {}

    def step(self):
        work = self.scheduler.next_work()
        if work is None:
            return False
        drawn = {}
        for row in work.rows:
            owner = self.scheduler.request_of(row.slot)
            tokens = row.tokens if isinstance(work, PrefillWork) else (row.token,)
            cached = self.cached[owner.request_id]
            assert len(cached) == row.start
            assert len(tokens) <= 50
            cached.extend(tokens)
            expected = [*owner.prompt, *self.received[owner.request_id]]
            assert cached == expected[: len(cached)]
            for position in range(row.start, len(cached)):
                for table in self.scheduler.rows.tables:
                    assert table[row.slot, position // 64 % table.shape[1]] != NO_PAGE
            if isinstance(work, DecodeWork) or row.last:
                count = len(self.received[owner.request_id])
                stop = self.stops.get(owner.request_id) == count
                drawn[row.slot] = STOP if stop else answer(owner.request_id, count)
        self.take(self.scheduler.complete(work, drawn))
        return True

    def take(self, deliveries):
        for owner, event in deliveries:
            assert owner.request_id not in self.ended, "an event after the last one"
            if event.token is not None:
                self.received[owner.request_id].append(event.token)
            if event.finish_reason is not None:
                self.ended[owner.request_id] = event.finish_reason


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 250),  # prompt
            st.integers(1, 60),  # max_tokens
            st.one_of(st.none(), st.integers(0, 20)),  # tokens before the stop token
            st.integers(0, 12),  # steps before the next arrival
            st.one_of(st.none(), st.integers(0, 30)),  # steps until it is cancelled
        ),
        max_size=14,
    )
)
def test_every_request_ends_with_its_own_tokens_and_no_page_leaks(arrivals):
    plan = scheduler()
    stops = {f"r{i}": stop for i, (_, _, stop, _, _) in enumerate(arrivals) if stop is not None}
    model = Model(plan, stops)
    cancellations = {}
    now = 0
    for i, (prompt, max_tokens, _, gap, cancel) in enumerate(arrivals):
        plan.add(request(f"r{i}", prompt, max_tokens))
        if cancel is not None:
            cancellations[f"r{i}"] = now + cancel
        for _ in range(gap):
            now += 1
            for name in [name for name, due in cancellations.items() if due <= now]:
                del cancellations[name]
                model.take(plan.cancel(name))
            model.step()
    for name in cancellations:
        model.take(plan.cancel(name))
    for _ in range(20_000):
        if not model.step():
            break
    assert len(model.ended) == len(arrivals)
    for i, (_, max_tokens, stop, _, _) in enumerate(arrivals):
        name = f"r{i}"
        tokens = model.received[name]
        assert tokens == [answer(name, count) for count in range(len(tokens))]
        if model.ended[name] is FinishReason.LENGTH:
            assert len(tokens) == max_tokens
        elif model.ended[name] is FinishReason.STOP:
            assert len(tokens) == stop
    assert plan.rows.free == (9, 6)
    stats = plan.stats()
    assert (stats.queued, stats.running, stats.pages_used) == (0, 0, 0)


def test_prefill_and_decode_alternate():
    plan = scheduler(slots=2, full_pages=20)
    model = Model(plan)
    plan.add(request("a", 10, 40))
    model.step()  # prefills a
    plan.add(request("b", 250, 5))
    kinds = []
    for _ in range(8):
        work = plan.next_work()
        kinds.append(type(work))
        model.take(plan.complete(work, {row.slot: 9 for row in work.rows}))
    assert kinds == [DecodeWork, PrefillWork] * 4 or kinds == [PrefillWork, DecodeWork] * 4


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
    plan = scheduler(slots=3, full_pages=7, max_context=448)
    model = Model(plan)
    plan.add(request("big", 300, 10))
    plan.add(request("bigger", 380, 10))
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

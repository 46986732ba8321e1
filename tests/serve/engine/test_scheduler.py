"""The scheduler alone: random arrivals, lengths, stops and cancellations over small page pools."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_config

from north_jax.decoding import Finish, TokenRecord, finish_of
from north_jax.kv_cache import NO_PAGE
from north_jax.sampling import SamplingParams
from serve.engine.memory import CachePlan
from serve.engine.scheduler import QUANTUM, DecodeWork, PrefillWork, Scheduler
from serve.engine.types import EngineRequest, FinishReason, QueueFull, RequestTooLong

CONFIG = tiny_config()
STOP = 3
CHUNK = 50


def scheduler(slots=3, full_pages=9, sliding_pages=6, max_queue=100, max_context=400, chunk=CHUNK):
    plan = CachePlan(
        slots=slots,
        max_context=max_context,
        chunk=chunk,
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
        self.to_cancel = set()  # request ids whose rows end at their next decode step

    def step(self, most=QUANTUM):
        """One device call; a decode quantum ends after `most` steps at the latest."""
        work = self.scheduler.next_work()
        if work is None:
            return False
        if isinstance(work, DecodeWork):
            self.decode(work, most)
            return True
        drawn = {}
        for row in work.rows:
            owner = self.scheduler.request_of(row.slot)
            assert row.sampling is owner.sampling
            self.append(row.slot, owner, row.tokens, row.start, row.start + len(row.tokens))
            if row.last:
                drawn[row.slot] = self.draw(owner)
        self.take(self.scheduler.complete(work, drawn))
        return True

    def decode(self, work, most):
        """A quantum: a record of each live row a step."""
        live = {row.slot: (row, self.scheduler.request_of(row.slot)) for row in work.rows}
        for row, owner in live.values():
            assert row.remaining == owner.max_tokens - len(self.received[owner.request_id]) >= 1
            assert (row.stop_token_ids, row.sampling) == (owner.stop_token_ids, owner.sampling)
            assert row.position + min(work.steps, row.remaining) < len(owner.prompt) + owner.max_tokens
        for step in range(min(work.steps, most)):
            records = []
            for slot, (row, owner) in list(live.items()):
                if owner.request_id in self.to_cancel:
                    records.append(TokenRecord(slot, -1, Finish.CANCELLED))
                    del live[slot]
                    continue
                newest = row.token if step == 0 else self.received[owner.request_id][-1]
                end = row.position + min(work.steps, row.remaining)
                self.append(slot, owner, (newest,), row.position + step, end)
                token = self.draw(owner)
                finish = finish_of(token, row.remaining - step, row.stop_token_ids)
                records.append(TokenRecord(slot, token, finish))
                if finish is not Finish.NONE:
                    del live[slot]
            self.take(self.scheduler.take(records))
            if not live:
                break

    def append(self, slot, owner, tokens, start, end):
        """Tokens enter the cache; the tables must cover what the call may write, up to `end`, and the window."""
        cached = self.cached[owner.request_id]
        assert len(cached) == start
        assert 0 < len(tokens) <= CHUNK and end - start <= CHUNK
        cached.extend(tokens)
        assert cached == [*owner.prompt, *self.received[owner.request_id]][: len(cached)]
        full, sliding = self.scheduler.rows.snapshot()
        assert all(full[slot, position // 64] != NO_PAGE for position in range(end))
        window = range(max(start - CONFIG.sliding_window + 1, 0), end)
        assert all(sliding[slot, position // 64 % sliding.shape[1]] != NO_PAGE for position in window)

    def draw(self, owner):
        count = len(self.received[owner.request_id])
        return STOP if self.stops.get(owner.request_id) == count else answer(owner.request_id, count)

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
            st.integers(0, 12),  # device calls before the next arrival
            st.one_of(st.none(), st.integers(0, 30)),  # device calls until it is cancelled
            st.booleans(),  # while a quantum runs
        ),
        max_size=14,
    ),
    st.integers(1, QUANTUM),  # steps of a quantum
)
def test_every_request_ends_with_its_own_tokens_and_no_page_leaks(arrivals, most):
    plan = scheduler()
    stops = {f"r{i}": stop for i, (_, _, stop, *_) in enumerate(arrivals) if stop is not None}
    model = Model(plan, stops)
    cancellations = {}
    now = 0
    for i, (prompt, max_tokens, _, gap, cancel, during) in enumerate(arrivals):
        plan.add(request(f"r{i}", prompt, max_tokens))
        if cancel is not None:
            cancellations[f"r{i}"] = now + cancel, during
        for _ in range(gap):
            now += 1
            for name in [name for name, (due, _) in cancellations.items() if due <= now]:
                _, during = cancellations.pop(name)
                if during:
                    model.to_cancel.add(name)
                else:
                    model.take(plan.cancel(name))
            model.step(most)
    for name in cancellations:
        model.take(plan.cancel(name))
    for _ in range(20_000):
        if not model.step(most):
            break
    assert len(model.ended) == len(arrivals)
    for i, (_, max_tokens, stop, *_) in enumerate(arrivals):
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
    while "b" not in model.received:
        work = plan.next_work()
        kinds.append(type(work))
        if isinstance(work, PrefillWork):
            model.take(plan.complete(work, {row.slot: 9 for row in work.rows}))
        else:
            assert work.steps == 1
            model.decode(work, 1)
    assert kinds == [DecodeWork, PrefillWork] * 5


@pytest.mark.parametrize(
    ("max_tokens", "chunk", "expected"), [((200, 3), 50, QUANTUM), ((200, 3), 20, 20), ((8, 3), 50, 7), ((2, 2), 50, 1)]
)
def test_a_quantum_lasts_as_long_as_its_longest_row_and_fits_a_chunk(max_tokens, chunk, expected):
    plan = scheduler(slots=2, full_pages=20, chunk=chunk)
    model = Model(plan)
    for name, count in zip("ab", max_tokens, strict=True):
        plan.add(request(name, 10, count))
    model.step()
    work = plan.next_work()
    assert work.steps == expected
    assert len(work.rows) == 2


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

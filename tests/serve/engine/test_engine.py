"""The engine end to end on a tiny model: concurrent requests equal lone ones, cancellations, failures, shutdown.

What may happen while a decode quantum runs is tested in test_quanta.py.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from north_jax.decoding import slot_sampler
from north_jax.forward_pass import forward
from north_jax.generation import generate_with_logprobs
from north_jax.kv_cache import cache_bytes, ring_entries
from north_jax.sampling import SamplingParams
from serve.engine import runner
from serve.engine.memory import MemoryPlanError, plan_cache
from serve.engine.types import EngineRequest, EngineUnavailable, FinishReason, QueueFull, RequestTooLong
from tests.serve.engine.tiny import CONFIG, PARAMS, PLAN, alone, started_engine


@pytest.fixture(scope="module")
def engine():
    engine = started_engine(max_queue=30)
    yield engine
    engine.shutdown(5)


def request(name, prompt, max_tokens=12, stop=(), **sampling):
    return EngineRequest(name, tuple(prompt), max_tokens, SamplingParams(**sampling), frozenset(stop))


def collect(engine, *requests):
    """Submits all, waits for all; request id → (tokens, finish reason)."""
    events = queue.Queue()
    for one in requests:
        engine.submit(one, lambda event, name=one.request_id: events.put((name, event)))
    results = {one.request_id: ([], None) for one in requests}
    while any(reason is None for _, reason in results.values()):
        name, event = events.get(timeout=120)
        tokens, reason = results[name]
        assert reason is None
        if event.token is not None:
            tokens.append(event.token)
        results[name] = (tokens, event.finish_reason)
    return results


def prompts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(int(t) for t in rng.integers(4, 199, rng.integers(1, 320))) for _ in range(count)]


def test_batched_requests_equal_lone_ones(engine):
    requests = [
        request(f"r{i}", prompt, temperature=0.0 if i % 2 else 0.8, top_p=0.9, seed=i)
        for i, prompt in enumerate(prompts(9))
    ]
    together = collect(engine, *requests)
    for one in requests:
        assert collect(engine, one)[one.request_id] == together[one.request_id]
        assert together[one.request_id] == (alone(one), FinishReason.LENGTH)
    assert engine.stats().pages_used == 0


def test_penalties_bias_and_logprobs_survive_the_batch(engine):
    settings = {
        "presence_penalty": 1.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.3,
        "logit_bias": ((101, -100.0),),
    }
    one = request("odd", prompts(1, seed=3)[0], temperature=0.9, seed=4, logprobs=2, **settings)
    events = queue.Queue()
    engine.submit(one, events.put)
    collect(engine, *(request(f"plain{i}", prompt) for i, prompt in enumerate(prompts(4, seed=4))))
    got = [events.get(timeout=60) for _ in range(one.max_tokens)]
    expected = list(generate_with_logprobs(CONFIG, PARAMS, one.prompt, one.max_tokens, one.sampling, ()))
    assert [event.token for event in got] == [token for token, _ in expected]
    for event, (_, logprobs) in zip(got, expected, strict=True):
        assert event.logprobs.logprob == pytest.approx(logprobs.logprob, abs=1e-4)
        assert [token for token, _ in event.logprobs.top] == [token for token, _ in logprobs.top]
    assert collect(engine, replace(one, request_id="plain", sampling=SamplingParams(seed=4)))["plain"][0] != [
        event.token for event in got
    ]


def test_the_prompt_s_log_probabilities_are_those_of_the_whole_sequence(engine):
    """Over chunks, and although an earlier request has left the prompt in the cache."""
    prompt = prompts(1, seed=9)[0][:20] * 15  # 300 tokens: two chunks
    collect(engine, request("before", prompt))
    events = queue.Queue()
    engine.submit(replace(request("r", prompt, max_tokens=1, logprobs=2), prompt_logprobs=True), events.put)
    reported = events.get(timeout=120).prompt_logprobs
    logits = np.asarray(forward(CONFIG, PARAMS, jnp.asarray([prompt])))[0]
    expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    assert len(reported) == len(prompt) - 1
    for position, logprobs in enumerate(reported):
        assert logprobs.logprob == pytest.approx(expected[position, prompt[position + 1]], abs=1e-3)
        assert logprobs.top[0][1] == pytest.approx(expected[position].max(), abs=1e-3)
        assert len(logprobs.top) == 2


class _Alternate:
    """A grammar: even and odd tokens in turn. It notes what it accepts."""

    def __init__(self):
        self.accepted = []

    def mask(self):
        return np.full(-(-CONFIG.vocab_size // 32), 0x55555555 << len(self.accepted) % 2, np.uint32)

    def accept(self, token):
        self.accepted.append(token)


def test_a_grammar_rules_from_the_first_token_on(engine):
    one = replace(request("g", prompts(1)[0], max_tokens=9), grammar=_Alternate())
    results = collect(engine, one, request("free", prompts(1)[0], max_tokens=9))
    tokens, reason = results["g"]
    assert [token % 2 for token in tokens] == [0, 1] * 4 + [0]
    assert (one.grammar.accepted, reason) == (tokens, FinishReason.LENGTH)


def test_a_grammar_without_a_token_ends_its_request_alone(engine):
    class Nothing(_Alternate):
        def mask(self):
            return np.zeros(-(-CONFIG.vocab_size // 32), np.uint32)

    one = replace(request("g", [5, 6]), grammar=Nothing())
    results = collect(engine, one, request("free", [5, 6]))
    assert results["g"] == ([], FinishReason.ERROR)
    assert results["free"][1] is FinishReason.LENGTH


def test_stop_token_ends_without_being_delivered(engine):
    one = request("a", prompts(1)[0], max_tokens=20, temperature=0.0)
    tokens, _ = collect(engine, one)["a"]
    stop = tokens[5]
    stopped = collect(engine, request("b", one.prompt, max_tokens=20, stop=[stop], temperature=0.0))["b"]
    assert stopped == (tokens[: tokens.index(stop)], FinishReason.STOP)


def test_cancel_mid_generation(engine):
    reached = threading.Event()
    events = []
    ended = threading.Event()

    def deliver(event):
        events.append(event)
        if len(events) == 3:
            reached.set()
        if event.finish_reason is not None:
            ended.set()

    engine.submit(request("long", [5, 6, 7], max_tokens=450), deliver)
    assert reached.wait(60)
    engine.cancel("long")
    engine.cancel("nobody")
    assert ended.wait(60)
    assert events[-1].finish_reason is FinishReason.CANCELLED
    assert len(events) < 400
    assert engine.stats().pages_used == 0


def compiled_for_nothing(monkeypatch, module, name, static):
    """Puts a copy in place of a module's jitted function, with a cache of its own; gives the copy."""
    original = getattr(module, name).__wrapped__

    def of_this_test(*arguments, **options):
        return original(*arguments, **options)

    fresh = jax.jit(of_this_test, static_argnames=static)
    monkeypatch.setattr(module, name, fresh)
    return fresh


def test_a_started_engine_has_compiled_what_joins_prefill_and_draw(monkeypatch):
    fresh = compiled_for_nothing(monkeypatch, runner, "_of_slots", "slots")
    started = started_engine()
    assert fresh._cache_size() == 1
    collect(started, request("plain", [5, 6]))
    assert fresh._cache_size() == 1
    started.shutdown(0)


@pytest.mark.slow
def test_a_warm_engine_compiles_nothing_for_its_first_odd_request(monkeypatch):
    """Draws with a bias, penalties, log-probabilities or a grammar are compiled in the background."""
    fresh = compiled_for_nothing(monkeypatch, slot_sampler, "_sample", "reports")
    warm = started_engine()
    compiled = fresh._cache_size()
    warm.warm_up()
    warm._warmer.join(120)
    assert fresh._cache_size() == compiled + 4
    collect(warm, request("bias", [5, 6], logit_bias=((9, 1.0),)), request("free", [5, 7]))
    collect(warm, request("logprobs", [5, 6], logprobs=1))
    collect(warm, request("penalty", [5, 6], presence_penalty=1.0))
    assert fresh._cache_size() == compiled + 4
    warm.shutdown(0)


def test_failing_receiver_loses_only_its_own_request(engine):
    def broken(event):
        raise RuntimeError("the receiver is gone")

    engine.submit(request("broken", [5, 6], max_tokens=30), broken)
    tokens, reason = collect(engine, request("fine", [8, 9], max_tokens=10))["fine"]
    assert (len(tokens), reason) == (10, FinishReason.LENGTH)


@pytest.mark.parametrize("call", ["prefill", "decode"])
def test_failing_device_call_ends_its_requests_and_the_engine_lives(engine, monkeypatch, call):
    def fail(*_):
        engine._runner._cache = ()  # it was donated
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(engine._runner, call, fail)
    events = queue.Queue()
    engine.submit(request("doomed", [5, 6]), events.put)
    while (event := events.get(timeout=60)).finish_reason is None:
        assert call == "decode"
    assert event.finish_reason is FinishReason.ERROR and "the device is on fire" in event.error
    monkeypatch.undo()
    assert collect(engine, request("next", [5, 6]))["next"][1] is FinishReason.LENGTH


def test_refusals(engine):
    with pytest.raises(RequestTooLong):
        engine.submit(request("x", [1] * 505), print)
    events = queue.Queue()
    engine._ends.clear()
    engine._ends.extend([10.0, 14.0, 30.0])
    for i in range(40):
        try:
            engine.submit(request(f"q{i}", [5] * 300, max_tokens=60), events.put)
        except QueueFull as full:
            assert full.retry_after_s == 10.0  # the mean time between two ends
            break
    else:
        pytest.fail("the queue has no bound")
    with pytest.raises(ValueError, match="'q0' is in use"):
        engine.submit(request("q0", [5]), events.put)
    for j in range(i):
        engine.cancel(f"q{j}")
    ends = 0
    while ends < i:
        ends += events.get(timeout=60).finish_reason is not None


@pytest.mark.parametrize(("deadline", "reason"), [(60.0, FinishReason.LENGTH), (0.0, FinishReason.CANCELLED)])
def test_shutdown_drains_or_cancels(deadline, reason):
    engine = started_engine()
    events = queue.Queue()
    engine.submit(request("a", [5, 6], max_tokens=300), events.put)
    events.get(timeout=60)
    engine.shutdown(deadline)
    last = None
    while not events.empty():
        last = events.get()
    assert last.finish_reason is reason
    with pytest.raises(EngineUnavailable, match="shutting down"):
        engine.submit(request("b", [5]), events.put)


def test_a_lost_device_fails_everybody_aloud():
    """When the cache cannot be made anew the engine ends, and nobody waits for it."""

    def fail(*_):
        raise RuntimeError("the device is gone")

    lost = started_engine()
    lost._runner.prefill = lost._runner.reset = fail
    events = queue.Queue()
    lost.submit(request("a", [5, 6]), events.put)
    event = events.get(timeout=60)
    assert event.finish_reason is FinishReason.ERROR and "the device is gone" in event.error
    assert "the device is gone" in lost.stats().failure
    with pytest.raises(EngineUnavailable, match="the device is gone"):
        lost.submit(request("b", [5]), events.put)
    lost.shutdown(0)


def test_shutdown_does_not_wait_for_a_call_that_hangs(monkeypatch):
    monkeypatch.setattr("serve.engine.engine._LAST_CALL_SECONDS", 0.2)
    hanging = started_engine()
    release, entered = threading.Event(), threading.Event()
    hanging._runner.prefill = lambda *_: entered.set() or release.wait(60) or {}
    hanging.submit(request("a", [5, 6]), lambda event: None)
    assert entered.wait(60)
    begun = time.monotonic()
    hanging.shutdown(0)
    assert time.monotonic() - begun < 10
    release.set()


def test_logits_that_are_not_finite_end_the_request():
    poisoned = started_engine(PARAMS | {"final_norm": PARAMS["final_norm"] * jnp.nan})
    events = queue.Queue()
    poisoned.submit(request("a", [5, 6]), events.put)
    event = events.get(timeout=60)
    assert event[:3] == (None, FinishReason.ERROR, "the logits are not finite, or its grammar allows no token")
    assert poisoned.stats().pages_used == 0
    poisoned.shutdown(0)


@pytest.mark.slow  # its cache has a shape of its own to compile for; test_scheduler_random.py has small pools too
def test_the_smallest_legal_pool_under_overload():
    """One request of full length fits, and nothing else: interruptions, recomputation, and everybody's own tokens.

    What was found in the cache or computed in other chunks may differ in the last bits, as DESIGN.md says; none of
    these draws is that close.
    """
    smallest = replace(PLAN, full_pages=8, sliding_pages=ring_entries(CONFIG, PLAN.max_context, PLAN.chunk))
    small = started_engine(plan=smallest, max_queue=30)
    requests = [request(f"r{i}", prompt, max_tokens=70, seed=i) for i, prompt in enumerate(prompts(4, seed=5))]
    requests += [request(f"again{i}", one.prompt, max_tokens=70, seed=i) for i, one in enumerate(requests)]
    results = collect(small, *requests, request("full", prompts(1)[0][:12], max_tokens=500))
    for one in requests:
        assert results[one.request_id] == (alone(one), FinishReason.LENGTH)
    assert len(results["full"][0]) == 500
    stats = small.stats()
    small.shutdown(5)
    assert stats.preemptions > 0 and stats.cached_tokens > 0
    assert (stats.pages_used, stats.running, stats.queued, stats.failure) == (0, 0, 0, None)


def test_plan_cache_refuses_with_numbers():
    dtype = jnp.dtype(jnp.float32)
    with pytest.raises(MemoryPlanError, match="exceeds the model's 1024"):
        plan_cache(CONFIG, dtype, slots=1, max_context=2000)
    with pytest.raises(MemoryPlanError, match="GB of KV cache"):
        plan_cache(CONFIG, dtype, slots=4, max_context=1024, budget=1 << 16)
    plan = plan_cache(CONFIG, dtype, slots=4, max_context=None, budget=1 << 23)
    assert plan.max_context == 1024 and plan.bytes <= 1 << 23


def test_plan_cache_leaves_sliding_pages_for_the_prefix_cache():
    rings = 4 * ring_entries(CONFIG, 512, PLAN.chunk)
    plan = plan_cache(CONFIG, jnp.dtype(jnp.float32), slots=4, max_context=512, budget=1 << 24)
    assert rings < plan.sliding_pages <= 2 * rings
    assert plan.bytes == cache_bytes(CONFIG, full_pages=plan.full_pages, sliding_pages=plan.sliding_pages, itemsize=4)


def test_plan_cache_chooses_chunks():
    """What suits the device, unless told otherwise; less where the room for it in every slot would take too much."""
    dtype, sizes = jnp.dtype(jnp.float32), {"slots": 4, "max_context": 512}
    assert (PLAN.chunk, PLAN.busy_chunk) == (256, 256)
    told = plan_cache(CONFIG, dtype, **sizes, budget=1 << 24, chunk=300, busy_chunk=100)
    assert (told.chunk, told.busy_chunk) == (320, 128)
    assert plan_cache(CONFIG, dtype, **sizes, budget=1 << 24, chunk=64).busy_chunk == 64
    assert plan_cache(CONFIG, dtype, slots=4, max_context=64, budget=1 << 24).chunk == 64
    scarce = plan_cache(CONFIG, dtype, **sizes, budget=500_000)  # rings of 256 more tokens: 131072 bytes
    assert (scarce.chunk, scarce.busy_chunk) == (128, 128)

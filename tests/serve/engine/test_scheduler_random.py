"""The scheduler under random arrivals, lengths, stops and cancellations, over page pools down to the smallest legal."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from north_jax.kv_cache import ring_entries
from serve.engine.scheduler import QUANTUM
from serve.engine.types import FinishReason
from tests.serve.engine.imaginary import CONFIG, Model, answer, pages_are_all_free, request, scheduler

ARRIVALS = st.lists(
    st.tuples(
        st.integers(1, 250),  # prompt
        st.integers(1, 60),  # max_tokens
        st.one_of(st.none(), st.integers(0, 20)),  # tokens before the stop token
        st.integers(0, 12),  # device calls before the next arrival
        st.one_of(st.none(), st.none(), st.integers(0, 30)),  # device calls until it is cancelled
        st.booleans(),  # while a quantum runs
        st.integers(0, 1),  # prompts of a family begin alike
        st.integers(0, 5).map(lambda number: number == 0),  # whether the prompt is reported
    ),
    max_size=14,
)
SIZES = st.builds(
    lambda slots, chunk, full, sliding, prefix_cache: {
        "slots": slots,
        "chunk": chunk,
        "full_pages": 5 + full,  # what 309 positions take
        "sliding_pages": ring_entries(CONFIG, 400, chunk) + sliding,
        "prefix_cache": prefix_cache,
    },
    st.integers(1, 4),
    st.sampled_from([50, 64, 128]),
    st.integers(0, 7),
    st.integers(0, 6),
    st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(ARRIVALS, SIZES, st.integers(1, QUANTUM))
def test_every_request_ends_with_its_own_tokens_and_no_page_leaks(arrivals, sizes, most):
    plan = scheduler(**sizes)
    stops = {f"r{i}": stop for i, (_, _, stop, *_) in enumerate(arrivals) if stop is not None}
    model = Model(plan, stops)
    cancellations = {}
    now = 0
    for i, (prompt, max_tokens, _, gap, cancel, during, family, reports) in enumerate(arrivals):
        one = request(f"r{i}", prompt, max_tokens, family, reports)
        plan.check(one)
        plan.add(one)
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
    model.run(most)
    assert len(model.ended) == len(arrivals)
    for i, (_, max_tokens, stop, *_) in enumerate(arrivals):
        name = f"r{i}"
        tokens = model.received[name]
        if arrivals[i][-1] and model.events[name][0].finish_reason is not FinishReason.CANCELLED:
            assert model.events[name][0].prompt_logprobs == request(name, arrivals[i][0], 1, arrivals[i][-2]).prompt[1:]
        assert tokens == [answer(name, count) for count in range(len(tokens))]  # as alone: none lost, none twice
        if model.ended[name] is FinishReason.LENGTH:
            assert len(tokens) == max_tokens
        elif model.ended[name] is FinishReason.STOP:
            assert len(tokens) == stop
    assert pages_are_all_free(plan)

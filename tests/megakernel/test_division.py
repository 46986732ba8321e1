"""How dynamic work is divided: properties of the Python form, and the compiled form against it."""

from __future__ import annotations

import importlib
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny_config

import ffi
from north_jax.megakernel import abi, division
from north_jax.moe import route

needs_compiled = pytest.mark.skipif(not ffi.build_info().cpu, reason=str(ffi.build_info()))

positions = st.one_of(st.integers(0, 5000), st.integers(0, 2**20), st.just(2**20 - 1))
windows = st.sampled_from([0, 1, 63, 64, 65, 70, 512, 4096])
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def compiled():
    return importlib.import_module("ffi._native").division


@given(positions, windows)
def test_splits_cover_what_a_query_sees_once_in_order(position, window):
    splits = division.attention_splits(position, window)
    assert 1 <= splits.number <= abi.MAX_SPLITS
    covered = [p for split in range(splits.number) for p in splits.positions(split)[:: max(1, position // 1000)]]
    assert covered == sorted(set(covered))
    ranges = [splits.positions(split) for split in range(splits.number)]
    assert all(ranges)
    pages = [(span.stop - 1) // abi.PAGE_TOKENS - span.start // abi.PAGE_TOKENS + 1 for span in ranges]
    assert max(pages) - min(pages) <= 1
    assert ranges[0].start == (max(position + 1 - window, 0) if window else 0)
    assert ranges[-1].stop == position + 1
    assert all(a.stop == b.start and b.start % abi.PAGE_TOKENS == 0 for a, b in itertools.pairwise(ranges))


@needs_compiled
@given(position=positions, window=windows)
def test_compiled_splits(compiled, position, window):
    splits = division.attention_splits(position, window)
    assert compiled.attention_splits(position, window) == splits
    for split in range(splits.number):
        span = splits.positions(split)
        assert compiled.split_positions(position, window, split) == (span.start, span.stop)


@needs_compiled
@given(data=st.data(), window=windows, kv_heads=st.integers(1, 5))
def test_compiled_attention_items(compiled, data, window, kv_heads):
    lengths = data.draw(st.lists(st.integers(0, 9000), min_size=1, max_size=6))
    live = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    first = data.draw(st.integers(0, len(lengths) - 1))
    rows = np.zeros((len(lengths), abi.ROW_FIELDS), np.int32)
    rows[:, abi.Row.POSITION], rows[:, abi.Row.REMAINING] = lengths, live
    items = division.attention_items(lengths, live, kv_heads, window)
    assert compiled.attention_items(rows, 0, len(rows), kv_heads, window) == items
    some = [item for item in items if item.row >= first]
    assert compiled.attention_items(rows, first, len(rows) - first, kv_heads, window) == some


@given(st.integers(0, 300), st.integers(1, 40), st.lists(st.integers(0, 9), max_size=3))
def test_rounds_deal_every_item_once(items, dealers, ends):
    bounds = [0, *sorted(ends), 1000]
    numbers = [
        number
        for begin, end in itertools.pairwise(bounds)
        for dealer in range(dealers)
        for number in division.dealt(items, dealer, dealers, (begin, end))
    ]
    assert sorted(numbers) == list(range(items))


@needs_compiled
@given(st.integers(0, 300), st.integers(1, 40), st.data())
def test_compiled_dealing(compiled, items, dealers, data):
    dealer = data.draw(st.integers(0, dealers - 1))
    begin = data.draw(st.integers(0, 9))
    end = data.draw(st.one_of(st.integers(begin, 12), st.just(2**31 - 1)))
    first, last, step = compiled.dealt(items, dealer, dealers, begin, end)
    assert list(range(first, last, step)) == list(division.dealt(items, dealer, dealers, (begin, end)))


@needs_compiled
@given(st.integers(0, 5), st.integers(1, 20))
def test_compiled_expert_items(compiled, active, tiles):
    items = [compiled.expert_item(tiles, number) for number in range(active * tiles)]
    assert items == division.expert_items(active, tiles)


@needs_compiled
@given(seeds, st.integers(1, 32), st.integers(1, 40), st.integers(1, 8))
def test_compiled_routes(compiled, seed, batch, experts, k):
    rng = np.random.default_rng(seed)
    k = min(k, experts)
    chosen = np.stack([rng.permutation(experts)[:k] for _ in range(batch)]).astype(np.int32)
    live = rng.random(batch) < 0.7
    expected = division.routes(chosen, live)
    active = len(expected.experts)
    found = compiled.routes(np.where(live[:, None], chosen, -1).astype(np.int32).reshape(-1), experts)
    assert len(found) == division.routes_size(experts, batch * k)
    assert found[0] == active
    assert found[1 : 1 + active] == expected.experts.tolist()
    assert found[1 + experts :][: active + 1] == expected.first.tolist()
    assert found[2 + 2 * experts :][: len(expected.assignments)] == expected.assignments.tolist()


@needs_compiled
@pytest.mark.parametrize(("function", "renormalise"), [("softmax", False), ("sigmoid", False), ("sigmoid", True)])
def test_compiled_choice_of_experts(compiled, function, renormalise):
    experts, k = 24, 5
    config = tiny_config(
        hidden_size=experts,
        num_experts=experts,
        num_experts_per_tok=k,
        expert_selection_fn=function,
        norm_topk_prob=renormalise,
    )
    logits = np.random.default_rng(0).integers(-6, 7, (50, experts)).astype(np.float32) / 2  # many are equal
    chosen, weights, _ = route(config, np.eye(experts, dtype=np.float32), logits)
    for row, expected, weight in zip(logits, np.asarray(chosen), np.asarray(weights), strict=True):
        found, found_weights = compiled.choose_experts(row, k, function == "softmax", renormalise)
        assert found == expected.tolist()
        np.testing.assert_allclose(found_weights, weight, rtol=1e-6)


@needs_compiled
def test_compiled_random_numbers_are_those_of_jax(compiled):
    rng = np.random.default_rng(0)
    for seed, position in zip(rng.integers(0, 2**32, (20, 2), np.uint32), rng.integers(0, 2**31, 20), strict=True):
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        expected = jax.random.uniform(key, (2,), np.float32)
        found = [compiled.uniform(int(seed[0]), int(seed[1]), int(position), index) for index in range(2)]
        assert found == np.asarray(expected).tolist()

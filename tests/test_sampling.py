"""Sampling: the drawn frequencies are the exact probabilities, and a row depends on itself alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from north_jax.sampling import (
    DRAW_BLOCK,
    SamplingBatch,
    SamplingParams,
    _block_sums,
    _pick,
    _running_sums,
    sample,
)

VOCABULARY = 12
DRAWS = 20_000
draw = jax.jit(sample)


def exact(logits, params):
    """Probabilities by the plain definition, in float64."""
    scaled = np.asarray(logits, np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p, kind="stable")
    keep = np.zeros(len(p), bool)
    ranked = p[order]
    if params.top_k:
        ranked[params.top_k :] = 0
    ranked /= ranked.sum()
    total = 0.0
    for rank, token in enumerate(order):
        likely = ranked[rank] >= params.min_p * ranked[0]
        keep[token] = rank == 0 or ((total < params.top_p or params.top_p == 1) and likely and ranked[rank] > 0)
        total += ranked[rank]
    p = np.where(keep, p, 0)
    return p / p.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.7),
        SamplingParams(top_k=3),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0.7),
        SamplingParams(top_p=0.05),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.3, top_k=8, top_p=0.8, min_p=0.05),
    ],
    ids=str,
)
def test_frequencies_are_exact(params):
    logits = np.random.default_rng(3).normal(0, 1.5, VOCABULARY).astype(np.float32)
    logits[5] = logits[2]  # a tie
    many = SamplingBatch.of([SamplingParams(params.temperature, params.top_k, params.top_p, params.min_p, 77)] * DRAWS)
    tokens = np.asarray(draw(jnp.tile(logits, (DRAWS, 1)), many, jnp.arange(DRAWS)))
    counts = np.bincount(tokens, minlength=VOCABULARY)
    p = exact(logits, params)
    assert (counts[p == 0] == 0).all()
    kept = p > 0
    chi_square = ((counts[kept] - DRAWS * p[kept]) ** 2 / (DRAWS * p[kept])).sum()
    degrees = kept.sum() - 1
    assert chi_square <= degrees + 5 * np.sqrt(2 * degrees)  # five deviations


def test_greedy_and_its_ties():
    logits = jnp.array([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    batch = SamplingBatch.of([SamplingParams(temperature=0)] * 2)
    assert draw(logits, batch, jnp.zeros(2, jnp.int32)).tolist() == [1, 0]


def test_a_row_depends_on_itself_alone():
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(4, 50)).astype(np.float32)
    params = [SamplingParams(0.9, top_p=0.9, seed=s) for s in (1, 2**63 + 5, 3, 4)]
    params[2] = SamplingParams(temperature=0)
    together = draw(logits, SamplingBatch.of(params), jnp.array([9, 8, 7, 6]))
    for row in range(4):
        others = rng.normal(size=(4, 50)).astype(np.float32)
        others[row] = logits[row]
        batch = SamplingBatch.of([p if i == row else SamplingParams(seed=99) for i, p in enumerate(params)])
        assert draw(others, batch, jnp.array([9, 8, 7, 6]))[row] == together[row]


def test_seed_and_position_both_matter():
    logits = jnp.zeros((1, 1000))

    def one(seed, position):
        return int(draw(logits, SamplingBatch.of([SamplingParams(seed=seed)]), jnp.array([position]))[0])

    assert one(1, 5) == one(1, 5)
    assert len({one(1, 5), one(1, 6), one(2, 5), one(1 + 2**32, 5)}) == 4


def test_impossible_tokens_are_never_drawn():
    logits = jnp.full((64, 8), -jnp.inf).at[:, 3].set(0.0)
    tokens = draw(logits, SamplingBatch.of([SamplingParams(seed=i) for i in range(64)]), jnp.arange(64))
    assert (tokens == 3).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", 2)],
)
def test_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.slow
def test_a_large_flat_vocabulary():
    vocabulary, rows, steps = 2**18 - 1000, 4, 1000  # the last block of the draw is not full
    batch = SamplingBatch.of([SamplingParams(seed=i) for i in range(rows)])
    logits = jnp.full((rows, vocabulary), 1e4)
    run = jax.jit(lambda starts: jax.lax.map(lambda start: sample(logits, batch, start + jnp.zeros(rows, int)), starts))
    tokens = np.asarray(run(jnp.arange(steps, dtype=jnp.int32))).reshape(-1)
    assert tokens.min() >= 0 and tokens.max() < vocabulary
    for bucket in (tokens * 40 // vocabulary, tokens % 40):  # ranges, and residues, of nearly equal size
        expected = len(tokens) / 40
        chi_square = ((np.bincount(bucket, minlength=40) - expected) ** 2 / expected).sum()
        assert chi_square < 39 + 5 * np.sqrt(2 * 39)
    one = jnp.full((rows, vocabulary), -jnp.inf).at[:, -1].set(-1e4)
    assert (draw(one, batch, jnp.arange(rows)) == vocabulary - 1).all()


def running_sums(weights):
    """The order of additions that csrc/reference/operations/draw.cc and csrc/megakernel/operations/draw.cuh follow."""
    each = -(-len(weights) // 32)
    sums, before = np.zeros(len(weights), np.float32), np.float32(0)
    for first in range(0, len(weights), each):
        total = np.float32(0)
        for i in range(first, min(first + each, len(weights))):
            total += weights[i]
            sums[i] = before + total
        before += total
    return sums


def block_sum(weights):
    """Likewise of a block."""
    lanes = np.zeros(32, np.float32)
    for i, weight in enumerate(weights):
        lanes[i % 32] += weight
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0]


@pytest.mark.parametrize("n", [1, 31, 100, 512, 2000])
def test_sums_are_added_in_the_order_of_all_implementations(n):
    """Bit for bit; other orders round otherwise, so the comparison can fail."""
    weights = np.exp(np.random.default_rng(n).normal(0, 4, n)).astype(np.float32)
    expected = running_sums(weights)
    np.testing.assert_array_equal(jax.jit(_running_sums)(weights[None])[0], expected)
    blocks = np.pad(weights, (0, -n % DRAW_BLOCK)).reshape(1, -1, DRAW_BLOCK)
    of_blocks = [block_sum(block) for block in blocks[0]]
    np.testing.assert_array_equal(jax.jit(_block_sums)(blocks)[0], of_blocks)
    assert (np.diff(expected) >= 0).all()
    if n >= 512:
        assert (expected != np.cumsum(weights, dtype=np.float32)).any()
        assert of_blocks[0] != np.cumsum(blocks[0, 0], dtype=np.float32)[-1]


def test_rounding_of_the_running_sum_never_picks_an_excluded_token():
    """Numbers around every sum at which it steps, and between."""
    rng = np.random.default_rng(0)
    weights = np.zeros(2**13, np.float32)
    weights[rng.choice(2**13, 50, replace=False)] = rng.random(50)
    sums = np.unique(running_sums(weights))
    numbers = np.concatenate([np.nextafter(u, d) for u in [sums / sums[-1]] for d in (np.float32(0), u, np.float32(1))])
    numbers = numbers[numbers < 1]
    picked = np.asarray(jax.vmap(_pick, in_axes=(None, 0))(jnp.asarray(weights)[None], jnp.asarray(numbers)[:, None]))
    assert (weights[picked] > 0).all()
    assert len(np.unique(picked)) == 50


@pytest.mark.parametrize("temperature", [1e-6, 1e-36, 1e-300, 1e300])
def test_extreme_temperatures(temperature):
    """No overflow turns into NaN: almost 0 is greedy, almost infinite is flat over the possible tokens."""
    rows = 64
    logits = jnp.tile(jnp.array([5e3, 1e4, -1e4, -jnp.inf]), (rows, 1))
    batch = SamplingBatch.of([SamplingParams(temperature, seed=-i) for i in range(rows)])
    assert set(draw(logits, batch, jnp.arange(rows)).tolist()) == ({1} if temperature < 1 else {0, 1, 2})


def test_logits_that_are_not_finite_give_no_token():
    logits = jnp.zeros((5, 700)).at[0, 3].set(jnp.nan).at[1, 4].set(jnp.inf).at[2].set(-jnp.inf).at[3, 5].set(-jnp.inf)
    for temperature in (0.0, 1.0):
        tokens = draw(logits, SamplingBatch.of([SamplingParams(temperature=temperature)] * 5), jnp.arange(5))
        assert (np.asarray(tokens) >= 0).tolist() == [False, False, False, True, True]

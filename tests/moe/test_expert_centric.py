"""The expert-centric path: its packing, and that it computes the same."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.experts import Shape, down_oracle, hidden_oracle, random_problem

from north_jax import moe
from north_jax.moe.expert_centric import TILE_TOKENS, grouped_matmul, grouped_matmul_reference, pack


def relative(a, b):
    return np.linalg.norm(np.asarray(a.astype(jnp.float32)) - b) / np.linalg.norm(b)


@pytest.mark.parametrize("hot", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", [Shape(1, 2, 5, 64, 32), Shape(40, 3, 7, 64, 32), Shape(64, 1, 2, 64, 32)], ids=str)
def test_every_pair_has_a_row_of_a_tile_of_its_expert(shape, hot):
    experts = np.asarray(random_problem(shape, "bfloat16", seed=1, hot=hot).experts)
    packing = jax.jit(pack, static_argnums=1)(experts, shape.experts)
    place, token, tiles = (np.asarray(array) for array in packing)
    assert len(np.unique(place)) == place.size
    for (row, slot), where in np.ndenumerate(place):
        assert token[where] == row
        assert tiles[where // TILE_TOKENS] == experts[row, slot]
    padding = np.setdiff1d(np.arange(token.size), place)
    assert (token[padding] == shape.tokens).all()
    used = tiles >= 0
    assert used[: used.sum()].all()
    counts = np.bincount(experts.reshape(-1), minlength=shape.experts)
    assert used.sum() == np.ceil(counts / TILE_TOKENS).sum()


@pytest.mark.parametrize("shape", [Shape(3, 2, 5, 96, 64), Shape(33, 3, 6, 64, 32)], ids=str)
def test_it_computes_the_same(shape):
    problem = random_problem(shape, "bfloat16", seed=2, hot=0.3)
    expected = down_oracle(problem, hidden_oracle(problem))

    @jax.jit
    def every_way(*operands):
        paths = (moe.warp_decode, moe.expert_centric, partial(moe.expert_centric, quantize_activations=True))
        return [path(*operands) for path in paths]

    ours, theirs, rounded = (relative(found, expected) for found in every_way(*problem.operands()))
    assert ours < theirs < 8e-3
    assert 5 * theirs < rounded < 0.1


def test_the_grouped_product_equals_its_reference():
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((3 * TILE_TOKENS, 96)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((4, 64, 96)), jnp.bfloat16)
    experts = jnp.asarray([2, 0, -1], jnp.int32)
    used = 2 * TILE_TOKENS
    found = grouped_matmul(x, experts, weights)[:used]
    expected = np.asarray(grouped_matmul_reference(x, experts, weights)[:used], np.float32)
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=2**-7, atol=1e-3)

"""The experts of many tokens: the kernels in the interpreter, against the functions that do the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from support import tiny_config

from north_jax.kernels.selection import TOKENS, Selected, arrange, select, selects
from north_jax.kernels.tiling import Tiling
from north_jax.kernels.work_items import NOTHING, sort_rows, sorted_rows, work_items
from north_jax.moe import select_experts

EXPERTS, TOP, BLOCKS = 128, 8, 2
COUNT = 2 * TOKENS
COLUMNS = 512, 256
VALID = np.arange(COUNT) < COUNT - 5
INTERPRET = plgpu.InterpretGPUParams()


@pytest.fixture(scope="module")
def logits():
    rng = np.random.default_rng(0)
    drawn = (rng.normal(size=(COUNT, EXPERTS)) + 2 * rng.normal(size=EXPERTS)).astype(np.float32)
    drawn[:, 3] = 9  # more than the others
    drawn[:, 5] = drawn[:, 7]  # the first of equal ones counts
    drawn[:, 90:] = np.round(drawn[:, 90:])
    drawn[:, 20:110] -= 50  # never: the interpreter takes a while for every tile
    return jnp.asarray(drawn)


@pytest.fixture(scope="module")
def expected(logits):
    """Experts of all tokens, and of what does not count the number of experts."""
    experts = np.asarray(jax.lax.top_k(logits, TOP)[1])
    return np.where(VALID[:, None], experts, EXPERTS)


@pytest.mark.parametrize(("function", "normalized"), [("sigmoid", True), ("softmax", False)])
def test_select(logits, expected, function, normalized):
    valid = jnp.asarray(VALID)
    run = {"softmax": function == "softmax", "normalized": normalized, "interpret": INTERPRET}
    selected = select(logits, valid, TOP, **run)
    config = tiny_config(
        num_experts=EXPERTS, num_experts_per_tok=TOP, expert_selection_fn=function, norm_topk_prob=normalized
    )
    np.testing.assert_array_equal(selected.experts, expected)
    np.testing.assert_allclose(selected.weights, select_experts(config, logits)[1], atol=1e-6)
    ranks, counts = ranked(expected)
    np.testing.assert_array_equal(np.asarray(selected.rank)[VALID], ranks[VALID])
    np.testing.assert_array_equal(selected.counts, counts)


def ranked(experts):
    member = (experts[:, :, None] == np.arange(EXPERTS)).any(axis=1).reshape(-1, TOKENS, EXPERTS).astype(np.int32)
    earlier = (np.cumsum(member, axis=1) - member).reshape(-1, EXPERTS)
    return np.take_along_axis(earlier, np.minimum(experts, EXPERTS - 1), axis=1), member.sum(axis=1)


def assert_same_lists(lists, groups, tiling, size, columns, blocks):
    """The lists of both products are those of `work_items`; what an item without work holds besides is anything."""
    for number, work in zip(columns, lists, strict=True):
        right = work_items(groups, tiling, rows=size, columns=number, blocks=blocks)
        steps = int(work.steps[0])
        assert steps == int(right.steps[0])
        written, dealt = (np.asarray(items)[: steps * blocks] for items in (work.items, right.items))
        np.testing.assert_array_equal(written[:, 0], dealt[:, 0])
        held = dealt[:, 0] != NOTHING
        np.testing.assert_array_equal(written[held], dealt[held])


@pytest.mark.parametrize("tiling", [Tiling(), Tiling(row_warpgroups=1, columns=128, align=8)])
def test_arrange(expected, tiling):
    ranks, counts = ranked(expected)
    selected = Selected(jnp.asarray(expected), jnp.zeros((COUNT, TOP)), jnp.asarray(ranks), jnp.asarray(counts))
    row, lists = arrange(selected, tiling, columns=COLUMNS, blocks=BLOCKS, interpret=INTERPRET)
    groups, rows = sort_rows(jnp.asarray(expected).reshape(-1), EXPERTS, tiling)
    np.testing.assert_array_equal(row, rows)
    size = sorted_rows(COUNT * TOP, EXPERTS, tiling)
    assert_same_lists(lists, groups, tiling, size, COLUMNS, BLOCKS)


def test_what_it_does_not_take():
    assert selects(8192, 128)
    assert not selects(8200, 128)
    assert not selects(8192, 64)


def test_they_lower_for_cuda_without_a_gpu():
    def both(logits, valid):
        selected = select(logits, valid, TOP, softmax=False, normalized=False)
        return arrange(selected, Tiling(cluster=2), columns=(1536, 2048), blocks=66)

    traced = jax.jit(both).trace(jnp.zeros((4096, EXPERTS)), jnp.ones(4096, bool))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "tiling"),
    [(1024, Tiling(row_warpgroups=1, columns=256, stages=5, align=8)), (8192, Tiling()), (32768, Tiling())],
)
def test_on_a_gpu(tokens, tiling):
    logits = jax.random.normal(jax.random.key(0), (tokens, EXPERTS)) + jnp.linspace(0, 2, EXPERTS)
    valid = jnp.arange(tokens) < tokens - 70
    columns, blocks = (1536, 2048), 132
    selected = jax.jit(select, static_argnums=2, static_argnames=("softmax", "normalized"))(
        logits, valid, TOP, softmax=False, normalized=True
    )
    experts = np.where(valid[:, None], jax.lax.top_k(logits, TOP)[1], EXPERTS)
    np.testing.assert_array_equal(selected.experts, experts)
    row, lists = jax.jit(lambda selected: arrange(selected, tiling, columns=columns, blocks=blocks))(selected)
    groups, rows = sort_rows(jnp.asarray(experts).reshape(-1), EXPERTS, tiling)
    np.testing.assert_array_equal(row, rows)
    size = sorted_rows(tokens * TOP, EXPERTS, tiling)
    assert_same_lists(lists, groups, tiling, size, columns, blocks)

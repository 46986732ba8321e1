"""Rows at their experts, and back: the kernels in the interpreter, against the fusions that do the same."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from north_jax.kernels.placement import place_rows, places
from north_jax.kernels.row_moves import spread_rows, sum_rows
from north_jax.kernels.tiling import Tiling
from north_jax.kernels.work_items import NOTHING, sort_rows, sorted_rows, work_items

TILING = Tiling(row_warpgroups=1, columns=128, stages=8, align=8)
INTERPRET = plgpu.InterpretGPUParams()
TOKENS, EXPERTS, TOP, WIDTH = 7, 9, 3, 256
COLUMNS = 256, 128


@pytest.fixture(scope="module")
def operands():
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(TOKENS, WIDTH)), jnp.bfloat16)
    experts = np.argsort(rng.random((TOKENS, EXPERTS)))[:, :TOP].astype(np.int32)
    experts[:, 0] = 4  # more than the others
    experts[:, 1:] = np.where(experts[:, 1:] == 4, 0, experts[:, 1:]) + np.array([0, EXPERTS])
    return h, jnp.asarray(experts), jnp.arange(TOKENS) < TOKENS - 1


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [3])
def test_places(operands, blocks):
    h, experts, valid = operands
    count = 2 * EXPERTS
    sizes = {"rows": sorted_rows(TOKENS * TOP, count, TILING), "columns": COLUMNS, "blocks": blocks}
    assert places(TOKENS, count, TILING, **sizes)
    placed = place_rows(h, experts, valid, count, TILING, **sizes, interpret=INTERPRET)
    groups, row = sort_rows(jnp.where(valid[:, None], experts, count).reshape(-1), count, TILING)
    row = np.asarray(row)
    np.testing.assert_array_equal(placed.row, row)
    held = row < sizes["rows"]
    np.testing.assert_array_equal(np.asarray(placed.x)[row[held]], np.asarray(h)[np.arange(TOKENS * TOP)[held] // TOP])
    for columns, work in zip(COLUMNS, placed.work, strict=True):
        expected = work_items(groups, TILING, rows=sizes["rows"], columns=columns, blocks=blocks)
        steps = int(work.steps[0])
        assert steps == int(expected.steps[0])
        dealt, right = (
            sorted(tuple(item) for item in np.asarray(items).tolist() if item[0] != NOTHING)
            for items in (work.items[: steps * blocks], expected.items)
        )
        assert dealt == right


def test_what_it_does_not_take():
    sizes = {"rows": 4096, "columns": (1536, 2048), "blocks": 132}
    assert places(512, 128, TILING, **sizes)
    assert not places(529, 128, TILING, **sizes)
    assert not places(512, 128, Tiling(), **sizes)
    assert not places(2, 8, TILING, **sizes | {"blocks": 1})


def test_rows_go_to_their_places_and_sums_come_back(operands):
    h, _, _ = operands
    rows = 32
    rng = np.random.default_rng(1)
    row = rng.permutation(rows)[: TOKENS * TOP].astype(np.int32)
    row[TOP : 2 * TOP] = rows  # a token without rows
    spread = np.asarray(spread_rows(h, jnp.asarray(row), rows, interpret=INTERPRET))
    held = row < rows
    np.testing.assert_array_equal(spread[row[held]], np.asarray(h)[np.arange(TOKENS * TOP)[held] // TOP])
    y = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    weights = rng.random((TOKENS, TOP)).astype(np.float32)
    arrays = jnp.asarray(y, jnp.bfloat16), jnp.asarray(row), jnp.asarray(weights)
    y = np.asarray(arrays[0], np.float32)
    sums = (y[np.minimum(row, rows - 1)].reshape(TOKENS, TOP, WIDTH) * weights[..., None]).sum(axis=1)
    sums[1] = 0
    result = np.asarray(sum_rows(*arrays, interpret=INTERPRET), np.float32)
    assert np.abs(result - sums).max() < 2**-8 * np.abs(sums).max()
    one, other = h + 1, jnp.where(jnp.arange(TOKENS)[:, None] == 1, jnp.nan, h)
    result = np.asarray(sum_rows(*arrays, (one, other), interpret=INTERPRET), np.float32)
    sums += np.asarray(one, np.float32) + np.nan_to_num(np.asarray(other, np.float32))
    assert np.abs(result - sums).max() < 2**-8 * np.abs(sums).max()

"""Rows sorted by group, and the tiles of a grouped matmul: complete, disjoint, evenly dealt."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from north_jax.kernels import work_items as module
from north_jax.kernels.tiling import Tiling
from north_jax.kernels.work_items import NOTHING, Groups, sort_rows, sorted_rows, work_items

TILINGS = [
    Tiling(row_warpgroups=1, columns=128, align=8),
    Tiling(row_warpgroups=2, columns=128, align=64),
    Tiling(row_warpgroups=2, columns=256, align=16),
    Tiling(row_warpgroups=2, columns=128, align=8, cluster=2),
]
deal = jax.jit(work_items, static_argnums=1, static_argnames=("rows", "columns", "blocks"))
COLUMNS = 768  # three pairs of 128 columns: odd for a cluster, so that a turn holds a tile and nothing


def assignments(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Groups of 700 assignments over 9 groups; 9 is none of them."""
    if kind == "random":
        return rng.integers(0, 10, 700)
    if kind == "one":
        return np.full(700, 4)
    if kind == "none":
        return np.full(700, 9)
    return np.repeat(np.arange(10), 70)  # of which 64 fill a tile and 6 do not


@pytest.mark.parametrize("pairwise", [True, False])
@pytest.mark.parametrize("kind", ["random", "one", "none", "even"])
@pytest.mark.parametrize("tiling", TILINGS)
def test_rows_are_sorted_stably_from_aligned_starts(kind, tiling, pairwise, monkeypatch):
    if not pairwise:
        monkeypatch.setattr(module, "_PAIRWISE", 0)
    group = assignments(kind, np.random.default_rng(0)).astype(np.int32)
    groups, row = (np.asarray(a) if not isinstance(a, Groups) else a for a in sort_rows(jnp.asarray(group), 9, tiling))
    start, size = map(np.asarray, groups)
    end = sorted_rows(700, 9, tiling)
    np.testing.assert_array_equal(size, np.bincount(group, minlength=10)[:9])
    assert (start % tiling.align == 0).all()
    assert (start[1:] >= start[:-1] + size[:-1]).all()
    assert start[-1] + -(-size[-1] // tiling.rows) * tiling.rows <= end, "a tile reaches beyond the end"
    for number in range(9):
        mine = row[group == number]
        np.testing.assert_array_equal(mine, start[number] + np.arange(size[number]))
    assert (row[group == 9] == end).all()


@pytest.mark.parametrize("blocks", [1, 5, 132])
@pytest.mark.parametrize("kind", ["random", "one", "none", "even"])
@pytest.mark.parametrize("tiling", TILINGS)
def test_every_tile_is_dealt_once_and_evenly(kind, tiling, blocks):
    group = assignments(kind, np.random.default_rng(1)).astype(np.int32)
    groups, _ = sort_rows(jnp.asarray(group), 9, tiling)
    rows = sorted_rows(700, 9, tiling)
    work = deal(groups, tiling, rows=rows, columns=COLUMNS, blocks=blocks)
    items, steps = np.asarray(work.items), int(work.steps[0])
    parts = tiling.row_warpgroups
    turns = items.reshape(-1, blocks, parts, 4)
    assert (turns[steps // parts :, ..., 0] == NOTHING).all(), "work after the last step"
    across = COLUMNS // (tiling.columns * tiling.cluster)
    start, size = map(np.asarray, groups)
    expected = {
        (e, start[e] + first, min(tiling.rows, size[e] - first), column)
        for e in range(9)
        for first in range(0, size[e], tiling.rows)
        for column in range(across)
    }
    dealt = [tuple(int(v) for v in item) for item in items if item[0] != NOTHING]
    assert len(dealt) == len(set(dealt)) and set(dealt) == expected
    # A turn is a full tile, or as many small ones as fit into its time.
    cost = np.where(turns[..., 0] == NOTHING, 0, np.where(turns[..., 2] > 64, parts, 1))
    assert cost.sum(axis=-1).max(initial=0) <= parts
    busy = (turns[..., 0] != NOTHING).any(axis=(0, 2)).sum() if steps else 0
    assert busy == min(blocks, -(-cost.sum() // parts) if kind != "even" else busy)


@pytest.mark.parametrize(
    ("field", "value"),
    [("row_warpgroups", 3), ("columns", 264), ("stages", 1), ("align", 4), ("cluster", 4)],
)
def test_a_tiling_refuses_what_the_kernel_does_not_do(field, value):
    with pytest.raises(ValueError, match=field):
        Tiling(**{field: value})

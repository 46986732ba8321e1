"""The grouped matmul: the kernel itself on a CPU, in the interpreter, and on a GPU at full size."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from north_jax.bench.grouped_matmul import Case
from north_jax.bench.grouped_matmul import measure as measure_grouped
from north_jax.config import Config
from north_jax.geometries import NORTH
from north_jax.kernels.grouped_matmul import grouped_matmul, grouped_matmul_reference
from north_jax.kernels.tiling import Tiling
from north_jax.kernels.work_items import WorkItems, sort_rows, sorted_rows, work_items
from north_jax.packed.experts import tilings_for

GROUPS = 3
sort = jax.jit(sort_rows, static_argnums=(1, 2))
deal = jax.jit(work_items, static_argnums=1, static_argnames=("rows", "columns", "blocks"))
reference = jax.jit(grouped_matmul_reference, static_argnames="gated")


def operands(tiling, *, assignments, depth, columns, seed=0):
    """Sorted rows, matrices and groups; the last of the groups is empty, some assignments belong to none."""
    rng = np.random.default_rng(seed)
    group = rng.choice(np.array([0, 1, GROUPS], np.int32), assignments, p=[0.3, 0.6, 0.1])
    groups, row = sort(group, GROUPS, tiling)
    row = np.asarray(row)
    rows = sorted_rows(assignments, GROUPS, tiling)
    mine = group < GROUPS
    # What lies between groups is NaN: it must not reach any row that counts.
    x = np.full((rows, depth), np.nan, np.float32)
    x[row[mine]] = rng.normal(size=(assignments, depth))[mine]
    weights = rng.normal(size=(GROUPS, columns, depth)) * depth**-0.5
    return jnp.asarray(x.astype(jnp.bfloat16)), jnp.asarray(weights.astype(jnp.bfloat16)), groups, row[mine]


@pytest.mark.parametrize(
    ("tiling", "gated", "assignments", "depth", "columns"),
    [
        (Tiling(row_warpgroups=1, columns=128, stages=2, align=8), True, 50, 128, 256),
        (Tiling(row_warpgroups=1, columns=128, stages=2, align=8, depth=128, least=16), False, 60, 256, 128),
        (Tiling(row_warpgroups=2, columns=128, stages=3, align=16), False, 230, 192, 128),
        (Tiling(row_warpgroups=2, columns=256, stages=2, align=64), True, 150, 64, 256),
        # Slow: the interpreter runs blocks as threads; on two cores a pair may have too few and wait for ever.
        pytest.param(
            *(Tiling(row_warpgroups=2, columns=128, stages=3, align=64, cluster=2), True, 150, 128, 256),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_kernel_in_the_interpreter(tiling, gated, assignments, depth, columns):
    x, weights, groups, rows = operands(tiling, assignments=assignments, depth=depth, columns=columns)
    blocks = 2
    work = deal(groups, tiling, rows=x.shape[0], columns=columns, blocks=blocks // tiling.cluster)
    interpret = plgpu.InterpretGPUParams()
    run = jax.jit(partial(grouped_matmul, tiling=tiling, gated=gated, blocks=blocks, interpret=interpret))
    result = np.asarray(run(x, weights, work), np.float32)
    expected = np.asarray(reference(np.nan_to_num(x), weights, groups, gated=gated), np.float32)
    assert np.abs(result - expected)[rows].max() <= 2**-7 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": (64, 96)}, r"x is \[64, 96\]"),
        ({"x": (64, 96), "weights": (3, 256, 96)}, "K is 96"),
        ({"weights": (3, 192, 128)}, "N is 192"),
        ({"dtype": jnp.float32}, "float32"),
        ({"tiling": Tiling(columns=128, stages=12)}, "shared memory"),
        ({"tiling": Tiling(columns=80)}, "80"),
        ({"blocks": 3, "tiling": Tiling(columns=128, cluster=2)}, "3 blocks"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    tiling = change.get("tiling", Tiling(columns=128))
    dtype = change.get("dtype", jnp.bfloat16)
    x = jnp.zeros(change.get("x", (64, 128)), dtype)
    weights = jnp.zeros(change.get("weights", (3, 256, 128)), dtype)
    work = WorkItems(jnp.zeros((2, 4), jnp.int32), jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match=message):
        grouped_matmul(x, weights, work, tiling, gated=False, blocks=change.get("blocks", 2))


def test_it_lowers_for_cuda_without_a_gpu():
    tiling = Tiling()
    x, weights, groups, _ = operands(tiling, assignments=100, depth=128, columns=256)
    work = deal(groups, tiling, rows=x.shape[0], columns=256, blocks=132)
    f = jax.jit(partial(grouped_matmul, tiling=tiling, gated=True, blocks=132))
    assert "mosaic_gpu" in f.trace(x, weights, work).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("assignments", [1024, 16384, 65536])
@pytest.mark.parametrize("product", ["gated", "down"])
def test_the_tilings_in_use_on_a_gpu(product, assignments):
    """`measure` raises where a result differs from dense products."""
    config = Config.from_json(NORTH)
    columns, depth = (2048, 768) if product == "down" else (1536, 2048)
    weights = jax.random.normal(jax.random.key(0), (config.num_experts, columns, depth), jnp.bfloat16) * depth**-0.5
    tilings = tilings_for(assignments, config.num_experts)
    tiling = tilings.down if product == "down" else tilings.up
    print(measure_grouped(config, Case(product, assignments, "random", tiling), weights))

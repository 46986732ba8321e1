"""Grouped matrix product on Hopper: rows sorted by group, each times its group's matrix, SwiGLU fused where asked.

One block a multiprocessor walks its list of tiles (`work_items`). A producer warpgroup streams slices of both operands
through a ring in shared memory and runs ahead over the ends of tiles; one or two consumer warpgroups multiply 64 rows
each, all columns of the tile, and finish, round and store their part by themselves. So while one of them is in its
epilogue the other has the tensor cores, and the ring is full when both begin the next tile.

Ragged ends cost no masks. Groups begin at multiples of `Tiling.align` rows, and rows are stored so many at a time: what
lies between a group's end and the next multiple is room, never read. A warpgroup without rows skips its products.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .shared_memory import ROW_VALUES, accumulator, tiles
from .tiling import WARPGROUP_ROWS, Tiling
from .work_items import Groups, WorkItems

_STORE_COLUMNS = ROW_VALUES  # of a store
_STORE_SLOTS = 2  # stores of a warpgroup that may be under way
_PRODUCER_REGISTERS = 40
_CONSUMER_REGISTERS = {1: 224, 2: 232}  # by consumer warpgroups


def grouped_matmul(
    x: jax.Array,
    weights: jax.Array,
    work: WorkItems,
    tiling: Tiling,
    *,
    gated: bool,
    blocks: int,
    interpret: Any = None,
) -> jax.Array:
    """Multiplies rows by the matrix of their group, on a Hopper GPU.

    Args:
      x: [R, K] bfloat16 or float16, sorted by group as `work_items.sort_rows` says. K is a multiple of 64.
      weights: [E, N, K], the dtype of x. `gated`: rows of all gates, then rows of all ups.
      work: the list of tiles for these groups, this tiling and so many blocks.
      tiling: sizes of the kernel's tiles.
      gated: whether the result is silu(gate) · up.
      blocks: of the grid, one a multiprocessor.
      interpret: `plgpu.InterpretGPUParams()` to run on a CPU.

    Returns:
      [R, N], or [R, N / 2] where `gated`, in x's dtype, accumulated in float32. Rows of no group hold anything.

    Raises:
      ValueError: an operand's shape or dtype does not fit the tiling; the message says which.
    """
    _check(x, weights, tiling, gated=gated, blocks=blocks)
    groups, columns, depth = weights.shape
    if gated:
        weights = weights.reshape(groups, 2, columns // 2, depth)
    out_columns = columns // 2 if gated else columns
    warpgroups = tiling.row_warpgroups
    clusters: dict[str, Any] = (
        {"cluster": (tiling.cluster,), "cluster_names": ("cluster",)} if tiling.cluster > 1 else {}
    )
    consumed: Any = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=tiling.stages)
    if tiling.cluster > 1:
        consumed = plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=warpgroups, num_barriers=tiling.stages
        )
    kernel = plgpu.kernel(
        functools.partial(_kernel, tiling=tiling, gated=gated, blocks=blocks // tiling.cluster),
        out_type=jax.ShapeDtypeStruct((x.shape[0], out_columns), x.dtype),
        scratch_types=[
            tiles((tiling.stages, warpgroups, WARPGROUP_ROWS, tiling.depth), x.dtype),
            tiles((tiling.stages, tiling.columns, tiling.depth), x.dtype),
            tiles((warpgroups, _STORE_SLOTS, WARPGROUP_ROWS, _STORE_COLUMNS), x.dtype),
            plgpu.Barrier(num_arrivals=warpgroups + (2 if gated else 1), num_barriers=tiling.stages),
            consumed,
        ],
        grid=(blocks // tiling.cluster,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        **clusters,
    )
    return kernel(work.items, work.steps, x, weights)


def _kernel(
    items: Any,  # [steps · blocks, 4] int32, global
    steps: Any,  # [1] int32, global
    x: Any,  # [R, K], global
    weights: Any,  # [E, N, K] or [E, 2, N / 2, K], global
    out: Any,  # [R, N or N / 2], global
    x_ring: Any,  # [stages, warpgroups, 64, 64], shared
    w_ring: Any,  # [stages, columns, 64], shared
    staging: Any,  # [warpgroups, slots, 64, 64], shared
    landed: Any,  # [stages] barriers: a stage is in shared memory
    consumed: Any,  # [stages] barriers: a stage may be overwritten
    *,
    tiling: Tiling,
    gated: bool,
    blocks: int,
) -> None:
    warpgroups, stages, columns = tiling.row_warpgroups, tiling.stages, tiling.columns
    half = columns // 2
    depth_steps = x.shape[1] // tiling.depth
    warpgroup = lax.axis_index("warpgroup")
    block = lax.axis_index("block")
    member = lax.axis_index("cluster") if tiling.cluster > 1 else jnp.int32(0)

    def item(step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """A line of this block's list; the one after the last is another block's, and is not used."""
        turn = lax.div(step, jnp.int32(warpgroups))
        line = (turn * blocks + block) * warpgroups + lax.rem(step, jnp.int32(warpgroups))
        line = jnp.minimum(line, items.shape[0] - 1)
        row = pl.multiple_of(items[line, 1], tiling.align)
        return items[line, 0], row, items[line, 2], items[line, 3] * tiling.cluster + member

    def produce(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        loaded, group, row, rows, column = carry
        following = item(step + 1)

        @pl.when(group >= 0)
        def load_tile() -> None:
            @pl.loop(0, depth_steps)
            def load_stage(k: jax.Array) -> None:
                stage = lax.rem(loaded + k, jnp.int32(stages))
                plgpu.barrier_wait(consumed.at[stage])
                depth = pl.ds(pl.multiple_of(k * tiling.depth, tiling.depth), tiling.depth)

                def load_rows(i: int, count: int) -> None:
                    plgpu.copy_gmem_to_smem(
                        x.at[pl.ds(pl.multiple_of(row + i * WARPGROUP_ROWS, tiling.align), count), depth],
                        x_ring.at[stage, i] if count == WARPGROUP_ROWS else x_ring.at[stage, i, pl.ds(0, count)],
                        landed.at[stage],
                        collective_axes="cluster" if tiling.cluster > 1 else None,
                    )

                if tiling.least < WARPGROUP_ROWS:  # what was there before makes rows that are not stored
                    pl.when(rows <= tiling.least)(lambda: load_rows(0, tiling.least))
                    pl.when(rows > tiling.least)(lambda: load_rows(0, WARPGROUP_ROWS))
                else:
                    for i in range(warpgroups):
                        load_rows(i, WARPGROUP_ROWS)
                if gated:
                    for i in range(2):
                        plgpu.copy_gmem_to_smem(
                            weights.at[group, i, pl.ds(pl.multiple_of(column * half, half), half), depth],
                            w_ring.at[stage, pl.ds(i * half, half)],
                            landed.at[stage],
                        )
                else:
                    plgpu.copy_gmem_to_smem(
                        weights.at[group, pl.ds(pl.multiple_of(column * columns, columns), columns), depth],
                        w_ring.at[stage],
                        landed.at[stage],
                    )

        return jnp.where(group >= 0, loaded + depth_steps, loaded), *following

    def consume(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        loaded, group, row, rows, column = carry
        following = item(step + 1)
        mine = rows - warpgroup * WARPGROUP_ROWS  # how many of this warpgroup's rows count

        @pl.when((group >= 0) & (mine > 0))
        def finish_tile() -> None:
            def multiply(sums: Any) -> jax.Array:
                @pl.loop(0, depth_steps)
                def multiply_stage(k: jax.Array) -> None:
                    stage = lax.rem(loaded + k, jnp.int32(stages))
                    plgpu.barrier_wait(landed.at[stage])
                    plgpu.wgmma(sums, x_ring.at[stage, warpgroup], w_ring.at[stage].transpose((1, 0)))
                    plgpu.wgmma_wait(1)

                    @pl.when(k > 0)
                    def release_last() -> None:  # the product before this one is done
                        plgpu.barrier_arrive(consumed.at[lax.rem(loaded + k - 1, jnp.int32(stages))])

                result = sums[...]
                plgpu.barrier_arrive(consumed.at[lax.rem(loaded + depth_steps - 1, jnp.int32(stages))])
                return result

            result = pl.run_scoped(multiply, accumulator(WARPGROUP_ROWS, columns))
            if gated:
                gate, up = result[:, :half], result[:, half:]
                result = gate * up / (1.0 + jnp.exp(-gate))
            store(result.astype(out.dtype), row + warpgroup * WARPGROUP_ROWS, mine, column)

        @pl.when((group >= 0) & (mine <= 0))
        def pass_by() -> None:  # the stages pass by
            @pl.loop(0, depth_steps)
            def skip_stage(k: jax.Array) -> None:
                stage = lax.rem(loaded + k, jnp.int32(stages))
                plgpu.barrier_wait(landed.at[stage])
                plgpu.barrier_arrive(consumed.at[stage])

        return jnp.where(group >= 0, loaded + depth_steps, loaded), *following

    def store(result: jax.Array, row: jax.Array, rows: jax.Array, column: jax.Array) -> None:
        width = result.shape[1]
        parts = width // _STORE_COLUMNS
        # Slots alternate over the ends of tiles only where a tile fills them all the same number of times.
        under_way = _STORE_SLOTS - 1 if parts % _STORE_SLOTS == 0 else 0
        for i in range(parts):
            slot = staging.at[warpgroup, i % _STORE_SLOTS]
            plgpu.wait_smem_to_gmem(under_way, wait_read_only=True)
            slot[...] = result[:, i * _STORE_COLUMNS : (i + 1) * _STORE_COLUMNS]
            plgpu.commit_smem()
            for first in range(0, WARPGROUP_ROWS, tiling.align):
                _store_rows(slot, out, first, tiling.align, row, rows, column * width + i * _STORE_COLUMNS)
            plgpu.commit_smem_to_gmem_group()

    count = steps[0]
    initial = (jnp.int32(0), *item(jnp.int32(0)))

    @pl.when(warpgroup < warpgroups)
    def consumers() -> None:
        plgpu.set_max_registers(_CONSUMER_REGISTERS[warpgroups], action="increase")
        for stage in range(stages):
            plgpu.barrier_arrive(consumed.at[stage])
        lax.fori_loop(0, count, consume, initial)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == warpgroups)
    def producer() -> None:
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        lax.fori_loop(0, count, produce, initial)
        for stage in range(stages):  # nobody leaves while others may still arrive here
            plgpu.barrier_wait(consumed.at[stage])


def _store_rows(
    slot: Any, out: Any, first: int, count: int, row: jax.Array, rows: jax.Array, column: jax.Array
) -> None:
    """Begins to store `count` rows of a slot, from `first` on, if the first of them counts; commits nothing."""

    @pl.when(first < rows)
    def store_rows() -> None:
        plgpu.copy_smem_to_gmem(
            slot.at[pl.ds(first, count)],
            out.at[
                pl.ds(pl.multiple_of(row + first, count), count),
                pl.ds(pl.multiple_of(column, _STORE_COLUMNS), _STORE_COLUMNS),
            ],
            commit_group=False,
        )


def grouped_matmul_reference(x: jax.Array, weights: jax.Array, groups: Groups, *, gated: bool) -> jax.Array:
    """`grouped_matmul` in pure JAX, by a dense product with every group: for tests. Rows of no group are 0."""
    row = jnp.arange(x.shape[0])[:, None]
    member = (row >= groups.start) & (row < groups.start + groups.size)  # [R, E]
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    products = jnp.einsum("rk,enk->ren", x, weights, precision=precision, preferred_element_type=jnp.float32)
    result = jnp.sum(jnp.where(member[..., None], products, 0), axis=1)
    if gated:
        gate, up = jnp.split(result, 2, axis=-1)
        result = jax.nn.silu(gate) * up
    return result.astype(x.dtype)


def _check(x: jax.Array, weights: jax.Array, tiling: Tiling, *, gated: bool, blocks: int) -> None:
    if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != weights.shape[2]:
        raise ValueError(
            f"grouped_matmul: x is {list(x.shape)} and weights {list(weights.shape)}, not [R, K], [E, N, K]"
        )
    if x.dtype != weights.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"grouped_matmul: x is {x.dtype} and weights {weights.dtype}, expected the same 16-bit type")
    if x.shape[1] % tiling.depth:
        raise ValueError(f"grouped_matmul: K is {x.shape[1]}, expected a multiple of {tiling.depth}")
    width = tiling.columns * tiling.cluster
    if weights.shape[1] % width or (gated and tiling.columns % (2 * _STORE_COLUMNS)):
        raise ValueError(f"grouped_matmul: N is {weights.shape[1]}, expected a multiple of {width} columns")
    if tiling.columns % _STORE_COLUMNS:
        raise ValueError(
            f"grouped_matmul: tiles have {tiling.columns} columns, expected a multiple of {_STORE_COLUMNS}"
        )
    if blocks % tiling.cluster:
        raise ValueError(f"grouped_matmul: {blocks} blocks do not divide into clusters of {tiling.cluster}")
    staging = 2 * tiling.row_warpgroups * _STORE_SLOTS * WARPGROUP_ROWS * _STORE_COLUMNS
    if not tiling.fits(staging):
        raise ValueError(f"grouped_matmul: {tiling} needs more shared memory than a block has")

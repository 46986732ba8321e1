"""Grouped matrix product on Hopper with the weights as the tensor cores' rows, and the activations as their columns.

`grouped_matmul` takes 64 activation rows at a time whether a group has them or not. Here a tile has as many as its
group, in steps of `StreamTiling.grain`: a product of few rows loads and multiplies few, and a group whose rows fit into
one tile has its weights streamed once. A consumer warpgroup multiplies 128 rows of the weights: 64 gates and their 64
ups, or two blocks of 64.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .shared_memory import ROW_VALUES, accumulator, tiles
from .tiling import SMEM_BYTES
from .work_items import NOTHING, Groups, WorkItems, _before

_BLOCK = 64  # rows of the weights of one product, the least that Hopper's tensor cores take
_BLOCKS = 2  # of a warpgroup
_PRODUCER_REGISTERS = 40
_CONSUMER_REGISTERS = {1: 232, 2: 232}  # by consumer warpgroups
_RESERVED_BYTES = 3 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class StreamTiling:
    """How a block of the grid divides its work.

    Attributes:
      rows: activation rows that a tile has at most; a multiple of grain.
      grain: a tile loads and multiplies a multiple of so many; a multiple of 8.
      warpgroups: consumers, each of 128 rows of the weights.
      depth: columns of the operands that a stage holds; a multiple of 64.
      stages: of the pipeline in shared memory.
      slots: of a warpgroup, for results on their way out.
      align: groups begin at multiples of it.
    """

    rows: int = 128
    grain: int = 32
    warpgroups: int = 2
    depth: int = 64
    stages: int = 4
    slots: int = 2
    align: int = 8

    def __post_init__(self) -> None:
        if self.rows % self.grain or self.grain % 8 or not 8 <= self.rows <= 256:
            raise ValueError(f"rows must be a multiple of grain, and that of 8, got {self.rows} and {self.grain}")
        if self.depth % ROW_VALUES:
            raise ValueError(f"depth must be a multiple of {ROW_VALUES}, got {self.depth}")

    @property
    def columns(self) -> int:
        """Rows of the weights that a tile covers."""
        return _BLOCKS * _BLOCK * self.warpgroups

    @property
    def shared_bytes(self) -> int:
        """Shared memory for 16-bit operands and results."""
        ring = self.stages * self.depth * (self.rows + self.columns)
        return 2 * (ring + self.warpgroups * self.slots * self.grain * _BLOCK) + _RESERVED_BYTES


def stream_items(groups: Groups, tiling: StreamTiling, *, rows: int, columns: int, blocks: int) -> WorkItems:
    """Deals the tiles of a product out to the blocks of the grid: the largest first, there and back over the blocks.

    A group's rows are divided evenly among as few tiles as hold them.

    Args:
      groups: of the rows.
      tiling: of the kernel.
      rows: of the sorted array, static.
      columns: of the weights, N.
      blocks: of the grid.
    """
    count = groups.size.shape[0]
    across = columns // tiling.columns
    most = min(rows // tiling.rows + count, rows // tiling.align) * across
    turns = -(-most // blocks)
    number = -(-groups.size // tiling.rows)  # [E] tiles of rows
    height = -(-groups.size // jnp.maximum(number, 1))
    height = -(-height // tiling.align) * tiling.align  # [E] rows of a tile
    index = jnp.arange(count)
    first = (height[:, None] > height) | ((height[:, None] == height) & (index[:, None] < index))  # [E, E]: e before f
    begin = jnp.sum(jnp.where(first, number[:, None], 0), axis=0, dtype=jnp.int32) * across
    total = jnp.sum(number, dtype=jnp.int32) * across
    turn, block = jnp.divmod(jnp.arange(turns * blocks, dtype=jnp.int32), blocks)
    place = turn * blocks + jnp.where(turn % 2 == 0, block, blocks - 1 - block)
    mine = (place[:, None] >= begin) & (place[:, None] < begin + number * across)  # [items, E]

    def of(values: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mine, values, 0), axis=1, dtype=jnp.int32)

    tile = place - of(begin)
    down, column = jnp.divmod(tile, across)
    offset = down * of(height)
    items = jnp.stack(
        [
            jnp.where(place < total, of(index.astype(jnp.int32)), NOTHING),
            of(groups.start) + offset,
            jnp.clip(of(groups.size) - offset, 0, of(height)),
            column,
        ],
        axis=1,
    )
    return WorkItems(items, -(-total[None] // blocks))


def stream_rows(assignments: int, groups: int, tiling: StreamTiling) -> int:
    """Rows of an array with `assignments` rows in `groups` groups, aligned, so that no tile reaches beyond its end."""
    most = assignments + min(groups, assignments) * (tiling.align - 1)
    return -(-most // tiling.align) * tiling.align + tiling.grain - tiling.align


def streamed_matmul(
    x: jax.Array,
    weights: jax.Array,
    work: WorkItems,
    tiling: StreamTiling,
    *,
    gated: bool,
    blocks: int,
    interpret: Any = None,
) -> jax.Array:
    """`grouped_matmul`, with the list of `stream_items`."""
    groups, columns, depth = weights.shape
    width = tiling.columns
    if depth % tiling.depth or columns % width or x.shape[1] != depth:
        raise ValueError(f"streamed_matmul: x is {list(x.shape)}, weights {list(weights.shape)}, {tiling}")
    if tiling.shared_bytes > SMEM_BYTES:
        raise ValueError(f"streamed_matmul: {tiling} needs {tiling.shared_bytes} bytes of shared memory")
    if gated:
        weights = weights.reshape(groups, 2, columns // 2, depth)
    out_columns = columns // 2 if gated else columns
    warpgroups = tiling.warpgroups
    kernel = plgpu.kernel(
        functools.partial(_kernel, tiling=tiling, gated=gated, blocks=blocks),
        out_type=jax.ShapeDtypeStruct((x.shape[0], out_columns), x.dtype),
        scratch_types=[
            tiles((tiling.stages, tiling.rows, tiling.depth), x.dtype),
            tiles((tiling.stages, _BLOCKS, _BLOCK * warpgroups, tiling.depth), x.dtype),
            tiles((warpgroups, tiling.slots, tiling.grain, _BLOCK), x.dtype),
            plgpu.Barrier(num_arrivals=1 + _BLOCKS, num_barriers=tiling.stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=tiling.stages),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return kernel(work.items, work.steps, x, weights)


def _kernel(
    items: Any,  # [steps · blocks, 4] int32, global
    steps: Any,  # [1] int32, global
    x: Any,  # [R, K], global
    weights: Any,  # [E, N, K] or [E, 2, N / 2, K], global
    out: Any,  # [R, N or N / 2], global
    x_ring: Any,  # [stages, rows, depth], shared
    w_ring: Any,  # [stages, 2, 64 · warpgroups, depth], shared
    staging: Any,  # [warpgroups, slots, grain, 64], shared
    landed: Any,  # [stages] barriers
    consumed: Any,  # [stages] barriers
    *,
    tiling: StreamTiling,
    gated: bool,
    blocks: int,
) -> None:
    stages, warpgroups, grain = tiling.stages, tiling.warpgroups, tiling.grain
    height = _BLOCK * warpgroups  # of a half of the tile of weights
    classes = tiling.rows // grain
    depth_steps = x.shape[1] // tiling.depth
    warpgroup = lax.axis_index("warpgroup")
    block = lax.axis_index("block")

    def item(step: jax.Array) -> tuple[jax.Array, ...]:
        line = jnp.minimum(step * blocks + block, items.shape[0] - 1)
        row = pl.multiple_of(items[line, 1], tiling.align)
        return items[line, 0], row, items[line, 2], items[line, 3]

    def by_class(rows: jax.Array, works: jax.Array, run: Any) -> None:
        kind = lax.div(rows + (grain - 1), jnp.int32(grain))
        for i in range(1, classes + 1):
            pl.when(works & (kind == i))(functools.partial(run, i * grain))

    def produce(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        loaded, group, row, rows, column = carry
        following = item(step + 1)

        def load_tile(height_of_x: int) -> None:
            @pl.loop(0, depth_steps)
            def load_stage(k: jax.Array) -> None:
                stage = lax.rem(loaded + k, jnp.int32(stages))
                plgpu.barrier_wait(consumed.at[stage])
                depth = pl.ds(pl.multiple_of(k * tiling.depth, tiling.depth), tiling.depth)
                for i in range(_BLOCKS):
                    if gated:
                        part = weights.at[group, i, pl.ds(pl.multiple_of(column * height, height), height), depth]
                    else:
                        first = pl.multiple_of(column * (_BLOCKS * height) + i * height, height)
                        part = weights.at[group, pl.ds(first, height), depth]
                    plgpu.copy_gmem_to_smem(part, w_ring.at[stage, i], landed.at[stage])
                mine = pl.ds(pl.multiple_of(row, tiling.align), height_of_x)
                plgpu.copy_gmem_to_smem(
                    x.at[mine, depth], x_ring.at[stage, pl.ds(0, height_of_x)], landed.at[stage]
                )

        by_class(rows, group >= 0, load_tile)
        return jnp.where(group >= 0, loaded + depth_steps, loaded), *following

    def consume(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        loaded, group, row, rows, column = carry
        following = item(step + 1)

        def finish_tile(height_of_x: int) -> None:
            def multiply(first: Any, second: Any) -> tuple[jax.Array, jax.Array]:
                @pl.loop(0, depth_steps)
                def multiply_stage(k: jax.Array) -> None:
                    stage = lax.rem(loaded + k, jnp.int32(stages))
                    plgpu.barrier_wait(landed.at[stage])
                    mine = pl.ds(pl.multiple_of(warpgroup * _BLOCK, _BLOCK), _BLOCK)
                    values = x_ring.at[stage, pl.ds(0, height_of_x)].transpose((1, 0))
                    plgpu.wgmma(first, w_ring.at[stage, 0, mine], values)
                    plgpu.wgmma(second, w_ring.at[stage, 1, mine], values)
                    plgpu.wgmma_wait(_BLOCKS)

                    @pl.when(k > 0)
                    def release_last() -> None:  # the products before these are done
                        plgpu.barrier_arrive(consumed.at[lax.rem(loaded + k - 1, jnp.int32(stages))])

                result = first[...], second[...]
                plgpu.barrier_arrive(consumed.at[lax.rem(loaded + depth_steps - 1, jnp.int32(stages))])
                return result

            sums = accumulator(_BLOCK, height_of_x)
            first, second = pl.run_scoped(multiply, sums, sums)
            at = warpgroup * _BLOCK
            if gated:
                result = first * second / (1.0 + jnp.exp(-first))
                store([(result.astype(out.dtype), column * height + at)], row, rows)
            else:
                base = column * (_BLOCKS * height) + at
                store(
                    [(first.astype(out.dtype), base), (second.astype(out.dtype), base + height)], row, rows
                )

        by_class(rows, group >= 0, finish_tile)
        return jnp.where(group >= 0, loaded + depth_steps, loaded), *following

    def store(results: list[tuple[jax.Array, jax.Array]], row: jax.Array, rows: jax.Array) -> None:
        parts = [
            (result[:, i : i + grain], i, column)
            for result, column in results
            for i in range(0, result.shape[1], grain)
        ]
        for number, (part, first, column) in enumerate(parts):
            # Slots are reused in turn within a tile; a tile begins when all before it have been read.
            slot = staging.at[warpgroup, number % tiling.slots]
            plgpu.wait_smem_to_gmem(min(number, tiling.slots - 1), wait_read_only=True)
            slot.transpose((1, 0))[...] = part
            plgpu.commit_smem()
            _store_rows(slot, out, tiling.align, row + first, jnp.minimum(rows - first, grain), column)
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


def _store_rows(slot: Any, out: Any, count: int, row: jax.Array, rows: jax.Array, column: jax.Array) -> None:
    """Begins to store the first `rows` of a slot, `count` at a time; commits nothing."""

    @pl.loop(0, lax.div(rows + (count - 1), jnp.int32(count)))
    def store_rows(number: jax.Array) -> None:
        first = number * count
        to = pl.ds(pl.multiple_of(row + first, count), count), pl.ds(pl.multiple_of(column, _BLOCK), _BLOCK)
        plgpu.copy_smem_to_gmem(
            slot.at[pl.ds(pl.multiple_of(first, count), count)], out.at[to], commit_group=False
        )

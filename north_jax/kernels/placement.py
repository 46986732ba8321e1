"""Where the experts of a few tokens find their rows, and who computes what: one kernel instead of many small fusions.

With few tokens, experts are limited by the memory that their weights come from, and a launch costs as much as reading a
megabyte. So every block of the grid does the same bookkeeping for itself, a thread an expert: it counts all tokens,
which gives each expert's size and start and its own tokens' places there. Then it copies its tokens' rows, and writes
its own lines of the lists of tiles of both products.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .row_moves import row_layout, write_row
from .tiling import Tiling
from .work_items import NOTHING, WorkItems, most_turns

_LANES = 128  # threads of a warpgroup
_TURNS = _LANES // 2  # of a product that a block lists at most
_AT_ONCE = 32  # tokens whose experts are read at once, to wait for memory once
_OWN = 4  # tokens of a block at most, whose rows wait in registers
_STEPS = 8  # experts that a step of the search takes


class Placed(NamedTuple):
    """Rows at their experts, and the lists of tiles."""

    x: jax.Array  # [R, D], sorted by expert; rows of no assignment hold anything
    row: jax.Array  # [T · k] int32, the row of each assignment; R for none
    work: tuple[WorkItems, WorkItems]  # of the product up, and of the one down


def places(tokens: int, experts: int, tiling: Tiling, *, rows: int, columns: tuple[int, int], blocks: int) -> bool:
    """Whether `place_rows` takes so much."""
    turns = [most_turns(experts, tiling, rows=rows, columns=count, blocks=blocks) for count in columns]
    return tiling.row_warpgroups == tiling.cluster == 1 and tokens <= _OWN * blocks and max(turns) <= _TURNS


def place_rows(
    h: jax.Array,
    experts: jax.Array,
    valid: jax.Array,
    count: int,
    tiling: Tiling,
    *,
    rows: int,
    columns: tuple[int, int],
    blocks: int,
    interpret: Any = None,
) -> Placed:
    """Sorts the rows of a few tokens by expert, and deals the tiles of both products out to blocks.

    Args:
      h: [T, D], 16-bit, D a multiple of 128.
      experts: [T, k] int32, those of a token distinct.
      valid: [T] bool; the others have no expert.
      count: of the experts.
      tiling: of both products, with one warpgroup of rows.
      rows: R, `work_items.sorted_rows` of T · k.
      columns: of the weights of both products.
      blocks: of the products' grids.
      interpret: `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    tokens, top = experts.shape
    lanes = -(-count // _LANES) * _LANES
    padded = -(-tokens // _AT_ONCE) * _AT_ONCE
    number = jnp.arange(lanes, dtype=jnp.int32)
    member = jnp.any((experts[:, :, None] == number) & valid[:, None, None], axis=1).astype(jnp.int32)
    member = jnp.pad(member, ((0, padded - tokens), (0, 0)))  # [T, E], filled up
    across = [n // tiling.columns for n in columns]
    # A block's turns of the product up stand in the first half of the lanes, those of the one down in the second.
    slot = np.arange(_TURNS, dtype=np.int32) * blocks + np.arange(blocks, dtype=np.int32)[:, None]
    unit, column = (np.concatenate([f(slot, n) for n in across], axis=1) for f in (np.floor_divide, np.remainder))
    turns = [most_turns(count, tiling, rows=rows, columns=n, blocks=blocks) for n in columns]
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    own = -(-tokens // blocks)
    kernel = plgpu.kernel(
        functools.partial(_kernel, tiling=tiling, top=top, tokens=tokens, own=own, across=(across[0], across[1])),
        out_type=[
            jax.ShapeDtypeStruct((rows, h.shape[1]), h.dtype),
            int32((tokens * top,)),
            *(int32((turn * blocks, 4)) for turn in turns),
            int32((1,)),
            int32((1,)),
        ],
        scratch_types={
            "rank": plgpu.SMEM((own, lanes), jnp.int32),
            "expert": plgpu.SMEM((4, lanes), jnp.int32),
            "lines": plgpu.SMEM((4, _LANES), jnp.int32),
        },
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    x, row, *lists = kernel(h, experts.reshape(-1), member, jnp.asarray(unit), jnp.asarray(column))
    return Placed(x, row, (WorkItems(lists[0], lists[2]), WorkItems(lists[1], lists[3])))


def _kernel(
    h: Any,  # [T, D], global
    experts: Any,  # [T · k] int32, global
    member: Any,  # [T, E] int32, global
    unit: Any,  # [blocks, lanes] int32, global: the tile of rows of each line
    column: Any,  # [blocks, lanes] int32, global: its tile of columns
    x: Any,  # [R, D], global
    row: Any,  # [T · k] int32, global
    up: Any,  # [turns · blocks, 4] int32, global
    down: Any,  # [turns · blocks, 4] int32, global
    up_steps: Any,  # [1] int32, global
    down_steps: Any,  # [1] int32, global
    *,
    rank: Any,  # [own, E] int32, shared: earlier tokens of each expert
    expert: Any,  # [4, E] int32, shared: size, tiles, rows with the room behind them, start
    lines: Any,  # [4, lanes] int32, shared: the fields of `WorkItems.items`
    tiling: Tiling,
    top: int,
    tokens: int,
    own: int,
    across: tuple[int, int],
) -> None:
    block, blocks = lax.axis_index("block"), unit.shape[0]
    count = member.shape[1]
    of_experts = plgpu.Layout.WG_STRIDED((count,), vec_size=1)
    of_lanes = plgpu.Layout.WG_STRIDED((_LANES,), vec_size=1)
    first = block * own
    values = [plgpu.load(h.at[jnp.minimum(first + i, tokens - 1)], layout=row_layout(h.shape[1])) for i in range(own)]

    def count_some(step: jax.Array, total: jax.Array) -> jax.Array:
        token = step * _AT_ONCE
        chosen = [plgpu.load(member.at[token + i], layout=of_experts) for i in range(_AT_ONCE)]

        @pl.when((token < first + own) & (token + _AT_ONCE > first))
        def note_own() -> None:
            before = total
            for i, some in enumerate(chosen):

                @pl.when((token + i >= first) & (token + i < first + own))
                def note(before: jax.Array = before, i: int = i) -> None:
                    rank[token + i - first] = before

                before = before + some

        return functools.reduce(jnp.add, chosen, total)

    zero = plgpu.layout_cast(jnp.zeros((count,), jnp.int32), of_experts)
    size = lax.fori_loop(0, member.shape[0] // _AT_ONCE, count_some, zero)
    expert[0] = size
    expert[1] = lax.div(size + (tiling.rows - 1), jnp.int32(tiling.rows))
    expert[2] = lax.div(size + (tiling.align - 1), jnp.int32(tiling.align)) * tiling.align
    plgpu.commit_smem()

    mine = plgpu.load(unit.at[block], layout=of_lanes)
    lane = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=of_experts)

    def search(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Passes by a few experts: what a line's tile has before it, and what an expert has."""
        tiles, group, begin, base, rows, start = carry
        for i in range(_STEPS):
            e = step * _STEPS + i
            room = expert[2, e]
            here = expert[1, e]
            tiles = tiles + here
            passed = mine >= tiles
            group = group + jnp.where(passed, 1, 0)
            begin = begin + jnp.where(passed, here, 0)
            base = base + jnp.where(passed, room, 0)
            rows = jnp.where(passed, expert[0, jnp.minimum(e + 1, count - 1)], rows)
            start = start + jnp.where(lane > e, room, 0)
        return tiles, group, begin, base, rows, start

    def none() -> jax.Array:
        return plgpu.layout_cast(jnp.zeros((_LANES,), jnp.int32), of_lanes)

    initial = (jnp.int32(0), none(), none(), none(), none() + expert[0, 0], zero)
    tiles, group, begin, base, rows, start = lax.fori_loop(0, count // _STEPS, search, initial)
    within = (mine - begin) * tiling.rows
    expert[3] = start
    lines[0] = jnp.where(mine < tiles, group, NOTHING)
    lines[1] = base + within
    lines[2] = jnp.clip(rows - within, 0, tiling.rows)
    lines[3] = plgpu.load(column.at[block], layout=of_lanes)
    plgpu.commit_smem()

    for i in range(own):

        @pl.when(first + i < tokens)
        def move(i: int = i) -> None:
            for j in range(top):
                at = (first + i) * top + j
                e = experts[at]
                to = jnp.where(member[first + i, e] > 0, expert[3, e] + rank[i, e], x.shape[0])
                row[at] = to
                write_row(x, to, values[i])

    for part, (items, number, wide) in enumerate(((up, up_steps, across[0]), (down, down_steps, across[1]))):
        turns = lax.div(tiles * wide + (blocks - 1), jnp.int32(blocks))

        @pl.loop(0, turns)
        def write_line(turn: jax.Array, items: Any = items, part: int = part) -> None:
            for field in range(4):
                items[turn * blocks + block, field] = lines[field, part * _TURNS + turn]

        @pl.when(block == 0)
        def write_steps(number: Any = number, turns: jax.Array = turns) -> None:
            number[0] = turns

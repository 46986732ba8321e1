"""The experts of many tokens on Hopper: who they are, where their rows go, and who multiplies them, in two kernels.

`select` takes 64 tokens a block: it picks each token's experts from the router's logits, and counts, by a product with
a triangular matrix, how many earlier tokens of the block chose the same. `arrange` adds up the blocks' counts: every
block of its grid does the sums for itself, a thread an expert, and writes the rows of its own tokens and its own lines
of the lists of tiles of both products (`work_items`). Neither sorts, and nothing depends on the order of execution.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .shared_memory import accumulator, store, tiles
from .tiling import Tiling
from .work_items import NOTHING, WorkItems, most_turns, sorted_rows

TOKENS = 64  # of a block of `select`, the rows of a product
_LANES = 128  # threads of a warpgroup
_AT_ONCE = 32  # blocks whose counts are read at once, to wait for memory once
_STEPS = 8  # experts that a step of the search takes


class Selected(NamedTuple):
    """The experts of each token."""

    experts: jax.Array  # [T, k] int32
    weights: jax.Array  # [T, k] float32
    rank: jax.Array  # [T, k] int32: earlier tokens of the same block that chose the same expert
    counts: jax.Array  # [T / TOKENS, E] int32: tokens of each block that chose each expert


def selects(tokens: int, experts: int) -> bool:
    """Whether `select` takes so many."""
    return tokens % TOKENS == 0 and experts == _LANES


def select(
    logits: jax.Array, valid: jax.Array, top: int, *, softmax: bool, normalized: bool, interpret: Any = None
) -> Selected:
    """Selects each token's experts by `moe.select_experts`: the largest logits, of equal ones the first.

    Args:
      logits: [T, E] float32.
      valid: [T] bool; the others' experts are not counted.
      top: k.
      softmax: whether weights are a softmax over the selected logits, not a sigmoid of each.
      normalized: whether weights of a sigmoid are divided by their sum.
      interpret: `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    tokens, count = logits.shape
    of_token = functools.partial(jax.ShapeDtypeStruct, (tokens, top))
    kernel = plgpu.kernel(
        functools.partial(_select, top=top, softmax=softmax, normalized=normalized),
        out_type=[
            of_token(jnp.int32),
            of_token(jnp.float32),
            of_token(jnp.int32),
            jax.ShapeDtypeStruct((tokens // TOKENS, count), jnp.int32),
        ],
        scratch_types={
            "triangle": tiles((TOKENS, TOKENS), jnp.bfloat16),
            "member": tiles((TOKENS, count), jnp.bfloat16),
            "counted": plgpu.SMEM((TOKENS, count), jnp.float32),
        },
        grid=(tokens // TOKENS,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return Selected(*kernel(logits, valid.astype(jnp.float32)))


def _select(
    logits: Any,  # [T, E], global
    valid: Any,  # [T] float32, global
    experts: Any,  # [T, k] int32, global
    weights: Any,  # [T, k], global
    rank: Any,  # [T, k] int32, global
    counts: Any,  # [blocks, E] int32, global
    *,
    triangle: Any,  # [64, 64], shared
    member: Any,  # [64, E], shared
    counted: Any,  # [64, E] float32, shared
    top: int,
    softmax: bool,
    normalized: bool,
) -> None:
    block = lax.axis_index("block")
    mine = pl.ds(block * TOKENS, TOKENS)
    count = logits.shape[1]
    layout = plgpu.Layout.WGMMA
    of_row = layout.reduce(1)
    shape = (TOKENS, count)

    def across(row: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(row, shape, [0])

    square = (TOKENS, TOKENS)
    below = plgpu.broadcasted_iota(jnp.int32, square, 0, layout=layout) >= plgpu.broadcasted_iota(
        jnp.int32, square, 1, layout=layout
    )
    triangle[...] = jnp.where(below, 1.0, 0.0).astype(jnp.bfloat16)
    left = plgpu.load(logits.at[mine], layout=layout, optimized=False)
    index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout).astype(jnp.float32)
    chosen, values = [], []
    for _ in range(top):
        value = left.max(axis=1)
        # The first of the largest; where a NaN leaves none, the last expert.
        place = (count - 1) - jnp.where(left == across(value), (count - 1) - index, 0.0).max(axis=1)
        left = jnp.where(index == across(place), -jnp.inf, left)
        chosen.append(place)
        values.append(value)
    used = plgpu.load(valid.at[mine], layout=of_row, optimized=False)
    is_member = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
    for place in chosen:
        is_member = jnp.where(index == across(place), 1.0, is_member)
    member[...] = (is_member * across(used)).astype(jnp.bfloat16)
    plgpu.commit_smem()

    def count_earlier(sums: Any) -> jax.Array:
        plgpu.wgmma(sums, triangle, member)
        return sums[...]

    inclusive = pl.run_scoped(count_earlier, accumulator(TOKENS, count))
    store(counted, inclusive)
    plgpu.commit_smem()
    of_experts = plgpu.Layout.WG_STRIDED((count,), vec_size=1)
    counts[block] = plgpu.load(counted.at[TOKENS - 1], layout=of_experts).astype(jnp.int32)
    if softmax:
        parts = [jnp.exp(value - values[0]) for value in values]
    else:
        parts = [1.0 / (1.0 + jnp.exp(-value)) for value in values]
    if softmax or normalized:
        total = functools.reduce(jnp.add, parts)
        parts = [part / total for part in parts]
    for j, (place, part) in enumerate(zip(chosen, parts, strict=True)):
        earlier = jnp.where(index == across(place), inclusive, 0.0).sum(axis=1) - 1.0
        store(experts.at[mine, j], jnp.where(used > 0, place, float(count)).astype(jnp.int32))
        store(weights.at[mine, j], part)
        store(rank.at[mine, j], earlier.astype(jnp.int32))


def arrange(
    selected: Selected, tiling: Tiling, *, columns: tuple[int, int], blocks: int, interpret: Any = None
) -> tuple[jax.Array, tuple[WorkItems, WorkItems]]:
    """The rows of all assignments, sorted by expert, and the lists of tiles of both products.

    Args:
      selected: of `select`.
      tiling: of both products.
      columns: of the weights of both products.
      blocks: of the products' grids (clusters, where the tiling has these).
      interpret: `plgpu.InterpretGPUParams()` to run on a CPU.

    Returns:
      [T · k] int32, `sorted_rows` for what belongs to no expert, and the lists, as of `work_items`.
    """
    tokens, top = selected.experts.shape
    parts_of_tokens, count = selected.counts.shape
    rows = sorted_rows(tokens * top, count, tiling)
    across = [n // (tiling.columns * tiling.cluster) for n in columns]
    turns = [most_turns(count, tiling, rows=rows, columns=n, blocks=blocks) for n in columns]
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    own = -(-parts_of_tokens // blocks)
    kernel = plgpu.kernel(
        functools.partial(
            _arrange,
            tiling=tiling,
            rows=rows,
            own=own,
            across=tuple(across),
            turns=tuple(turns),
            blocks=blocks,
            interpreted=interpret is not None,
        ),
        out_type=[
            int32((tokens, top)),
            *(int32((turn * blocks * tiling.row_warpgroups, 4)) for turn in turns),
            int32((1,)),
            int32((1,)),
        ],
        scratch_types={
            "expert": plgpu.SMEM((4, count), jnp.int32),
            "base": plgpu.SMEM((own, count), jnp.int32),
            "lines": plgpu.SMEM((2, 4, _LANES), jnp.int32),
        },
        grid=(blocks,),
        grid_names=("block",),
        interpret=interpret,
    )
    row, up, down, up_steps, down_steps = kernel(selected.experts, selected.rank, selected.counts)
    return row.reshape(-1), (WorkItems(up, up_steps), WorkItems(down, down_steps))


def _arrange(
    experts: Any,  # [T, k] int32, global
    rank: Any,  # [T, k] int32, global
    counts: Any,  # [T / TOKENS, E] int32, global
    row: Any,  # [T, k] int32, global
    up: Any,  # [turns · blocks · parts, 4] int32, global
    down: Any,  # [turns · blocks · parts, 4] int32, global
    up_steps: Any,  # [1] int32, global
    down_steps: Any,  # [1] int32, global
    *,
    expert: Any,  # [4, E] int32, shared: size, rows with the room behind them, parts of a turn up and down
    base: Any,  # [own, E] int32, shared: the first row of each part of the tokens
    lines: Any,  # [2, 4, lanes] int32, shared: the fields of `WorkItems.items`
    tiling: Tiling,
    rows: int,
    own: int,
    across: tuple[int, ...],
    turns: tuple[int, ...],
    blocks: int,
    interpreted: bool,
) -> None:
    at_once, steps = (1, 1) if interpreted else (_AT_ONCE, _STEPS)  # the interpreter compiles every read
    block = lax.axis_index("block")
    groups, count = counts.shape
    top = experts.shape[1]
    of_experts = plgpu.Layout.WG_STRIDED((count,), vec_size=1)
    of_lanes = plgpu.Layout.WG_STRIDED((_LANES,), vec_size=1)
    first = block * own

    def none(layout: Any = of_experts, size: int = count) -> jax.Array:
        return plgpu.layout_cast(jnp.zeros((size,), jnp.int32), layout)

    def of_expert(field: int) -> Callable[[jax.Array], jax.Array]:
        """Reads a field of an expert; the interpreter, for which every read is slow, reads all at once."""
        if not interpreted:
            return lambda e: expert[field, e]
        values = expert[field]
        return lambda e: lax.dynamic_index_in_dim(values, e, keepdims=False)

    def flag(condition: jax.Array) -> jax.Array:
        return lax.broadcast(jnp.where(condition, 1, 0), (count,))

    def count_some(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, before = carry
        at = [step * at_once + i for i in range(at_once)]
        some = [plgpu.load(counts.at[jnp.minimum(a, groups - 1)], layout=of_experts) for a in at]
        for a, values in zip(at, some, strict=True):
            total = total + values * flag(a < groups)
            before = before + values * flag(a < jnp.minimum(first, groups))
        return total, before

    size, before = lax.fori_loop(0, -(-groups // at_once), count_some, (none(), none()))
    expert[0] = size
    expert[1] = lax.div(size + (tiling.align - 1), jnp.int32(tiling.align)) * tiling.align
    for product, wide in enumerate(across):
        full, single = _tiles_of(size, tiling)
        parts = tiling.row_warpgroups
        expert[2 + product] = full * (wide * parts) + single * (-(-wide // parts) * parts)
    plgpu.commit_smem()

    lane = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=of_experts)

    room = of_expert(1)

    def add_room(step: jax.Array, start: jax.Array) -> jax.Array:
        for i in range(steps):
            e = step * steps + i
            start = start + jnp.where(lane > e, room(e), 0)
        return start

    start = lax.fori_loop(0, count // steps, add_room, none())
    offset = start + before
    for i in range(own):
        base[i] = offset
        offset = offset + plgpu.load(counts.at[jnp.minimum(first + i, groups - 1)], layout=of_experts)
    plgpu.commit_smem()

    for i in range(own):

        @pl.when(first + i < groups)
        def write_rows(i: int = i) -> None:
            mine = pl.ds((first + i) * TOKENS, TOKENS)
            layout, shape = plgpu.Layout.WGMMA, (TOKENS, count)
            index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
            begin = plgpu.load(base.at[i], layout=layout.reduce(0), optimized=False)
            begin = lax.broadcast_in_dim(begin.astype(jnp.float32), shape, [1])  # exact: below 2²⁴
            for j in range(top):
                chosen = plgpu.load(experts.at[mine, j], layout=layout.reduce(1), optimized=False)
                earlier = plgpu.load(rank.at[mine, j], layout=layout.reduce(1), optimized=False)
                hit = index == lax.broadcast_in_dim(chosen, shape, [0])
                to = jnp.where(hit, begin, 0.0).sum(axis=1).astype(jnp.int32) + earlier
                store(row.at[mine, j], jnp.where(chosen < count, to, rows))

    parts = tiling.row_warpgroups
    passes = -(-max(turns) * parts // _LANES)
    for product, (items, number) in enumerate(((up, up_steps), (down, down_steps))):
        parts_of = of_expert(2 + product)

        def sum_parts(step: jax.Array, total: jax.Array, parts_of: Any = parts_of) -> jax.Array:
            for i in range(steps):
                total = total + parts_of(step * steps + i)
            return total

        total = lax.fori_loop(0, count // steps, sum_parts, jnp.int32(0))
        needed = lax.div(total + (blocks * parts - 1), jnp.int32(blocks * parts))  # turns

        @pl.when(block == 0)
        def write_steps(number: Any = number, needed: jax.Array = needed) -> None:
            number[0] = needed * parts

        for some in range(passes):
            first_turn = some * (_LANES // parts)

            @pl.when(needed > first_turn)
            def write_lines(
                items: Any = items, product: int = product, first_turn: int = first_turn, needed: jax.Array = needed
            ) -> None:
                fields = _find(
                    (of_expert(0), of_expert(1), of_expert(2 + product)),
                    count,
                    first_turn,
                    block,
                    of_lanes,
                    tiling,
                    across[product],
                    blocks,
                    steps,
                )
                for field, values in enumerate(fields):
                    lines[product, field] = values
                plgpu.commit_smem()

                @pl.loop(first_turn, jnp.minimum(needed, first_turn + _LANES // parts))
                def write_turn(turn: jax.Array) -> None:
                    for part in range(parts):
                        for field in range(4):
                            line = (turn - first_turn) * parts + part
                            items[(turn * blocks + block) * parts + part, field] = lines[product, field, line]

                plgpu.commit_smem()


def _tiles_of(size: jax.Array, tiling: Tiling) -> tuple[jax.Array, jax.Array]:
    """Of experts with so many rows: tiles that need every warpgroup, and those that need one of two."""
    full = lax.div(size, jnp.int32(tiling.rows))
    rest = size - full * tiling.rows
    if tiling.row_warpgroups == 1:
        return full + jnp.where(rest > 0, 1, 0), rest * 0
    half = tiling.rows // 2
    return full + jnp.where(rest > half, 1, 0), jnp.where((rest > 0) & (rest <= half), 1, 0)


def _find(
    of_expert: tuple[Callable[[jax.Array], jax.Array], ...],  # size, rows with the room behind them, parts of a turn
    count: int,
    first_turn: int,
    block: jax.Array,
    layout: Any,
    tiling: Tiling,
    wide: int,
    blocks: int,
    steps: int,
) -> tuple[jax.Array, ...]:
    """A block's lines of a product's list, a thread a line: group, first row, rows, column."""
    size_of, room_of, parts_of = of_expert
    parts = tiling.row_warpgroups
    line = plgpu.broadcasted_iota(jnp.int32, (_LANES,), 0, layout=layout)
    turn = lax.div(line, jnp.int32(parts))
    slot = ((turn + first_turn) * blocks + block) * parts + (line - turn * parts)

    def search(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Passes by a few experts."""
        end, group, begin, start, size = carry
        for i in range(steps):
            e = step * steps + i
            here = parts_of(e)
            end = end + here
            passed = slot >= end
            group = group + jnp.where(passed, 1, 0)
            begin = begin + jnp.where(passed, here, 0)
            start = start + jnp.where(passed, room_of(e), 0)
            size = jnp.where(passed, size_of(jnp.minimum(e + 1, count - 1)), size)
        return end, group, begin, start, size

    zero = line * 0
    initial = (jnp.int32(0), zero, zero, zero, zero + size_of(jnp.int32(0)))
    _, group, begin, start, size = lax.fori_loop(0, count // steps, search, initial)
    full, _ = _tiles_of(size, tiling)
    local = slot - begin
    full_parts = full * (wide * parts)
    is_full = local < full_parts
    tile = lax.div(local, jnp.int32(parts))
    high = jnp.maximum(full, 1)
    over = lax.div(tile, high)
    down = jnp.where(is_full, tile - over * high, full)
    column = jnp.where(is_full, over, local - full_parts)
    first_part = jnp.where(local - tile * parts == 0, 1, 0)
    works = (group < count) & (column < wide) & ((first_part > 0) | (local >= full_parts))
    within = down * tiling.rows
    return (
        jnp.where(works, group, NOTHING),
        start + within,
        jnp.clip(size - within, 0, tiling.rows),
        column,
    )

"""Which tile of a grouped matmul runs where: rows sorted into groups, and a list of work for every block of the grid.

Both are computed on the device by a few small fusions, because group sizes are known only there. Doing it outside the
kernel keeps the search for "whose tile is this" away from the tensor cores: a block reads one line of the list.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .tiling import Tiling

NOTHING = -1  # in WorkItems.items: this step of this block has no tile
_PAIRWISE = 4096  # assignments, up to which all pairs are compared
_RANK_BLOCK = 256  # assignments that are ranked by one triangular product; counts up to it are exact in bfloat16


class Groups(NamedTuple):
    """Where the rows of each group lie in an array that is sorted by group."""

    start: jax.Array  # [E] int32, a multiple of the tiling's row alignment
    size: jax.Array  # [E] int32


class WorkItems(NamedTuple):
    """What every block of the grid does, step by step."""

    items: jax.Array  # [steps · blocks, 4] int32: group or NOTHING, first row, rows that count, column tile
    steps: jax.Array  # [1] int32, how many of a block's steps hold work


def sorted_rows(assignments: int, groups: int, tiling: Tiling) -> int:
    """Rows of an array with `assignments` rows in `groups` groups, aligned, so that no tile reaches beyond its end."""
    most = assignments + min(groups, assignments) * (tiling.align - 1)
    return -(-most // tiling.align) * tiling.align + tiling.rows - tiling.align


def sort_rows(group: jax.Array, groups: int, tiling: Tiling) -> tuple[Groups, jax.Array]:
    """Gives every assignment its row in an array that is sorted by group, stably.

    Counting, not sorting: a row is its group's start plus the number of earlier assignments to that group. Of many
    assignments it is counted in blocks, within which a product with a triangular matrix counts.

    Args:
      group: [A] int32, the group of each assignment; `groups` or more belongs to none.
      groups: E.
      tiling: of the product; its `align` is that of the groups.

    Returns:
      the groups, and [A] int32 rows; what belongs to no group gets row `sorted_rows(A, E, tiling)`, beyond the end.
    """
    assignments = group.shape[0]
    size = jnp.sum(group[:, None] == jnp.arange(groups, dtype=group.dtype), axis=0, dtype=jnp.int32)
    start = _before(-(-size // tiling.align) * tiling.align)
    row = (_rows_of_few if assignments <= _PAIRWISE else _rows_of_many)(group, start)
    return Groups(start, size), jnp.where(group < groups, row, sorted_rows(assignments, groups, tiling))


def _rows_of_few(group: jax.Array, start: jax.Array) -> jax.Array:
    """Rows of assignments [A], by comparing all pairs: a single small kernel."""
    index = jnp.arange(group.shape[0], dtype=jnp.int32)
    earlier = (group[:, None] == group) & (index[:, None] > index)
    return start.at[group].get(mode="clip") + jnp.sum(earlier, axis=1, dtype=jnp.int32)


def _rows_of_many(group: jax.Array, start: jax.Array) -> jax.Array:
    """Rows of assignments [A]: a group's start, those in earlier blocks, and those earlier in the same block."""
    assignments, groups = group.shape[0], start.shape[0]
    blocks = -(-assignments // _RANK_BLOCK)
    padded = jnp.pad(group, (0, blocks * _RANK_BLOCK - assignments), constant_values=groups)
    member = padded.reshape(blocks, _RANK_BLOCK, 1) == jnp.arange(groups, dtype=group.dtype)  # [blocks, B, E]
    earlier = jnp.tril(jnp.ones((_RANK_BLOCK, _RANK_BLOCK), jnp.bfloat16), -1)
    within = jnp.einsum(
        "ij,bje->bie", earlier, member.astype(jnp.bfloat16), preferred_element_type=jnp.float32
    )  # [blocks, B, E], exact
    offset = start + _before(jnp.sum(member, axis=1, dtype=jnp.int32))  # [blocks, E], of the first row of each block
    row = jnp.sum(jnp.where(member, offset[:, None] + within.astype(jnp.int32), 0), axis=-1)
    return row.reshape(-1)[:assignments]


def most_turns(groups: int, tiling: Tiling, *, rows: int, columns: int, blocks: int) -> int:
    """Turns that a block has at most, with tiles of so many sorted rows in so many groups."""
    most = (rows // tiling.rows + groups) * (columns // (tiling.columns * tiling.cluster))
    return -(-most // blocks)


def work_items(groups: Groups, tiling: Tiling, *, rows: int, columns: int, blocks: int) -> WorkItems:
    """Deals the tiles of a product out to the blocks of the grid.

    A block's turn is as much time as a full tile of rows takes. Where a tiling has two warpgroups, the last tile of a
    group may need only one of them, which takes about half the time: two such tiles, neighbours in their columns, share
    a turn. So all blocks have the same load at any time, whatever the sizes of the groups.

    Args:
      groups: of the rows.
      tiling: of the kernel.
      rows: of the sorted array, static.
      columns: of the weights, N; a multiple of the tiling's columns.
      blocks: of the grid (clusters, where the tiling has these).

    Returns:
      the items, grouped by turn: item (turn · blocks + block) · tiling.row_warpgroups + part.
    """
    parts = tiling.row_warpgroups
    count = groups.size.shape[0]
    across = columns // (tiling.columns * tiling.cluster)
    turns = most_turns(count, tiling, rows=rows, columns=columns, blocks=blocks)
    full = groups.size // tiling.rows  # [E] tiles of which every row counts, or that need every warpgroup
    rest = groups.size - full * tiling.rows
    if parts == 2:
        full += rest > tiling.rows // 2
        single = (rest > 0) & (rest <= tiling.rows // 2)
    else:
        full += rest > 0
        single = jnp.zeros_like(rest, bool)
    full_parts = full * across * parts
    all_parts = full_parts + single * (-(-across // parts) * parts)
    begin = _before(all_parts)
    end = begin + all_parts
    slot = jnp.arange(turns * blocks * parts, dtype=jnp.int32)
    group = jnp.sum(slot[:, None] >= end, axis=1, dtype=jnp.int32)  # [slots]
    held = jnp.minimum(group, count - 1)
    local = slot - begin[held]
    is_full = local < full_parts[held]
    tile = local // parts
    high = jnp.maximum(full[held], 1)
    down = jnp.where(is_full, tile % high, full[held])
    column = jnp.where(is_full, tile // high, local - full_parts[held])
    works = (group < count) & (~is_full | (local % parts == 0)) & (column < across)
    first = down * tiling.rows
    items = jnp.stack(
        [
            jnp.where(works, held, NOTHING),
            groups.start[held] + first,
            jnp.clip(groups.size[held] - first, 0, tiling.rows),
            column,
        ],
        axis=1,
    )
    return WorkItems(items, -(-jnp.sum(all_parts, keepdims=True) // (blocks * parts)) * parts)


def _before(x: jax.Array) -> jax.Array:
    """The sums of all earlier entries along the first axis, as one masked sum: a cumsum is several kernels."""
    index = jnp.arange(x.shape[0])
    earlier = (index[:, None] > index).reshape(x.shape[0], x.shape[0], *(1,) * (x.ndim - 1))
    return jnp.sum(jnp.where(earlier, x[None], 0), axis=1, dtype=x.dtype)

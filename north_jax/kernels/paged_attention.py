"""Attention of packed prompts to the pages of their KV cache on Hopper: bottom-right causal, full or sliding window.

A block of the grid, one a multiprocessor, walks tiles of 128 queries of one head. A producer warpgroup looks pages up
in the table and loads them through rings in shared memory; two consumer warpgroups of 64 queries each keep a running
softmax in base 2, as FlashAttention does (Dao 2023, arXiv:2307.08691). They take turns on the tensor cores: one
multiplies while the other is in its softmax (Shah et al. 2024, arXiv:2407.08608). Nothing is gathered or copied.

The memory has little to do meanwhile. So where asked, a fourth warpgroup copies rows for the experts at the same time
(`Spread`), by the copy engine alone: what `row_moves.spread_rows` does takes no time of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..kv_cache import PAGE_SIZE
from .query_tiles import PAGES_PER_BLOCK, TILE, TOKEN_ALIGN
from .shared_memory import accumulator
from .shared_memory import tiles as tiles_of

_WARPGROUPS = TILE // 64
_QUERIES = 64  # of a warpgroup
_KEYS = PAGES_PER_BLOCK * PAGE_SIZE  # of a step
_MASKED = -1e30  # finite: a row that has seen no key yet stays finite, and its first real key erases what it summed
_PRODUCER_REGISTERS = 40
_CONSUMER_REGISTERS = {False: 232, True: 216}  # by whether there is a mover
_MOVE_VALUES = 256  # of a row that a copy takes in one dimension, at most
_MOVE_SLOTS = 4  # rows in shared memory that are being read or written
_MOVE_AHEAD = 2  # of them being read


class Spread(NamedTuple):
    """Rows to be copied meanwhile, as `row_moves.spread_rows` does."""

    h: jax.Array  # [T, D], the dtype of q, D a multiple of 256
    row: jax.Array  # [T · k] int32; `rows` or more for none
    rows: int  # of the result


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSizes:
    """What may be tuned.

    Attributes:
      stages: blocks of keys, and of values, in shared memory; 2 is what fits with 128 dimensions.
      take_turns: whether the two warpgroups alternate on the tensor cores.
      cluster: blocks with a query head each that share loads of keys and values: 1, or 2 with multicast.
    """

    stages: int = 2
    take_turns: bool = True
    cluster: int = 1


def paged_attention_kernel(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    tiles: jax.Array,
    count: jax.Array,
    *,
    window: int | None,
    blocks: int,
    sizes: AttentionSizes | None = None,
    spread: Spread | None = None,
    interpret: Any = None,
) -> Any:
    """Attends from packed queries to the pages of their prompts, on a Hopper GPU.

    What a tile's prompt has in its pages up to the last query must be written, and the rest of that page be finite.

    Args:
      q: [T, H, d] bfloat16 or float16, rotated, not scaled; prompts begin at multiples of TOKEN_ALIGN.
      pages: [pages, 2 (k, v), K, PAGE_SIZE, d], the dtype of q; d is 64 or 128.
      table: [N, P] int32; position p of a prompt lies in page table[n, (p // PAGE_SIZE) % P].
      tiles: [tiles, 6] int32, of `query_tiles` for this window.
      count: [1] int32, of the tiles that hold work.
      window: keys that a query sees, its own included; None for all before it.
      blocks: of the grid, one a multiprocessor.
      sizes: what may be tuned.
      spread: rows to be copied meanwhile.
      interpret: `plgpu.InterpretGPUParams()` to run on a CPU.

    Returns:
      [T, H, d] in q's dtype; what belongs to no prompt holds anything. With `spread` a pair: that, and [rows, D], of
      which rows of no assignment hold anything.

    Raises:
      ValueError: an operand's shape or dtype is not supported.
    """
    sizes = sizes or AttentionSizes()
    _, heads, d = q.shape
    kv_heads = pages.shape[2]
    if d not in (64, 128) or q.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"paged_attention: q is {q.dtype}{list(q.shape)}, expected 16-bit values and d of 64 or 128")
    if pages.dtype != q.dtype or pages.shape[1:] != (2, kv_heads, PAGE_SIZE, d) or heads % kv_heads:
        raise ValueError(f"paged_attention: pages are {pages.dtype}{list(pages.shape)}, q {q.dtype}{list(q.shape)}")
    if heads // kv_heads % sizes.cluster or blocks % sizes.cluster:
        raise ValueError(f"paged_attention: {heads // kv_heads} heads a kv head and {blocks} blocks, with {sizes}")
    ring = tiles_of((sizes.stages, _KEYS, d), q.dtype)
    queries = tiles_of((_WARPGROUPS, _QUERIES, d), q.dtype)
    landed = plgpu.Barrier(num_arrivals=PAGES_PER_BLOCK, num_barriers=sizes.stages)
    consumed: Any = plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=sizes.stages)
    clusters: dict[str, Any] = {}
    if sizes.cluster > 1:
        clusters = {"cluster": (sizes.cluster,), "cluster_names": ("cluster",)}
        consumed = plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=_WARPGROUPS, num_barriers=sizes.stages
        )
    out_type: Any = jax.ShapeDtypeStruct(q.shape, q.dtype)
    moving: dict[str, Any] = {}
    operands: tuple[jax.Array, ...] = ()
    if spread:
        tokens, width = spread.h.shape
        if spread.h.dtype != q.dtype or width % _MOVE_VALUES:
            raise ValueError(f"paged_attention: rows to be copied are {spread.h.dtype}{list(spread.h.shape)}")
        pieces = width // _MOVE_VALUES, _MOVE_VALUES
        out_type = [out_type, jax.ShapeDtypeStruct((spread.rows, *pieces), q.dtype)]
        operands = spread.h.reshape(tokens, *pieces), spread.row
        moving = {
            "moved": plgpu.SMEM((_MOVE_SLOTS, *pieces), q.dtype),
            "moved_landed": plgpu.Barrier(num_barriers=_MOVE_SLOTS),
        }
    kernel = plgpu.kernel(
        functools.partial(_kernel, window=window, blocks=blocks, sizes=sizes, interpreted=interpret is not None),
        out_type=out_type,
        scratch_types={
            "q_tile": queries,
            "staging": queries,
            "k_ring": ring,
            "v_ring": ring,
            "q_landed": plgpu.Barrier(num_barriers=_WARPGROUPS),
            "q_consumed": plgpu.Barrier(num_barriers=_WARPGROUPS),
            "k_landed": landed,
            "k_consumed": consumed,
            "v_landed": landed,
            "v_consumed": consumed,
            "turn": plgpu.Barrier(num_arrivals=_WARPGROUPS),
            **moving,
        },
        grid=(blocks // sizes.cluster,),
        grid_names=("block",),
        num_threads=_WARPGROUPS + (2 if spread else 1),
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        **clusters,
    )
    result = kernel(tiles, count, table, q, pages, *operands)
    return (result[0], result[1].reshape(spread.rows, -1)) if spread else result


def _kernel(
    tiles: Any,  # [tiles, 6] int32, global
    count: Any,  # [1] int32, global
    table: Any,  # [N, P] int32, global
    q: Any,  # [T, H, d], global
    pages: Any,  # [pages, 2, K, 64, d], global
    *moving: Any,  # global: rows [T, D / 256, 256] and where they go [T · k], if any; out [T, H, d]; rows written
    q_tile: Any,  # [2, 64, d], shared
    staging: Any,  # [2, 64, d], shared
    k_ring: Any,  # [stages, 128, d], shared
    v_ring: Any,  # [stages, 128, d], shared
    q_landed: Any,  # [2] barriers
    q_consumed: Any,  # [2] barriers
    k_landed: Any,  # [stages] barriers
    k_consumed: Any,  # [stages] barriers
    v_landed: Any,  # [stages] barriers
    v_consumed: Any,  # [stages] barriers
    turn: Any,  # a barrier of both consumers
    moved: Any = None,  # [slots, D / 256, 256], shared
    moved_landed: Any = None,  # [slots] barriers
    window: int | None,
    blocks: int,
    sizes: AttentionSizes,
    interpreted: bool,
) -> None:
    out = moving[0] if moved is None else moving[2]
    _, heads, d = q.shape
    heads_per_kv_head = heads // pages.shape[2]
    stages = sizes.stages
    entries = table.shape[1]
    warpgroup = lax.axis_index("warpgroup")
    block = lax.axis_index("block")
    cluster = sizes.cluster
    member = lax.axis_index("cluster") if cluster > 1 else jnp.int32(0)
    share = "cluster" if cluster > 1 else None
    clusters, head_groups = blocks // cluster, heads // cluster
    total = count[0] * head_groups
    steps = pl.cdiv(total, jnp.int32(clusters))

    def item(step: jax.Array) -> tuple[jax.Array, ...]:
        """The tile and head of a step: there and back over the blocks, since tiles become shorter."""
        index = step * clusters + jnp.where(lax.rem(step, jnp.int32(2)) == 0, block, clusters - 1 - block)
        works = index < total
        tile = jnp.where(works, lax.div(index, jnp.int32(head_groups)), 0)
        prompt, token, position, queries, first_page, key_blocks = (tiles[tile, i] for i in range(6))
        token = pl.multiple_of(token, TOKEN_ALIGN)
        key_blocks = jnp.where(works, key_blocks, 0)
        head = lax.rem(index, jnp.int32(head_groups)) * cluster + member
        return prompt, token, position, queries, first_page, key_blocks, head

    def produce(step: jax.Array, loaded: jax.Array) -> jax.Array:
        prompt, token, position, queries, first_page, key_blocks, head = item(step)
        kv_head = lax.div(head, jnp.int32(heads_per_kv_head))
        last_page = lax.div(position + queries - 1, jnp.int32(PAGE_SIZE))

        @pl.when(key_blocks > 0)
        def load_queries() -> None:
            for i in range(_WARPGROUPS):
                plgpu.barrier_wait(q_consumed.at[i])
                rows = pl.ds(pl.multiple_of(token + i * _QUERIES, TOKEN_ALIGN), _QUERIES)
                plgpu.copy_gmem_to_smem(q.at[rows, head], q_tile.at[i], q_landed.at[i])

        @pl.loop(0, key_blocks)
        def load_block(step: jax.Array) -> None:
            stage = lax.rem(loaded + step, jnp.int32(stages))
            numbers = []
            for i in range(PAGES_PER_BLOCK):  # beyond the last page it is loaded again, and masked
                logical = jnp.minimum(first_page + step * PAGES_PER_BLOCK + i, last_page)
                numbers.append(table[prompt, lax.rem(logical, jnp.int32(entries))])
            for part, ring, landed, consumed in ((0, k_ring, k_landed, k_consumed), (1, v_ring, v_landed, v_consumed)):
                plgpu.barrier_wait(consumed.at[stage])
                for i, number in enumerate(numbers):
                    rows = pl.ds(i * PAGE_SIZE, PAGE_SIZE)
                    page = pages.at[number, part, kv_head]
                    plgpu.copy_gmem_to_smem(page, ring.at[stage, rows], landed.at[stage], collective_axes=share)

        return loaded + key_blocks

    def take_turn() -> None:
        if sizes.take_turns:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

    def consume(step: jax.Array, loaded: jax.Array) -> jax.Array:
        _, token, position, queries, first_page, key_blocks, head = item(step)

        @pl.when(key_blocks > 0)
        def attend_tile() -> None:
            first_query = position + warpgroup * _QUERIES
            plgpu.barrier_wait(q_landed.at[warpgroup])
            attend = functools.partial(key_block, loaded, first_query, first_page * PAGE_SIZE, key_blocks)
            row_layout = plgpu.Layout.WGMMA.reduce(1)
            carry = (
                plgpu.layout_cast(jnp.zeros((_QUERIES, d), jnp.float32), plgpu.Layout.WGMMA),
                plgpu.layout_cast(jnp.full((_QUERIES,), -jnp.inf, jnp.float32), row_layout),
                plgpu.layout_cast(jnp.zeros((_QUERIES,), jnp.float32), row_layout),
            )
            sums, _, weight = lax.fori_loop(0, key_blocks, attend, carry)
            result = sums * lax.broadcast_in_dim(1.0 / weight, sums.shape, [0])
            store(result.astype(out.dtype), token + warpgroup * _QUERIES, queries - warpgroup * _QUERIES, head)

        return loaded + key_blocks

    def key_block(
        loaded: jax.Array,
        first_query: jax.Array,
        first_key: jax.Array,
        key_blocks: jax.Array,
        step: jax.Array,
        carry: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Scores, softmax and sums of 64 queries and 128 keys."""
        sums, maximum, weight = carry
        stage = lax.rem(loaded + step, jnp.int32(stages))
        plgpu.barrier_wait(k_landed.at[stage])

        def score(products: Any) -> jax.Array:
            plgpu.wgmma(products, q_tile.at[warpgroup], k_ring.at[stage].transpose((1, 0)))
            take_turn()
            return products[...]

        scores = pl.run_scoped(score, accumulator(_QUERIES, _KEYS))
        plgpu.barrier_arrive(k_consumed.at[stage])

        @pl.when(step == key_blocks - 1)
        def release_queries() -> None:
            plgpu.barrier_arrive(q_consumed.at[warpgroup])

        key = first_key + step * _KEYS
        scores = mask(scores, first_query, key)
        scale = d**-0.5 * math.log2(math.e)
        new_maximum = jnp.maximum(maximum, scores.max(axis=1) * scale)
        shrink = jnp.exp2(maximum - new_maximum)
        p = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_maximum, scores.shape, [0]))
        weight = weight * shrink + p.sum(axis=1)
        p16 = p.astype(q.dtype)
        weight, shrink, new_maximum, p16 = lax.optimization_barrier((weight, shrink, new_maximum, p16))
        if sizes.take_turns:
            plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(v_landed.at[stage])
        if sizes.take_turns:
            plgpu.barrier_wait(turn)

        def weigh(products: Any) -> jax.Array:
            plgpu.wgmma(products, p16, v_ring.at[stage])
            return products[...]

        if interpreted:  # the interpreter's wgmma takes no operand from registers
            added = jnp.dot(p16, v_ring[stage], preferred_element_type=jnp.float32)
        else:
            added = pl.run_scoped(weigh, accumulator(_QUERIES, d))
        sums = sums * lax.broadcast_in_dim(shrink, sums.shape, [0]) + added
        plgpu.barrier_arrive(v_consumed.at[stage])
        return sums, new_maximum, weight

    def mask(scores: jax.Array, first_query: jax.Array, first_key: jax.Array) -> jax.Array:
        """Masks keys after the query and before its window, in those blocks that have some."""
        last_query = first_query + _QUERIES - 1
        some = first_key + _KEYS - 1 > first_query
        if window is not None:
            some |= first_key <= last_query - window

        def apply(scores: jax.Array) -> jax.Array:
            layout = plgpu.Layout.WGMMA
            query = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=layout) + (first_query - first_key)
            key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
            scores = jnp.where(key <= query, scores, _MASKED)
            return scores if window is None else jnp.where(key > query - window, scores, _MASKED)

        return lax.cond(some, apply, lambda scores: scores, scores)

    def store(result: jax.Array, token: jax.Array, queries: jax.Array, head: jax.Array) -> None:
        slot = staging.at[warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        slot[...] = result
        plgpu.commit_smem()

        def copy(first: int, rows: int) -> None:
            to = pl.ds(pl.multiple_of(token + first, TOKEN_ALIGN), rows)
            plgpu.copy_smem_to_gmem(slot.at[pl.ds(first, rows)], out.at[to, head], commit_group=False)

        pl.when(queries >= _QUERIES)(lambda: copy(0, _QUERIES))

        @pl.when(queries < _QUERIES)
        def store_some() -> None:  # the end of a prompt: another one may follow
            for first in range(0, _QUERIES, TOKEN_ALIGN):
                pl.when(first < queries)(functools.partial(copy, first, TOKEN_ALIGN))

        plgpu.commit_smem_to_gmem_group()

    @pl.when(warpgroup < _WARPGROUPS)
    def consumers() -> None:
        plgpu.set_max_registers(_CONSUMER_REGISTERS[moved is not None], action="increase")
        plgpu.barrier_arrive(q_consumed.at[warpgroup])
        for stage in range(stages):
            plgpu.barrier_arrive(k_consumed.at[stage])
            plgpu.barrier_arrive(v_consumed.at[stage])
        pl.when(warpgroup == 1)(take_turn)
        lax.fori_loop(0, steps, consume, jnp.int32(0))
        pl.when(warpgroup == 0)(take_turn)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == _WARPGROUPS)
    def producer() -> None:
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        lax.fori_loop(0, steps, produce, jnp.int32(0))
        for i in range(_WARPGROUPS):
            plgpu.barrier_wait(q_consumed.at[i])
        for stage in range(stages):
            plgpu.barrier_wait(k_consumed.at[stage])
            plgpu.barrier_wait(v_consumed.at[stage])

    if moved is not None:

        @pl.when(warpgroup == _WARPGROUPS + 1)
        def mover() -> None:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            _move(moving[0], moving[1], moving[3], moved, moved_landed, block * cluster + member, blocks)


def _move(h: Any, row: Any, x: Any, moved: Any, landed: Any, block: jax.Array, blocks: int) -> None:
    """Copies the rows of a block's tokens, every `blocks`-th, to their places."""
    tokens = h.shape[0]
    top = row.shape[0] // tokens
    mine = lax.div(tokens - block + (blocks - 1), jnp.int32(blocks))

    def load(number: jax.Array) -> None:
        @pl.when(number < mine)
        def load_row() -> None:
            slot = lax.rem(number, jnp.int32(_MOVE_SLOTS))
            plgpu.copy_gmem_to_smem(h.at[block + number * blocks], moved.at[slot], landed.at[slot])

    for number in range(_MOVE_AHEAD):
        load(jnp.int32(number))

    @pl.loop(0, mine)
    def move_token(number: jax.Array) -> None:
        slot = lax.rem(number, jnp.int32(_MOVE_SLOTS))
        places = [row[(block + number * blocks) * top + j] for j in range(top)]
        plgpu.wait_smem_to_gmem(_MOVE_SLOTS - _MOVE_AHEAD - 1, wait_read_only=True)
        load(number + _MOVE_AHEAD)
        plgpu.barrier_wait(landed.at[slot])
        for to in places:

            @pl.when(to < x.shape[0])
            def write(to: jax.Array = to) -> None:
                plgpu.copy_smem_to_gmem(moved.at[slot], x.at[to], commit_group=False)

        plgpu.commit_smem_to_gmem_group()

    plgpu.wait_smem_to_gmem(0)

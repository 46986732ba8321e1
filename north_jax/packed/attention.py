"""Attention of a packed chunk to the pages of every piece's prompt."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..attention import paged_attention
from ..kernels.device import multiprocessors, runs_kernels
from ..kernels.paged_attention import paged_attention_kernel
from ..kernels.query_tiles import query_tiles
from ..kv_cache import PAGE_SIZE
from ..layers import Array

_REFERENCE_TILE = 32  # queries of a row of the pure-JAX form; each is computed with as many keys as the longest needs


def packed_attention(
    q: Array,
    pages: Array,
    table: Array,
    tiles: tuple[Array, Array],
    offset: Array,
    start: Array,
    length: Array,
    window: int | None,
) -> Array:
    """Attends to pages, which hold the chunk's own keys and values already.

    Args:
      q: [T, H, d], rotated, not scaled.
      pages: [pages, 2, K, PAGE_SIZE, d].
      table: [N, P] int32.
      tiles: of `query_tiles` for this window.
      offset: [N] int32, where each piece begins.
      start: [N] int32, the position of its first token.
      length: [N] int32, 0 for no piece.
      window: keys that a query sees, its own included; None for all before it.

    Returns:
      [T, H, d] in q's dtype; what belongs to no piece holds anything.
    """

    def on_hopper(q: Array, pages: Array, table: Array, tiles: Array, count: Array, *_: Array) -> Array:
        return paged_attention_kernel(q, pages, table, tiles, count, window=window, blocks=multiprocessors())

    def elsewhere(
        q: Array, pages: Array, table: Array, _t: Array, _c: Array, offset: Array, start: Array, length: Array
    ) -> Array:
        return packed_attention_reference(q, pages, table, offset, start, length, window)

    operands = (q, pages, table, *tiles, offset, start, length)
    if not (applies(q, pages) and runs_kernels()):
        return elsewhere(*operands)
    return jax.lax.platform_dependent(*operands, cuda=on_hopper, default=elsewhere)


def applies(q: Array, pages: Array) -> bool:
    """Whether the kernel takes these sizes and types."""
    half = q.dtype in (jnp.bfloat16, jnp.float16) and pages.dtype == q.dtype
    return half and q.shape[-1] in (64, 128) and pages.shape[3] == PAGE_SIZE


def packed_attention_reference(
    q: Array, pages: Array, table: Array, offset: Array, start: Array, length: Array, window: int | None
) -> Array:
    """`packed_attention` in pure JAX: `attention.paged_attention` over rows of a few queries of one piece each."""
    tokens = q.shape[0]
    tiles, _ = query_tiles(offset, start, length, tokens=tokens, window=window, tile=_REFERENCE_TILE)
    piece, first, position, count = tiles[:, 0], tiles[:, 1], tiles[:, 2], tiles[:, 3]
    count = jnp.where(piece >= 0, count, 0)
    lane = jnp.arange(_REFERENCE_TILE, dtype=jnp.int32)
    token = jnp.where(lane < count[:, None], first[:, None] + lane, tokens)  # [tiles, 32]; beyond the end: none
    rows = q.at[token].get(mode="clip")
    out = paged_attention(rows, pages, table[jnp.maximum(piece, 0)], position, count, window)
    return jnp.zeros_like(q).at[token].set(out, mode="drop")

"""Tiles of queries for attention over pages: where each begins, what it sees, and in which order they run."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..kv_cache import PAGE_SIZE

TILE = 128  # queries of a tile
PAGES_PER_BLOCK = 2  # pages of keys that a step takes at once
TOKEN_ALIGN = 8  # a prompt begins at a multiple of it in a packed chunk
NOTHING = -1


def tile_count(tokens: int, rows: int, tile: int = TILE) -> int:
    """Tiles that `tokens` queries of `rows` prompts need at most."""
    return tokens // tile + min(rows, tokens)


def query_tiles(
    offset: jax.Array, start: jax.Array, length: jax.Array, *, tokens: int, window: int | None, tile: int = TILE
) -> tuple[jax.Array, jax.Array]:
    """Cuts the queries of several prompts into tiles, those with the most keys first: so that blocks end together.

    Args:
      offset: [N] int32, where each prompt's queries begin among the packed ones; multiples of TOKEN_ALIGN.
      start: [N] int32, the position of its first query.
      length: [N] int32, its queries, 0 for none.
      tokens: T, of the packed queries, static.
      window: keys that a query sees, its own included; None for all before it.
      tile: queries of a tile.

    Returns:
      [tiles, 6] int32: prompt or NOTHING, first query in the packed ones, its position, queries, first page that the
      tile sees (of the prompt's, counted from position 0), blocks of PAGES_PER_BLOCK pages; and [1] int32, how many
      there are.
    """
    rows = offset.shape[0]
    end = jnp.cumsum(-(-length // tile))
    number = jnp.arange(tile_count(tokens, rows, tile), dtype=jnp.int32)
    prompt = jnp.sum(number[:, None] >= end, axis=1, dtype=jnp.int32)
    held = jnp.minimum(prompt, rows - 1)
    within = (number - jnp.where(held > 0, end[held - 1], 0)) * tile
    position = start[held] + within
    count = jnp.clip(length[held] - within, 0, tile)
    first_key = jnp.zeros_like(position) if window is None else jnp.maximum(position - window + 1, 0)
    first_page = first_key // PAGE_SIZE
    pages = (position + count - 1) // PAGE_SIZE - first_page + 1
    works = prompt < rows
    blocks = jnp.where(works, -(-pages // PAGES_PER_BLOCK), 0)
    tiles = jnp.stack(
        [jnp.where(works, held, NOTHING), offset[held] + within, position, count, first_page, blocks], axis=1
    )
    return tiles[jnp.argsort(-blocks, stable=True)], end[-1:]

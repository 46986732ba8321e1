"""The end of a packed chunk: its last layer, and the logits after each piece's last token.

Of the last layer the others leave only keys and values behind. So its attention, experts and remaining projections are
computed for the last tokens alone, which saves most of a forty-ninth part of the whole.
"""

from __future__ import annotations

import jax.numpy as jnp

from ..config import Config
from ..kernels.query_tiles import TOKEN_ALIGN, query_tiles
from ..layers import Array, Params, head, norm
from .buckets import LEAST
from .chunk import Chunk, Places, branches, placed, write_pages
from .projections import project


def last_layer(config: Config, params: Params, pages: Array, x: Array, chunk: Chunk) -> tuple[Array, Array]:
    """The last layer for the last token of each piece alone: nothing else of it is read again but keys and values.

    Args:
      config: the model's configuration.
      params: of this layer.
      pages: [pages, 2, K, PAGE_SIZE, d] of this layer.
      x: [T, D].
      chunk: from `begin`.

    Returns:
      the pages with the chunk's keys and values, and [N, D], meaningless but finite for no piece.
    """
    number = config.num_hidden_layers - 1
    heads, kv_heads, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    h = norm(config, x, params["norm"])
    kv = project(h, params["qkv"][heads * d :]).reshape(h.shape[0], 2 * kv_heads, d)
    k, v = jnp.split(kv, 2, axis=1)
    pages = write_pages(pages, placed(config, number, k, chunk), v, chunk.places(config, number), chunk)
    token, few = last_tokens(config, chunk)
    x, h = x[token], h[token]
    q = project(h, params["qkv"][: heads * d]).reshape(h.shape[0], heads, d)
    q = placed(config, number, q, few)
    x = branches(config, number, params, pages, q, x, h, few)
    return pages, x[few.offset]


def last_tokens(config: Config, chunk: Chunk) -> tuple[Array, Chunk]:
    """The last tokens of a chunk's pieces as a chunk of their own, for its last layer; it writes nothing.

    Returns:
      [T'] int32: which of the chunk's tokens each is; and the new chunk, in which every TOKEN_ALIGN-th is valid.
    """
    rows = chunk.offset.shape[0]
    total = -(-rows * TOKEN_ALIGN // LEAST) * LEAST
    index = jnp.arange(total, dtype=jnp.int32)
    piece = jnp.minimum(index // TOKEN_ALIGN, rows - 1)
    token = jnp.maximum(chunk.offset + chunk.length - 1, 0)[piece]
    works = chunk.length > 0
    offset = TOKEN_ALIGN * jnp.arange(rows, dtype=jnp.int32)
    start = jnp.where(works, chunk.start + chunk.length - 1, 0)
    length = works.astype(jnp.int32)
    number = config.num_hidden_layers - 1
    none = jnp.zeros(0, jnp.int32)
    tiles = query_tiles(offset, start, length, tokens=total, window=config.window(number))
    places = Places(chunk.places(config, number).table, none[:, None], *tiles)
    return token, Chunk(
        cosine=chunk.cosine[token],
        sine=chunk.sine[token],
        valid=(index == offset[piece]) & works[piece],
        slot=none,
        written=none,
        offset=offset,
        start=start,
        length=length,
        full=places,
        sliding=places,
    )


def finish(
    config: Config, embedding: Array, final_norm: Array, params: Params, pages: Array, x: Array, chunk: Chunk
) -> tuple[Array, Array]:
    """The last layer's pages, and the logits after each last token: float32 [N, V], meaningless for no piece."""
    pages, x = last_layer(config, params, pages, x, chunk)
    return pages, head(config, {"embed": embedding, "final_norm": final_norm}, x)


def last_logits(config: Config, embedding: Array, final_norm: Array, x: Array, chunk: Chunk) -> Array:
    """The same logits of the last layer's whole output [T, D]."""
    last = jnp.maximum(chunk.offset + chunk.length - 1, 0)
    return head(config, {"embed": embedding, "final_norm": final_norm}, x[last])

"""Prefill and decode over the paged KV cache, as pure functions: two thin faces of `extend`.

Jit them with `config` static and `cache` donated, so that the pages are updated in place:

>>> step = jax.jit(decode_step, static_argnums=0, donate_argnums=2)
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp

from .attention import paged_attention
from .config import Config
from .kv_cache import KVCache, PageTables
from .layers import Array, Params, embed, head, linear, norm, project_qkv
from .model import feed_forward
from .moe import Method
from .native import kv_write
from .sharding import constrain, on_page_shards


def extend(
    config: Config,
    params: Params,
    cache: KVCache,
    tables: PageTables,
    tokens: Array,
    start: Array,
    length: Array,
    method: Method = "auto",
) -> tuple[KVCache, Array]:
    """Appends tokens to N rows: writes their keys and values into pages and runs every layer on them.

    Args:
      config: the model's configuration.
      params: DESIGN.md, "Parameters".
      cache: one array of pages a layer.
      tables: page numbers of the N rows, covering positions up to start + length.
      tokens: [N, T] int32; entries at or beyond length[i] are padding.
      start: [N] int32, positions the row holds already.
      length: [N] int32, tokens appended; 0 for an idle row.
      method: how the experts run; see `moe`.

    Returns:
      the updated cache, and the last layer's output [N, T, D] (padding meaningless but finite).
    """
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions, live = start[:, None] + column, column < length[:, None]  # [N, T]
    x = embed(params, tokens)
    updated = list(cache)
    for i in range(config.num_hidden_layers):
        layer = params["layers"][i]
        table = jnp.asarray(tables.of_layer(config, i))
        h = norm(config, x, layer["norm"])
        q, k, v = project_qkv(config, i, h, layer["qkv"], positions)
        attend = partial(_attend_pages, config.window(i))
        updated[i], mixed = on_page_shards(attend, updated[i], q, k, v, table, start, length)
        attended = linear(mixed.reshape(*h.shape[:-1], -1), layer["o"])
        x = constrain(x + attended + feed_forward(config, i, layer["mlp"], h, method, live=live), "batch", ...)
    return tuple(updated), x


def _attend_pages(
    window: int | None, pages: Array, q: Array, k: Array, v: Array, table: Array, start: Array, length: Array
) -> tuple[Array, Array]:
    """Writes keys and values into their pages; the pages, and what the queries find there."""
    pages = kv_write(pages, k.astype(pages.dtype), v.astype(pages.dtype), table, start, length)
    return pages, paged_attention(q, pages, table, start, length, window)


def prefill(
    config: Config,
    params: Params,
    cache: KVCache,
    tables: PageTables,
    tokens: Array,
    start: Array,
    length: Array,
    method: Method = "auto",
) -> tuple[KVCache, Array]:
    """`extend` by a chunk of each prompt, and the logits after each row's last token.

    Returns:
      the updated cache, and float32 logits [N, V] (meaningless for a row of length 0).
    """
    cache, x = extend(config, params, cache, tables, tokens, start, length, method)
    last = jnp.maximum(length - 1, 0)
    x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]  # [N, D]
    return cache, head(config, params, x)


def decode_step(
    config: Config,
    params: Params,
    cache: KVCache,
    tables: PageTables,
    tokens: Array,
    start: Array,
    active: Array,
    method: Method = "auto",
) -> tuple[KVCache, Array]:
    """`extend` by one token in every active slot.

    Args:
      config: the model's configuration.
      params: DESIGN.md, "Parameters".
      cache: one array of pages a layer.
      tables: page numbers of the slots.
      tokens: [S] int32, the newest token of each slot, not yet in the cache.
      start: [S] int32, positions each slot holds already.
      active: [S] bool; the others are idle.
      method: how the experts run; see `moe`.

    Returns:
      the updated cache, and float32 logits [S, V] (meaningless for an idle slot).
    """
    return prefill(config, params, cache, tables, tokens[:, None], start, active.astype(jnp.int32), method)

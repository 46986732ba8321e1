"""The device side of a packed chunk: embedding and places, one layer, and the logits at the end.

Each is a function of its own so that a layer is compiled once for all layers of its kind: a chunk size then costs
seconds to compile, not minutes. What depends on the chunk alone, not on the layer, is computed once in `begin`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from ..config import DENSE, FULL, SLIDING, Config
from ..kernels.query_tiles import query_tiles
from ..kv_cache import PAGE_SIZE, PageTables
from ..layers import Array, Params, dense_mlp, embed, head, linear, norm, project_qkv
from ..moe import route
from ..native import kv_write
from .attention import packed_attention, whole_attention
from .experts import packed_experts
from .packing import Packed


class Places(NamedTuple):
    """Where a chunk's keys and values go, and what its queries see, in one group of layers."""

    table: Array  # [N, P] int32
    page: Array  # [W, 1] int32, of each token written; W = T + N · PAGE_SIZE, the last of which clear
    tiles: Array  # [tiles, 6] int32, of `query_tiles`
    works: Array  # [1] int32, how many of the tiles hold work


class Chunk(NamedTuple):
    """A packed chunk on the device."""

    position: Array  # [T] int32
    valid: Array  # [T] bool: belongs to a piece
    slot: Array  # [W] int32, in its page, of each token written
    written: Array  # [W] int32: 1, or 0 for padding
    offset: Array  # [N] int32
    start: Array  # [N] int32
    length: Array  # [N] int32
    full: Places
    sliding: Places

    def places(self, config: Config, layer: int) -> Places:
        """Those of the group that a layer belongs to."""
        return self.full if config.layer_types[layer] == FULL else self.sliding


def begin(config: Config, embedding: Array, packed: Packed, tables: PageTables) -> tuple[Array, Chunk]:
    """Embeds the tokens, and works out their places.

    Args:
      config: the model's configuration.
      embedding: [V, D].
      packed: T tokens of N pieces.
      tables: of the N pieces' prompts, for positions up to their ends.

    Returns:
      x [T, D], and what `layer` needs of the chunk.
    """
    tokens, offset, start, length = (jnp.asarray(array) for array in packed)
    total = tokens.shape[0]
    index = jnp.arange(total, dtype=jnp.int32)[:, None]
    member = (index >= offset) & (index < offset + length)  # [T, N]
    piece = jnp.argmax(member, axis=1).astype(jnp.int32)
    valid = jnp.any(member, axis=1)
    position = jnp.where(valid, start[piece] + index[:, 0] - offset[piece], 0)
    # The rest of a piece's last page is cleared: what a former owner left there is multiplied by weights of 0, and a
    # NaN times 0 is NaN.
    rest = (start + length)[:, None] + jnp.arange(PAGE_SIZE, dtype=jnp.int32)  # [N, PAGE_SIZE]
    clears = (length[:, None] > 0) & (rest // PAGE_SIZE == (start + length - 1)[:, None] // PAGE_SIZE)
    places = jnp.concatenate([position, rest.reshape(-1)])
    owner = jnp.concatenate([piece, jnp.repeat(jnp.arange(offset.shape[0], dtype=jnp.int32), PAGE_SIZE)])
    written = jnp.concatenate([valid, clears.reshape(-1)]).astype(jnp.int32)

    def group(table: Array, window: int | None) -> Places:
        page = table[owner, places // PAGE_SIZE % table.shape[1]]
        return Places(table, page[:, None], *query_tiles(offset, start, length, tokens=total, window=window))

    full, sliding = (jnp.asarray(table) for table in tables)
    window = config.sliding_window if SLIDING in config.layer_types else None
    x = embed({"embed": embedding}, tokens)
    slot = places % PAGE_SIZE
    return x, Chunk(position, valid, slot, written, offset, start, length, group(full, None), group(sliding, window))


def layer(
    config: Config, like: int, params: Params, pages: Array, x: Array, chunk: Chunk, *, whole: bool
) -> tuple[Array, Array]:
    """One layer over a chunk.

    Args:
      config: the model's configuration.
      like: index of a layer of the same kind.
      params: of this layer; DESIGN.md, "Parameters".
      pages: [pages, 2, K, PAGE_SIZE, d] of this layer.
      x: [T, D].
      chunk: from `begin`.
      whole: whether the chunk is one prompt from its beginning on, with offset and start 0.

    Returns:
      the pages with the chunk's keys and values, and [T, D] (padding meaningless but finite).
    """
    places, window = chunk.places(config, like), config.window(like)
    h = norm(config, x, params["norm"])
    q, k, v = project_qkv(config, like, h, params["qkv"], chunk.position)
    pages = _write(pages, k, v, places, chunk)
    if whole:
        mixed = whole_attention(q, k, v, window)
    else:
        tiles = (places.tiles, places.works)
        mixed = packed_attention(q, pages, places.table, tiles, chunk.offset, chunk.start, chunk.length, window)
    attended = linear(mixed.reshape(x.shape[0], -1), params["o"])
    added = attended + _feed_forward(config, like, params["mlp"], h, chunk.valid)
    return pages, x + jnp.where(chunk.valid[:, None], added, 0)


def _write(pages: Array, k: Array, v: Array, places: Places, chunk: Chunk) -> Array:
    """Writes keys and values, [T, K, d] each, and clears the rest of the last pages: each token is a row of its own."""
    clear = ((0, places.page.shape[0] - k.shape[0]), (0, 0), (0, 0))
    k, v = (jnp.pad(values.astype(pages.dtype), clear)[:, None] for values in (k, v))  # [W, 1, K, d]
    return kv_write(pages, k, v, places.page, chunk.slot, chunk.written)


def _feed_forward(config: Config, like: int, mlp: Params, h: Array, valid: Array) -> Array:
    if config.mlp_layer_types[like] == DENSE:
        return dense_mlp(mlp, h)
    experts, weights, _ = route(config, mlp["router"], h)
    return packed_experts(config, mlp, h, experts, weights, valid)


def finish(config: Config, embedding: Array, final_norm: Array, x: Array, chunk: Chunk) -> Array:
    """The logits after each piece's last token: float32 [N, V], meaningless for no piece."""
    last = jnp.maximum(chunk.offset + chunk.length - 1, 0)
    return head(config, {"embed": embedding, "final_norm": final_norm}, x[last])


def kinds(config: Config) -> list[int]:
    """For each layer the first one that is computed as it is: what is compiled for that serves both."""
    first: dict[tuple[object, ...], int] = {}
    return [
        first.setdefault((config.rope_layers[i], config.window(i), config.mlp_layer_types[i], config.layer_types[i]), i)
        for i in range(config.num_hidden_layers)
    ]

"""The device side of a packed chunk: embedding and places, and its layers.

Each is a function of its own so that a layer is compiled once for all layers of its kind: a chunk size then costs
seconds to compile, not minutes. What depends on the chunk alone, not on the layer, is computed once in `begin`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..config import DENSE, FULL, SLIDING, Config
from ..kernels.device import runs_kernels
from ..kernels.query_tiles import query_tiles
from ..kv_cache import PAGE_SIZE, PageTables
from ..layers import Array, Params, dense_mlp, embed, norm
from ..model import first_of_its_kind
from ..moe import route_logits
from ..native import kv_write
from .attention import packed_attention
from .experts import routed_experts
from .joined import joined_once, joins
from .packing import Packed
from .projections import project, rotated, rotation


class Places(NamedTuple):
    """Where a chunk's keys and values go, and what its queries see, in one group of layers."""

    table: Array  # [N, P] int32
    page: Array  # [W, 1] int32, of each token written; W = T + N · PAGE_SIZE, the last of which clear
    tiles: Array  # [tiles, 6] int32, of `query_tiles`
    works: Array  # [1] int32, how many of the tiles hold work


class Chunk(NamedTuple):
    """A packed chunk on the device."""

    cosine: Array  # [T, d] float32, by which a rotated value is multiplied
    sine: Array  # [T, d] float32, by which the other one of its pair is, to be added
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
    return x, Chunk(
        *rotation(config, position),
        valid,
        slot,
        written,
        offset,
        start,
        length,
        group(full, None),
        group(sliding, window),
    )


def layer(config: Config, like: int, params: Params, pages: Array, x: Array, chunk: Chunk) -> tuple[Array, Array]:
    """One layer over a chunk.

    Args:
      config: the model's configuration.
      like: index of a layer of the same kind.
      params: of this layer; DESIGN.md, "Parameters".
      pages: [pages, 2, K, PAGE_SIZE, d] of this layer.
      x: [T, D].
      chunk: from `begin`.

    Returns:
      the pages with the chunk's keys and values, and [T, D] (padding meaningless but finite).
    """
    heads, kv_heads, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    h = norm(config, x, params["norm"])
    fused = project(h, params["qkv"]).reshape(h.shape[0], heads + 2 * kv_heads, d)
    q, k, v = jnp.split(fused, [heads, heads + kv_heads], axis=1)
    q, k = (placed(config, like, part, chunk) for part in (q, k))
    pages = write_pages(pages, k, v, chunk.places(config, like), chunk)
    return pages, branches(config, like, params, pages, q, x, h, chunk)


def branches(
    config: Config, like: int, params: Params, pages: Array, q: Array, x: Array, h: Array, chunk: Chunk
) -> Array:
    """x [T, D] plus attention of q [T, H, d] to written pages plus the MLP of h [T, D]: [T, D]."""
    places = chunk.places(config, like)
    sparse = config.mlp_layer_types[like] != DENSE

    def apart(q: Array, pages: Array, x: Array, h: Array, params: Params) -> Array:
        mixed = packed_attention(
            q,
            pages,
            places.table,
            (places.tiles, places.works),
            chunk.offset,
            chunk.start,
            chunk.length,
            config.window(like),
        )
        attended = project(mixed.reshape(x.shape[0], -1), params["o"])
        if sparse:
            return routed_experts(config, params["mlp"], h, chunk.valid, onto=(x, attended))
        return x + jnp.where(chunk.valid[:, None], attended + dense_mlp(params["mlp"], h), 0)

    def together(q: Array, pages: Array, x: Array, h: Array, params: Params) -> Array:
        mlp = params["mlp"]
        logits = route_logits(mlp["router"], h)
        works = places.table, places.tiles, places.works
        moe = chunk.valid, params["o"], mlp["gate_up"], mlp["down"]
        return joined_once(config, config.window(like), q, pages, *works, x, h, logits, *moe)

    operands = q, pages, x, h, {name: params[name] for name in ("o", "mlp")}
    if sparse and joins(config, q, pages, h, params["mlp"]) and runs_kernels():
        return jax.lax.platform_dependent(*operands, cuda=together, default=apart)
    return apart(*operands)


def layers(
    config: Config, like: tuple[int, ...], params: tuple[Params, ...], pages: tuple[Array, ...], x: Array, chunk: Chunk
) -> tuple[tuple[Array, ...], Array]:
    """Several layers, one after another: as `layer`, with a tuple of what is of one layer there."""
    updated = []
    for one, weights, held in zip(like, params, pages, strict=True):
        held, x = _layer(config, one, weights, held, x, chunk)
        updated.append(held)
    return tuple(updated), x


_layer = jax.jit(layer, static_argnums=(0, 1))  # traced once for all layers of a kind


def placed(config: Config, like: int, x: Array, chunk: Chunk) -> Array:
    """Queries or keys [T, heads, d], rotated where the layer uses RoPE."""
    return rotated(x, chunk.cosine, chunk.sine) if config.rope_layers[like] else x


def write_pages(pages: Array, k: Array, v: Array, places: Places, chunk: Chunk) -> Array:
    """Writes keys and values, [T, K, d] each, and clears the rest of the last pages: each token is a row of its own."""
    tokens = k.shape[0]
    k, v = (values.astype(pages.dtype)[:, None] for values in (k, v))  # [T, 1, K, d]
    pages = kv_write(pages, k, v, places.page[:tokens], chunk.slot[:tokens], chunk.written[:tokens])
    nothing = jnp.zeros((places.page.shape[0] - tokens, *k.shape[1:]), pages.dtype)
    return kv_write(pages, nothing, nothing, places.page[tokens:], chunk.slot[tokens:], chunk.written[tokens:])


def kinds(config: Config) -> list[int]:
    """For each layer the first one that is computed as it is: what is compiled for that serves both."""
    return [first_of_its_kind(config, i) for i in range(config.num_hidden_layers)]


def programs(kinds: list[int], most: int = 8) -> list[tuple[int, ...]]:
    """Cuts the layers into runs, each of which is one call of a compiled program: few calls of few programs.

    A program takes as long to compile as it has layers, and between two calls the GPU waits. So the kinds' period is
    looked for: what comes before it runs layer by layer, and so does what remains at the end.

    Args:
      kinds: of `kinds`.
      most: layers of a program.

    Returns:
      the kinds of each run's layers.
    """
    count = len(kinds)
    if not count:
        return []

    def cut(first: int, period: int) -> list[tuple[int, ...]]:
        whole = (count - first) // period
        runs = [tuple(kinds[first + i * period : first + (i + 1) * period]) for i in range(whole)]
        return [*((kind,) for kind in kinds[:first]), *runs, *((kind,) for kind in kinds[first + whole * period :])]

    def cost(runs: list[tuple[int, ...]]) -> tuple[int, int]:
        return 2 * sum(map(len, set(runs))) + len(runs), len(runs)

    return min((cut(first, period) for period in range(1, most + 1) for first in range(count)), key=cost)

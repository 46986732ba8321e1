"""What attention, experts and projections take of a prefill: each by itself, on the same shapes, beside its FLOPs.

A part is timed as a compiled function of its own, called for as many layers as have it, each with its own weights; what
the parts leave of the whole is the rest: norms, rotations, writing pages, head, and gaps between kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from north_jax.attention import attention
from north_jax.config import DENSE, FULL, SLIDING, Config
from north_jax.kv_cache import KVCache, PageTables
from north_jax.layers import Array, Params, dense_mlp, linear
from north_jax.packed import PackedPrefill, Piece, pack
from north_jax.packed.attention import packed_attention
from north_jax.packed.chunk import Chunk, begin, kinds
from north_jax.packed.experts import routed_experts

PARTS = ("attention", "experts", "projections")
MILLISECONDS = tuple(f"{part}_ms" for part in (*PARTS, "rest"))
_RUNS = 3  # the quickest counts


def measure(
    config: Config,
    params: Params,
    cache: KVCache,
    prefill: PackedPrefill,
    pieces: Sequence[tuple[int, int]],
    whole_seconds: float,
) -> dict[str, Any]:
    """Times the parts of a prompt's chunks.

    Args:
      config: the model's configuration.
      params: of the model.
      cache: pages whose contents do not matter.
      prefill: says which shape a chunk runs in.
      pieces: start and tokens of each chunk of the prompt.
      whole_seconds: that the whole prompt takes.

    Returns:
      for each part its milliseconds and TFLOP/s, and the milliseconds of the rest; of a prompt of one chunk also what
      cuDNN's attention takes, whose causal mask suits no other.
    """
    seconds, flops = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
    for start, tokens in pieces:
        length = prefill.shape_of([Piece(np.zeros(tokens, np.int32), start)])
        for part, spent in _chunk_seconds(config, params, cache, length, start, tokens).items():
            seconds[part] += spent
        for part, count in chunk_flops(config, start, tokens).items():
            flops[part] += count
    rows: dict[str, Any] = {}
    for part in PARTS:
        rows[f"{part}_ms"] = round(seconds[part] * 1e3, 3)
        rows[f"{part}_tflop_s"] = round(flops[part] / seconds[part] / 1e12, 1) if seconds[part] else None
    if len(pieces) == 1:
        rows["cudnn_attention_ms"] = round(_cudnn_seconds(config, params["embed"].dtype, pieces[0][1]) * 1e3, 3)
    rows["rest_ms"] = round((whole_seconds - sum(seconds.values())) * 1e3, 3)
    return rows


def chunk_flops(config: Config, start: int, tokens: int) -> dict[str, float]:
    """Floating-point operations of the useful products: pairs that a mask hides and padding do not count.

    Args:
      config: the model's configuration.
      start: positions before the chunk.
      tokens: of the chunk.
    """
    d_model, d, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    dense = config.mlp_layer_types.count(DENSE)
    sparse = config.num_hidden_layers - dense
    position = np.arange(start, start + tokens) + 1
    pairs = sum(
        int(np.minimum(position, config.window(layer) or position).sum()) for layer in range(config.num_hidden_layers)
    )
    attention_weights = (2 * heads + 2 * config.num_key_value_heads) * d * d_model * config.num_hidden_layers
    dense_weights = 3 * config.dense_intermediate_size * d_model * dense
    expert_weights = 3 * config.intermediate_size * d_model * config.num_experts_per_tok * sparse
    return {
        "attention": 4.0 * heads * d * pairs,
        "experts": 2.0 * tokens * expert_weights,
        "projections": 2.0 * tokens * (attention_weights + dense_weights),
    }


def _chunk_seconds(
    config: Config, params: Params, cache: KVCache, length: int, start: int, tokens: int
) -> dict[str, float]:
    packed = pack([Piece(np.zeros(tokens, np.int32), start)], tokens=length, rows=1)
    tables = _any_pages(config, cache)
    x, chunk = _begin(config, params["embed"], packed, tables)
    q, _, _ = _random_qkv(config, x.dtype, length)
    h = jax.random.normal(jax.random.key(0), x.shape, jnp.float32).astype(x.dtype)
    layers = [params["layers"][i] for i in range(config.num_hidden_layers)]
    sparse = [i for i in range(len(layers)) if config.mlp_layer_types[i] != DENSE]

    attend = [partial(_attend, config, like, q, cache[i], chunk) for i, like in enumerate(kinds(config))]
    experts = [partial(_experts, config, layers[i]["mlp"], h, chunk.valid) for i in sparse]
    mixed = q.reshape(x.shape[0], -1)
    projections = [partial(_project, layer["qkv"], layer["o"], h, mixed) for layer in layers]
    projections += [partial(_dense, layers[i]["mlp"], h) for i in range(len(layers)) if i not in sparse]
    return {"attention": _time(attend), "experts": _time(experts), "projections": _time(projections)}


def _any_pages(config: Config, cache: KVCache) -> PageTables:
    """Tables of one row that name every page once."""
    pages = {kind: cache[i].shape[0] for i, kind in enumerate(config.layer_types)}
    full, sliding = (np.arange(pages.get(kind, 1), dtype=np.int32)[None] for kind in (FULL, SLIDING))
    return PageTables(full, sliding)


def _random_qkv(config: Config, dtype: jnp.dtype, tokens: int) -> list[Array]:
    heads, kv_heads, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    drawn = jax.random.normal(jax.random.key(1), (tokens, heads + 2 * kv_heads, d), jnp.float32).astype(dtype)
    return [jnp.copy(part) for part in jnp.split(drawn, [heads, heads + kv_heads], axis=1)]


def _cudnn_seconds(config: Config, dtype: jnp.dtype, tokens: int) -> float:
    """Of the attention of all layers to a prompt of its own, as `attention` runs it: by cuDNN, on a GPU in 16 bits."""
    operands = [part[None] for part in _random_qkv(config, dtype, tokens)]
    windows = map(config.window, range(config.num_hidden_layers))
    return _time([partial(_attend_whole, *operands, window) for window in windows])


_attend_whole = jax.jit(attention, static_argnums=3)


@partial(jax.jit, static_argnums=(0, 1))
def _attend(config: Config, layer: int, q: Array, pages: Array, chunk: Chunk) -> Array:
    window, places = config.window(layer), chunk.places(config, layer)
    tiles = (places.tiles, places.works)
    return packed_attention(q, pages, places.table, tiles, chunk.offset, chunk.start, chunk.length, window)


@partial(jax.jit, static_argnums=0)
def _experts(config: Config, mlp: Params, h: Array, valid: Array) -> Array:
    return routed_experts(config, mlp, h, valid)


@jax.jit
def _project(qkv: Array, o: Array, h: Array, mixed: Array) -> tuple[Array, Array]:
    return linear(h, qkv), linear(mixed, o)


_dense = jax.jit(dense_mlp)
_begin = jax.jit(begin, static_argnums=0)


def _time(calls: Sequence[Callable[[], Any]]) -> float:
    """Seconds of all calls, queued one after another: the quickest of a few rounds after one to compile."""
    if not calls:
        return 0.0
    jax.block_until_ready([call() for call in calls])
    best = float("inf")
    for _ in range(_RUNS):
        begun = time.perf_counter()
        result = None
        for call in calls:
            result = call()
        jax.block_until_ready(result)
        best = min(best, time.perf_counter() - begun)
    return best

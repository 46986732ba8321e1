"""JAX's own pass over rows of a paged cache, layer by layer, in any precision: what is measured is held against it.

Each kind of layer is compiled once and called for all of its layers, with the weights converted inside, so that a model
of 61 GB runs in float32 on the GPU that holds it. The cache is left as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from north_jax.attention import paged_attention
from north_jax.config import DENSE, Config
from north_jax.kv_cache import KVCache, PageTables
from north_jax.layers import Array, Params, contract, dense_mlp, embed, head, linear, norm, project_qkv
from north_jax.model import first_of_its_kind
from north_jax.moe import expert_weights, run_experts, select_experts
from north_jax.native import kv_write


@dataclasses.dataclass(frozen=True, slots=True)
class LayerPass:
    """What one layer did with N rows of T tokens.

    Attributes:
      output: [N, T, D].
      keys, values: [N, T, K, d], those of the tokens themselves.
      router_logits: [N, T, E] float32; None in a dense layer.
      experts: [N, T, k] int32, ascending; None in a dense layer.
    """

    output: Array
    keys: Array
    values: Array
    router_logits: Array | None
    experts: Array | None


def layers(
    config: Config,
    params: Params,
    cache: KVCache,
    tables: PageTables,
    tokens: np.ndarray,
    start: np.ndarray,
    length: np.ndarray,
    dtype: Any,
    experts: np.ndarray | None = None,
) -> Iterator[LayerPass]:
    """Runs tokens through the model, one layer at each step of the iterator.

    Args:
      config: the model's configuration, or that of a longer one with the same first layers: what is compiled for it
        serves both.
      params: DESIGN.md, "Parameters"; as many layers run as it has.
      cache: pages; positions from `start` on are taken from the tokens instead.
      tables: page numbers of the N rows, for positions below start + length; rows share no page that holds these
        tokens.
      tokens: [N, T] int32.
      start: [N] int32, position of each row's first token.
      length: [N] int32, tokens of each row; the rest is padding.
      dtype: of weights, keys, values and activations.
      experts: [layers with experts, N, T, k] int32, ascending: those that run, whatever the router says; by default
        those that it selects.
    """
    x = _embed(params["embed"], tokens, dtype=dtype)
    given = iter(experts if experts is not None else ())
    for number in range(len(params["layers"])):
        like = first_of_its_kind(config, number)
        table = np.asarray(tables.of_layer(config, number))
        layer = params["layers"][number]
        chosen = None if config.mlp_layer_types[number] == DENSE else next(given, None)
        result = _layer(config, like, layer, cache[number], table, x, start, length, chosen, dtype=dtype)
        yield LayerPass(*result)
        x = result[0]


def logits(config: Config, params: Params, x: Array) -> Array:
    """x [N, D], the output of a layer → float32 logits [N, V], as x's type gives them."""
    return _head(config, {name: params[name] for name in ("embed", "final_norm")}, x)


@partial(jax.jit, static_argnums=0)
def _head(config: Config, ends: Params, x: Array) -> Array:
    return head(config, jax.tree.map(lambda a: a.astype(x.dtype), ends), x)


@partial(jax.jit, static_argnames="dtype")
def _embed(table: Array, tokens: Array, *, dtype: Any) -> Array:
    return embed({"embed": table}, tokens).astype(dtype)


@partial(jax.jit, static_argnums=(0, 1), static_argnames="dtype")
def _layer(
    config: Config,
    number: int,
    layer: Params,
    pages: Array,
    table: Array,
    x: Array,
    start: Array,
    length: Array,
    chosen: Array | None,
    *,
    dtype: Any,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    layer = jax.tree.map(lambda a: a.astype(dtype), layer)
    positions = start[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)
    h = norm(config, x, layer["norm"])
    q, k, v = project_qkv(config, number, h, layer["qkv"], positions)
    pages = kv_write(pages.astype(dtype), k, v, table, start, length)
    mixed = paged_attention(q, pages, table, start, length, config.window(number))
    attended = linear(mixed.reshape(*h.shape[:-1], -1), layer["o"])
    if config.mlp_layer_types[number] == DENSE:
        return x + attended + dense_mlp(layer["mlp"], h), k, v, None, None
    router_logits = contract("...d,ed->...e", h, layer["mlp"]["router"])
    if chosen is None:
        experts, weights = select_experts(config, router_logits)
    else:
        experts = chosen
        weights = expert_weights(config, jnp.take_along_axis(router_logits, experts, axis=-1))
    fed = run_experts(config, layer["mlp"], h, experts, weights)
    return x + attended + fed, k, v, router_logits, jnp.sort(experts, axis=-1)

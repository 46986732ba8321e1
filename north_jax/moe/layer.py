"""The mixture-of-experts layer: router, and equal ways to run the experts.

`dense` runs every expert on every token: the plain reading of the formula, and the quickest where experts are few and
small. `gathered` fetches the selected experts' weights for each token: decode with few rows. `tiled` sorts the
assignments by expert and walks tiles of one expert each: long sequences and many experts, at the cost of the useful
work plus at most one partial tile an expert. `warp` calls `warp_decode`, in bfloat16 and for 64 tokens at a time; it is
never chosen by itself. All take experts in eight bits: `warp` as they are, the others dequantised to the activations'
type.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..config import Config
from ..layers import Array, Params, contract, swiglu
from ..sharding import RULES, current_mesh, on_shards
from .operation import MAX_TOKENS
from .quantized import Experts, QuantizedExperts, dequantize
from .warp import NO_EXPERT, warp_decode

type Method = Literal["auto", "dense", "gathered", "tiled", "warp"]
TILE = 32  # rows of a tile of the tiled method


def route(config: Config, router: Array, h: Array) -> tuple[Array, Array, Array]:
    """Selects the experts of each token.

    Logits are float32; among equal logits the lowest index is taken first. Weights are the sigmoid of the selected
    logits (divided by their sum where `norm_topk_prob`), or the softmax over the selected logits.

    Args:
      config: gives top-k and the selection function.
      router: [E, D].
      h: [..., D], the normalised input.

    Returns:
      experts [..., k] int32, weights [..., k] float32, logits [..., E] float32.
    """

    def on_device(h: Array, router: Array) -> tuple[Array, Array, Array]:
        logits = route_logits(router, h)
        return *select_experts(config, logits), logits

    tokens = ("batch", ...)
    outs = [(tokens, (*h.shape[:-1], width)) for width in (config.num_experts_per_tok,) * 2 + router.shape[:1]]
    return on_shards(on_device, (h, router), (tokens, (None, "embed")), outs)


def route_logits(router: Array, h: Array) -> Array:
    """The router's logits, float32 [..., E], of h [..., D]."""
    return contract("...d,ed->...e", h, router)


def select_experts(config: Config, logits: Array) -> tuple[Array, Array]:
    """`route` for router logits [..., E] float32: experts [..., k] int32, weights [..., k] float32."""
    selected, experts = jax.lax.top_k(logits, config.num_experts_per_tok)
    return experts, expert_weights(config, selected)


def expert_weights(config: Config, selected: Array) -> Array:
    """The weights of a token's experts from their router logits, float32 [..., k] both."""
    if config.expert_selection_fn == "softmax":
        return jax.nn.softmax(selected, axis=-1)
    weights = jax.nn.sigmoid(selected)
    return weights / jnp.sum(weights, axis=-1, keepdims=True) if config.norm_topk_prob else weights


def moe(config: Config, mlp: Params, h: Array, method: Method = "auto") -> Array:
    """The MoE layer: h [..., D] → [..., D]; mlp holds router [E, D], gate_up [E, 2I, D], down [E, D, I]."""
    experts, weights, _ = route(config, mlp["router"], h)
    return run_experts(config, mlp, h, experts, weights, method)


def run_experts(
    config: Config, mlp: Params, h: Array, experts: Array, weights: Array, method: Method = "auto"
) -> Array:
    """Sum of the selected experts' outputs, times their weights, accumulated in float32.

    On a mesh (`sharding`) each device runs the experts that it has, by the method for its tokens.

    Args:
      config: the model's configuration.
      mlp: gate_up [E, 2I, D], gate rows first, and down [E, D, I]; arrays or `QuantizedExperts`.
      h: [..., D].
      experts: [..., k] int32.
      weights: [..., k] float32.
      method: how; "auto" chooses by the sizes.

    Returns:
      [..., D] in h's dtype.
    """
    run = _run_experts if current_mesh() is None else _run_part

    def on_device(h: Array, experts: Array, weights: Array, gate_up: Experts, down: Experts) -> Array:
        x, experts, weights = (rows.reshape(-1, rows.shape[-1]) for rows in (h, experts, weights))  # [T, …]
        chosen = _choose(config, x.shape[0]) if method == "auto" else method
        return run({"gate_up": gate_up, "down": down}, x, experts, weights, chosen).astype(h.dtype).reshape(h.shape)

    tokens, matrices = ("batch", ...), ("expert", ...)
    operands = (h, experts, weights, mlp["gate_up"], mlp["down"])
    in_axes = (tokens, tokens, tokens, matrices, matrices)
    return on_shards(on_device, operands, in_axes, [(tokens, h.shape)], alike=True)


def _run_experts(mlp: Params, h: Array, experts: Array, weights: Array, method: Method) -> Array:
    """h [T, D] → [T, D] in float32, or rounded to h's dtype."""
    runs = {"dense": _dense, "gathered": _gathered, "tiled": _tiled, "warp": _warp}
    return runs[method](mlp, h, experts, weights)


def _run_part(mlp: Params, h: Array, experts: Array, weights: Array, method: Method) -> Array:
    """The sum over devices of what each one's experts add: h [T, D] → float32 [T, D]."""
    count, axes = mlp["gate_up"].shape[0], RULES["expert"]
    first = jax.lax.axis_index(axes) * count
    own = (experts >= first) & (experts < first + count)  # [T, k]
    if method == "gathered":
        index = jnp.where(own, experts - first, 0)
        hidden = jnp.where(own[..., None], gathered_hidden(mlp, h, index, weights), 0)
        added = gathered_down(mlp, hidden, index)
    else:
        runs: dict[Method, Callable[..., Array]] = {
            "dense": _dense,
            "tiled": partial(_tiled, skip=True),
            "warp": partial(_warp, dtype=jnp.float32),
        }
        added = runs[method](mlp, h, jnp.where(own, experts - first, count), jnp.where(own, weights, 0))
    return jax.lax.psum(added, axes)


def _choose(config: Config, tokens: int) -> Method:
    """Few experts: dense. Fewer assignments than experts: gather them. Otherwise tiles."""
    if config.num_experts <= 4 * config.num_experts_per_tok:
        return "dense"
    return "gathered" if tokens * config.num_experts_per_tok < config.num_experts else "tiled"


def _warp(mlp: Params, h: Array, experts: Array, weights: Array, dtype: Any = jnp.bfloat16) -> Array:
    """h [T, D] → [T, D]; more tokens than `warp_decode` takes come in groups, the last one with some of no expert."""

    def run(group: tuple[Array, Array, Array]) -> Array:
        return warp_decode(*group, mlp["gate_up"], mlp["down"], dtype=dtype)

    tokens = h.shape[0]
    if tokens <= MAX_TOKENS:
        return run((h, experts, weights))
    missing = -tokens % MAX_TOKENS
    padded = (
        jnp.pad(operand, ((0, missing), (0, 0)), constant_values=filling).reshape(-1, MAX_TOKENS, operand.shape[1])
        for operand, filling in ((h, 0), (experts, NO_EXPERT), (weights, 0))
    )
    return jax.lax.map(run, tuple(padded)).reshape(-1, h.shape[1])[:tokens]


def _some(experts: Experts, index: Array, dtype: Any) -> Array:
    """Weights of some experts: index [...] → [..., rows, columns]."""
    weights = experts[index]
    return weights.astype(dtype) if isinstance(experts, QuantizedExperts) else weights


def _dense(mlp: Params, h: Array, experts: Array, weights: Array) -> Array:
    """h [T, D] → float32 [T, D]."""
    count = mlp["gate_up"].shape[0]
    gate_up, down = (
        dequantize(weights, h.dtype) if isinstance(weights, QuantizedExperts) else weights
        for weights in (mlp["gate_up"], mlp["down"])
    )
    dense_weights = jnp.sum(jax.nn.one_hot(experts, count) * weights[..., None], axis=1)  # [T, E]
    hidden = swiglu(contract("td,eid->tei", h, gate_up)) * dense_weights[..., None]  # [T, E, I]
    return contract("tei,edi->td", hidden.astype(h.dtype), down)


def _gathered(mlp: Params, h: Array, experts: Array, weights: Array) -> Array:
    """h [T, D] → float32 [T, D]; copies T·k experts' weights."""
    return gathered_down(mlp, gathered_hidden(mlp, h, experts, weights), experts)


def gathered_hidden(mlp: Params, h: Array, experts: Array, weights: Array) -> Array:
    """Hidden units of each token's experts, times the router's weights: h [T, D] → [T, k, I] in h's dtype."""
    hidden = swiglu(contract("td,tkid->tki", h, _some(mlp["gate_up"], experts, h.dtype))) * weights[..., None]
    return hidden.astype(h.dtype)


def gathered_down(mlp: Params, hidden: Array, experts: Array) -> Array:
    """The sum of what each token's experts make of their hidden units [T, k, I]: float32 [T, D]."""
    return contract("tki,tkdi->td", hidden, _some(mlp["down"], experts, hidden.dtype))


def _tiled(mlp: Params, h: Array, experts: Array, weights: Array, skip: bool = False) -> Array:
    """h [T, D] → float32 [T, D]; a scan over tiles of TILE assignments to one expert.

    `skip` passes over empty tiles, which are many where most assignments are to experts of other devices, whose id is
    the number of experts here.
    """
    tokens, k = experts.shape
    count = mlp["gate_up"].shape[0]
    flat = experts.reshape(-1)  # [T·k]
    order = jnp.argsort(flat, stable=True)
    group = jnp.bincount(flat, length=count)
    tiles = -(-group // TILE)  # a last tile of an expert may be partly empty
    first_tile = jnp.cumsum(tiles) - tiles
    first_row = jnp.cumsum(group) - group
    total = -(-tokens * k // TILE) + count  # static bound on the number of tiles

    tile = jnp.arange(total)
    full = tile < jnp.sum(tiles)
    expert = jnp.clip(jnp.searchsorted(first_tile, tile, side="right") - 1, 0, count - 1)
    within = (tile - first_tile[expert])[:, None] * TILE + jnp.arange(TILE)  # [tiles, TILE]
    used = within < group[expert][:, None]
    assignment = jnp.where(used, order[jnp.where(used, first_row[expert][:, None] + within, 0)], 0)
    token = assignment // k
    weight = jnp.where(used, weights.reshape(-1)[assignment], 0.0)

    def add(out: Array, tile: tuple[Array, ...]) -> Array:
        expert, token, weight, _ = tile
        hidden = swiglu(contract("td,id->ti", h[token], _some(mlp["gate_up"], expert, h.dtype))) * weight[:, None]
        added = contract("ti,di->td", hidden.astype(h.dtype), _some(mlp["down"], expert, h.dtype))
        # An unused entry computes token 0 with an expert that is not its own: select, 0 × infinity is NaN.
        return out.at[token].add(jnp.where(weight[:, None] > 0, added, 0))

    def step(out: Array, tile: tuple[Array, ...]) -> tuple[Array, None]:
        return (jax.lax.cond(tile[-1], add, lambda out, _: out, out, tile) if skip else add(out, tile)), None

    out, _ = jax.lax.scan(step, jnp.zeros_like(h, jnp.float32), (expert, token, weight, full))
    return out

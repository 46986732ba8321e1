"""Layers of experts to measure: random weights that take turns, so that no cache holds what comes next."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from north_jax.config import Config
from north_jax.layers import Array
from north_jax.moe import Experts, quantize

FORMATS = ("bfloat16", "fp8_channel", "fp8_block", "mxfp8")
_SWIGLU = 0.596  # rms of silu(g) · u for standard normal g and u
_OUTPUT = 0.1  # rms of a layer's output for standard normal inputs: values then lie below 1/2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    """The experts of one layer."""

    gate_up: Experts  # [E, 2I, D]
    down: Experts  # [E, D, I]


@dataclass(frozen=True)
class Inputs:
    """Tokens and their routing, one for each of several calls."""

    x: Array  # bfloat16 [T, D]
    experts: Array  # int32 [calls, T, k]
    weights: Array  # float32 [calls, T, k]


def random_layers(config: Config, format: str, count: int, seed: int = 0) -> list[Layer]:
    """Layers of the configuration's geometry, drawn on the device one after another."""
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 2 * count)
    D, I, E = config.hidden_size, config.intermediate_size, config.num_experts  # noqa: E741
    weight = (1 / 3) ** 0.5 * config.num_experts_per_tok**0.5  # rms of a token's router weights together
    down = _OUTPUT / (_SWIGLU * weight * I**0.5)
    return [
        Layer(
            _experts(keys[2 * i], D**-0.5, shape=(E, 2 * I, D), format=format, parts=2),
            _experts(keys[2 * i + 1], down, shape=(E, D, I), format=format, parts=1),
        )
        for i in range(count)
    ]


@partial(jax.jit, static_argnames=("shape", "format", "parts"))
def _experts(key: Array, deviation: float, *, shape: tuple[int, ...], format: str, parts: int) -> Experts:
    """One expert at a time: float32 of all would take three times the memory."""

    def one(key: Array) -> Any:
        drawn = (jax.random.normal(key, (1, *shape[1:]), jnp.float32) * deviation).astype(jnp.bfloat16)
        return drawn if format == "bfloat16" else quantize(drawn, format, parts=parts)  # type: ignore[arg-type]

    stacked = jax.lax.map(one, jax.random.split(key, shape[0]))
    return jax.tree.map(lambda leaf: leaf.reshape(shape[0], *leaf.shape[2:]), stacked)


def random_inputs(config: Config, tokens: int, calls: int, seed: int = 0) -> Inputs:
    """Standard normal tokens whose experts are drawn uniformly, anew for each call."""
    rng = np.random.default_rng([seed, tokens])
    k = config.num_experts_per_tok
    order = np.argsort(rng.random((calls, tokens, config.num_experts)), axis=-1)
    return Inputs(
        jnp.asarray(rng.standard_normal((tokens, config.hidden_size), np.float32), jnp.bfloat16),
        jnp.asarray(order[..., :k].astype(np.int32)),
        jnp.asarray(rng.random((calls, tokens, k), np.float32)),
    )


def distinct_experts(inputs: Inputs) -> float:
    """Mean number of different experts in a call."""
    return float(np.mean([len(np.unique(call)) for call in np.asarray(inputs.experts)]))


def bytes_of_expert(layer: Layer) -> float:
    """Bytes of one expert, scales included."""
    leaves = jax.tree.leaves((layer.gate_up, layer.down))
    return sum(leaf.nbytes for leaf in leaves) / leaves[0].shape[0]

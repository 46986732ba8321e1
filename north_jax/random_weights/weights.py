"""Random weights whose routing and text are those of a model in use, drawn on the device, layer by layer.

Plain random weights make a poor benchmark: greedy text falls into a short cycle, all rows drift to the same experts,
and rounding errors grow until two correct decoders have nothing in common. Here

* the first dense MLP outweighs the embedding, and the residual then changes little from layer to layer: the next token
  is a pseudo-random function of the last one, disturbed by the context. (Were the embedding itself compared with the
  tied head, a token would predict itself; with signs in the final norm alone, two tokens would predict each other.)
* rows with different tokens choose experts independently, each layer anew;
* one channel of the residual is the same for all tokens and never written again. The router's column for it holds each
  expert's bias, which makes experts as popular as `popularity.shares` says, in another order in every layer.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config import DENSE, Config
from ..layers import Array, Params
from ..model import model_tensors
from .popularity import biases

CONSTANT = 0  # the channel that is the same for all tokens
_CONSTANT_VALUE = 4.0  # in units of the embedding's deviation
_SWIGLU = 0.596  # rms of silu(g) · u for standard normal g and u
_ROUTER_WEIGHT = 0.87  # usual sigmoid weight of a chosen expert
_NORM_SPREAD = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Gains:
    """The rms of what each branch adds to the residual, in units of the embedding's deviation.

    Attributes:
      dense: a dense MLP.
      experts: a mixture of experts.
      attention: attention to a single key; with n keys about n^-½ of it.
      query: deviation of attention scores: 1 attends broadly, larger is sharper.
    """

    dense: float
    experts: float
    attention: float
    query: float = 1.0


MODERATE = Gains(dense=3.0, experts=0.05, attention=1.0)  # for many layers
STRONG = Gains(dense=1.0, experts=0.7, attention=2.5, query=1.5)  # for few: every branch shows


def random_params(
    config: Config, *, seed: int = 0, routing: str = "uniform", gains: Gains = MODERATE, dtype: Any = None
) -> Params:
    """Draws the weights of a whole model.

    Args:
      config: the model's configuration.
      seed: the same one gives the same weights on the same kind of device.
      routing: one of `popularity.ROUTINGS`.
      gains: of the branches.
      dtype: of the weights; by default the configuration's.

    Returns:
      DESIGN.md, "Parameters". Beside the weights at most one matrix's worth of float32 is held at a time.
    """
    kind = jnp.dtype(dtype or config.dtype)
    tensors = model_tensors(config)
    keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 8 * config.num_hidden_layers + 2))
    scale = _embedding_deviation(config)

    def matrix(shape: tuple[int, ...], deviation: float, clear: int | None = None) -> Array:
        """Normal values; those that write the constant channel are 0: index CONSTANT of axis `clear`."""
        drawn = _normal(next(keys), deviation, shape=shape, dtype=kind, clear=clear)
        return drawn.block_until_ready()  # else the scratch memory of many draws is alive together

    def norm(signs: bool) -> Array:
        return _norm(next(keys), shape=(config.hidden_size,), dtype=kind, signs=signs)

    embed = matrix(tensors["embed"][0], scale)
    layers = {}
    for number, layer in tensors["layers"].items():
        mlp_tensors = layer.pop("mlp")
        shapes = {name: shape for name, (shape, _) in (layer | mlp_tensors).items()}
        mlp = {
            "gate_up": matrix(shapes["gate_up"], config.hidden_size**-0.5),
            "down": matrix(shapes["down"], scale * _down_deviation(config, number, gains), clear=-2),
        }
        layers[number] = {
            "norm": norm(signs=False),
            "qkv": _qkv(config, matrix(shapes["qkv"], config.hidden_size**-0.5), gains.query),
            "o": matrix(shapes["o"], scale * gains.attention * shapes["o"][1] ** -0.5, clear=0),
            "mlp": mlp,
        }
        if "router" in shapes:
            mlp["router"] = matrix(shapes["router"], config.hidden_size**-0.5)
    params = {
        "embed": _with_channel(embed, _CONSTANT_VALUE * scale),
        "final_norm": norm(signs=True),
        "layers": layers,
    }
    return with_routing(config, params, routing, gains=gains, seed=seed)


def with_routing(config: Config, params: Params, routing: str, *, gains: Gains = MODERATE, seed: int = 0) -> Params:
    """The same weights under another routing: new routers, everything else is shared.

    Args:
      config: the model's configuration.
      params: of `random_params` with these gains.
      routing: one of `popularity.ROUTINGS`.
      gains: of the branches.
      seed: of the order of the experts in each layer.
    """
    bias = biases(config.num_experts, config.num_experts_per_tok, routing)
    layers = {}
    for number, layer in params["layers"].items():
        if "router" in layer["mlp"]:
            ranked = np.random.default_rng([seed, number]).permutation(bias)
            column = ranked * residual_rms(config, number, gains) / _CONSTANT_VALUE
            router = _with_channel(layer["mlp"]["router"], jnp.asarray(column, jnp.float32))
            layer = layer | {"mlp": layer["mlp"] | {"router": router}}
        layers[number] = layer
    return params | {"layers": layers}


def truncated(config: Config, params: Params, layers: int) -> tuple[Config, Params]:
    """The model of the first `layers` layers over the same arrays: its logits show that layer's output."""
    kinds = {name: getattr(config, name)[:layers] for name in ("layer_types", "mlp_layer_types")}
    short = dataclasses.replace(config, num_hidden_layers=layers, **kinds)
    return short, params | {"layers": {i: params["layers"][i] for i in range(layers)}}


def residual_rms(config: Config, layer: int, gains: Gains) -> float:
    """Expected rms of a layer's input in units of the embedding's deviation, in a context so long that attention
    averages its values away."""
    added = {DENSE: gains.dense**2}
    return math.sqrt(1 + sum(added.get(kind, gains.experts**2) for kind in config.mlp_layer_types[:layer]))


def _embedding_deviation(config: Config) -> float:
    """Logits then have deviation 2, as those of a trained model."""
    return 2.0 * config.hidden_size**-0.5


def _down_deviation(config: Config, layer: int, gains: Gains) -> float:
    if config.mlp_layer_types[layer] == DENSE:
        return gains.dense / (_SWIGLU * config.dense_intermediate_size**0.5)
    hidden = _SWIGLU * _ROUTER_WEIGHT * config.num_experts_per_tok**0.5
    return gains.experts / (hidden * config.intermediate_size**0.5)


@partial(jax.jit, static_argnames=("shape", "dtype", "clear"))
def _normal(key: Array, deviation: float, *, shape: tuple[int, ...], dtype: Any, clear: int | None) -> Array:
    drawn = jax.random.normal(key, shape, jnp.float32) * deviation
    if clear is not None:
        index = jax.lax.broadcasted_iota(jnp.int32, shape, clear % len(shape))
        drawn = jnp.where(index == CONSTANT, 0, drawn)
    return drawn.astype(dtype)


@partial(jax.jit, static_argnames=("shape", "dtype", "signs"))
def _norm(key: Array, *, shape: tuple[int, ...], dtype: Any, signs: bool) -> Array:
    """Weights of a norm: 1 ± 0.1; with `signs` half of them negative, and the constant channel kept from the logits."""
    spread, sign = jax.random.split(key)
    weight = 1 + _NORM_SPREAD * jax.random.normal(spread, shape, jnp.float32)
    if signs:
        weight = weight * jax.random.rademacher(sign, shape, jnp.float32)
    return weight.at[CONSTANT].set(0 if signs else 1).astype(dtype)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _qkv(config: Config, qkv: Array, query: float) -> Array:
    """Scales the rows of the queries."""
    rows = jnp.arange(qkv.shape[0])[:, None]
    return jnp.where(rows < config.num_attention_heads * config.head_dim, qkv * query, qkv).astype(qkv.dtype)


@jax.jit
def _with_channel(matrix: Array, column: Array | float) -> Array:
    """matrix [n, D] with `column` in the constant channel."""
    return matrix.at[:, CONSTANT].set(jnp.asarray(column, matrix.dtype))

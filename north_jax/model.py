"""The model as Flax NNX modules: definition, initialisation, sharding names, research use.

Modules hold parameters and call the pure functions of `layers`, `moe` and `attention`; the hot path takes the same
parameters as a plain dict (`split_params`) and never calls a module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .attention import attention
from .config import DENSE, Config
from .layers import Array, Params, dense_mlp, embed, head, linear, norm, project_qkv
from .moe import NO_EXPERT, Method, route, run_experts
from .sharding import constrain

type Tap = Callable[[str, Array], None]  # receives (name, value) of an intermediate tensor


def ignore(name: str, value: Array) -> None:
    """The Tap of those who do not want to see intermediate tensors."""


def layer_tensors(config: Config, layer: int) -> dict[str, Any]:
    """Shapes and logical axis names of one layer's parameters: name → ((sizes), (axes)), nested as the parameters."""
    d_model, d = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if config.mlp_layer_types[layer] == DENSE:
        width = config.dense_intermediate_size
        mlp: dict[str, Any] = {
            "gate_up": ((2 * width, d_model), ("mlp", "embed")),
            "down": ((d_model, width), ("embed", "mlp")),
        }
    else:
        experts, width = config.num_experts, config.intermediate_size
        mlp = {
            "router": ((experts, d_model), (None, "embed")),
            "gate_up": ((experts, 2 * width, d_model), ("expert", "expert_mlp", "embed")),
            "down": ((experts, d_model, width), ("expert", "embed", "expert_mlp")),
        }
    return {
        "norm": ((d_model,), ("norm",)),
        "qkv": (((heads + 2 * kv_heads) * d, d_model), ("heads", "embed")),
        "o": ((d_model, heads * d), ("embed", "heads")),
        "mlp": mlp,
    }


def model_tensors(config: Config) -> dict[str, Any]:
    """`layer_tensors` of every layer, and the embedding [V, D] and final norm [D]."""
    return {
        "embed": ((config.vocab_size, config.hidden_size), ("vocab", "embed")),
        "final_norm": ((config.hidden_size,), ("norm",)),
        "layers": {layer: layer_tensors(config, layer) for layer in range(config.num_hidden_layers)},
    }


def _is_tensor(node: Any) -> bool:
    return isinstance(node, tuple)


def param_shapes(config: Config, dtype: jnp.dtype | str | None = None) -> Params:
    """The parameters' tree with a `jax.ShapeDtypeStruct` at every leaf; `dtype` defaults to the configuration's."""
    kind = jnp.dtype(dtype or config.dtype)
    return jax.tree.map(lambda t: jax.ShapeDtypeStruct(t[0], kind), model_tensors(config), is_leaf=_is_tensor)


def param_axes(config: Config) -> Params:
    """The parameters' tree with a tuple of logical axis names (or None) at every leaf."""
    return jax.tree.map(lambda t: t[1], model_tensors(config), is_leaf=_is_tensor)


def init_params(config: Config, key: Array, dtype: jnp.dtype | str | None = None) -> Params:
    """Random parameters: matrices normal with deviation fan_in^-½, the embedding 1, norms one."""
    kind = jnp.dtype(dtype or config.dtype)
    leaves, tree = jax.tree.flatten_with_path(model_tensors(config), is_leaf=_is_tensor)
    arrays = []
    for (path, (shape, _)), leaf_key in zip(leaves, jax.random.split(key, len(leaves)), strict=True):
        if len(shape) == 1:
            arrays.append(jnp.ones(shape, kind))
            continue
        deviation = 1.0 if path[-1] == jax.tree_util.DictKey("embed") else shape[-1] ** -0.5
        arrays.append((jax.random.normal(leaf_key, shape, jnp.float32) * deviation).astype(kind))
    return jax.tree.unflatten(tree, arrays)


def attend(config: Config, layer: int, params: Params, h: Array, positions: Array, tap: Tap = ignore) -> Array:
    """Self-attention of one layer over a whole sequence: h [B, T, D] → [B, T, D]."""
    q, k, v = project_qkv(config, layer, h, params["qkv"], positions)
    for name, value in (("q", q), ("k", k), ("v", v)):
        tap(name, value)
    mixed = attention(q, k, v, config.window(layer))  # [B, T, H, d]
    return linear(mixed.reshape(*h.shape[:-1], -1), params["o"])


def feed_forward(
    config: Config,
    layer: int,
    params: Params,
    h: Array,
    method: Method = "auto",
    tap: Tap = ignore,
    live: Array | None = None,
) -> Array:
    """The MLP of one layer, dense or mixture of experts: h [..., D] → [..., D].

    Args:
      config: the model's configuration.
      layer: index of the layer.
      params: the layer's "mlp".
      h: [..., D], normalised.
      method: how the experts run; see `moe`.
      tap: is shown router_logits and experts.
      live: [...] bool, which of h count. The method "warp" reads no expert for the others, whose output is then 0.
    """
    if config.mlp_layer_types[layer] == DENSE:
        return dense_mlp(params, h)
    experts, weights, logits = route(config, params["router"], h)
    if live is not None and method == "warp":
        experts = jnp.where(live[..., None], experts, NO_EXPERT)
    tap("router_logits", logits)
    tap("experts", experts)
    return run_experts(config, params, h, experts, weights, method)


def block(
    config: Config,
    layer: int,
    params: Params,
    x: Array,
    positions: Array,
    method: Method = "auto",
    tap: Tap = ignore,
) -> Array:
    """One layer over a whole sequence: one norm feeds attention and MLP, whose results join the residual together.

    Args:
      config: the model's configuration.
      layer: index of the layer.
      params: the layer's parameters.
      x: [B, T, D].
      positions: [B, T] int32.
      method: how the experts run; see `moe`.
      tap: is shown h, q, k, v, attention, router_logits, experts, mlp and the output.

    Returns:
      [B, T, D].
    """
    h = norm(config, x, params["norm"])
    tap("h", h)
    attended = attend(config, layer, params, h, positions, tap)
    tap("attention", attended)
    fed = feed_forward(config, layer, params["mlp"], h, method, tap)
    tap("mlp", fed)
    x = constrain(x + attended + fed, "batch", ...)
    tap("output", x)
    return x


def first_of_its_kind(config: Config, layer: int) -> int:
    """The first layer that is computed as `layer` is: the compiled function of one serves the other."""

    def kind(number: int) -> tuple[object, ...]:
        return config.rope_layers[number], config.window(number), config.mlp_layer_types[number]

    return next(number for number in range(layer + 1) if kind(number) == kind(layer))


class _Leaf(nnx.Module):
    """A module whose parameters come from a table of `layer_tensors` form."""

    def _fill(self, tensors: dict[str, Any], values: Params) -> None:
        for name, (shape, axes) in tensors.items():
            value = values[name]
            if value.shape != shape:
                raise ValueError(f"parameter {name} has shape {value.shape}, the configuration wants {shape}")
            setattr(self, name, nnx.Param(value, out_sharding=axes, eager_sharding=False))

    def params(self) -> Params:
        """This module's parameters as a plain nested dict of arrays."""
        return split_params(self)


class MLP(_Leaf):
    """A dense MLP or a mixture of experts, as the configuration says of the layer."""

    def __init__(self, config: Config, layer: int, values: Params) -> None:
        self.config, self.layer = config, layer
        self._fill(layer_tensors(config, layer)["mlp"], values)

    def __call__(self, h: Array) -> Array:
        """h [..., D], normalised → [..., D]."""
        return feed_forward(self.config, self.layer, self.params(), h)


class Block(_Leaf):
    """One layer: norm, attention and MLP in parallel."""

    def __init__(self, config: Config, layer: int, values: Params) -> None:
        self.config, self.layer = config, layer
        tensors = layer_tensors(config, layer)
        del tensors["mlp"]
        self._fill(tensors, values)
        self.mlp = MLP(config, layer, values["mlp"])

    def __call__(self, x: Array, positions: Array | None = None) -> Array:
        """x [B, T, D] → [B, T, D]; positions [B, T] int32 default to 0 … T − 1."""
        return block(self.config, self.layer, self.params(), x, default_positions(x, positions))


class North(_Leaf):
    """A `cohere2_moe` language model.

    >>> model = North(config, rngs=nnx.Rngs(0))
    >>> logits = model(tokens)  # [B, T] int32 -> [B, T, V] float32
    """

    def __init__(self, config: Config, params: Params | None = None, *, rngs: nnx.Rngs | None = None) -> None:
        """Builds the modules around `params`, or around random ones drawn from `rngs`.

        Raises:
          ValueError: neither is given, or a parameter's shape does not fit the configuration.
        """
        if params is None:
            if rngs is None:
                raise ValueError("North needs params, or rngs to draw them from")
            params = init_params(config, rngs.params())
        self.config = config
        self._fill({name: t for name, t in model_tensors(config).items() if name != "layers"}, params)
        self.layers = nnx.List([Block(config, i, params["layers"][i]) for i in range(config.num_hidden_layers)])

    def __call__(self, tokens: Array) -> Array:
        """tokens [B, T] int32 → float32 logits [B, T, V]."""
        params = self.params()
        x = embed(params, tokens)
        for layer in self.layers:
            x = layer(x)
        return head(self.config, params, x)


def default_positions(x: Array, positions: Array | None = None) -> Array:
    """`positions`, or 0 … T − 1 for each row of x [B, T, ...]."""
    if positions is not None:
        return positions
    return jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])


def split_params(model: nnx.Module) -> Params:
    """The parameters of a module as the plain nested dict of arrays that the pure functions take."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))

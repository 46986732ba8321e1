"""The mathematics of a layer, as pure functions over arrays.

Weights keep the checkpoint's orientation [out, in] and are contracted over their last axis. Products accumulate in
float32; norms and rotations are computed in float32 whatever the weights' dtype. The formulas are those of
Transformers' `Cohere2Moe…` modules, against which tests/test_golden.py compares them.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from .config import Config
from .sharding import constrain, current_mesh, fused_rows, mesh_axes, on_shards

type Array = jax.Array
type Params = dict  # a nested dict of arrays; DESIGN.md, "Parameters"


def contract(subscripts: str, a: Array, b: Array) -> Array:
    """`einsum` with a float32 result: bf16 operands accumulate in float32, float32 operands are not rounded to TF32."""
    precision = jax.lax.Precision.HIGHEST if jnp.result_type(a, b) == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def linear(x: Array, weight: Array) -> Array:
    """x [..., in] times weight [out, in], transposed; the float32 sum is rounded to x's dtype."""
    return contract("...i,oi->...o", x, weight).astype(x.dtype)


def norm(config: Config, x: Array, weight: Array) -> Array:
    """RMSNorm, or LayerNorm without bias, over the last axis of x [..., D]; weight [D]."""
    y = x.astype(jnp.float32)
    if config.norm_type == "layer":
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + config.norm_eps)
    return (y * weight.astype(jnp.float32)).astype(x.dtype)


def rope_frequencies(config: Config) -> Array:
    """Rotary frequencies in radians a position: float32 [d/2], rope_theta^(-2i/d)."""
    return 1.0 / config.rope_theta ** (jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)


def rotate(config: Config, x: Array, positions: Array) -> Array:
    """Rotary position encoding on interleaved pairs (2i, 2i + 1) of every head.

    Args:
      config: gives rope_theta and head_dim.
      x: [..., T, heads, d], queries or keys.
      positions: [..., T] int32, absolute positions.
    """
    d = config.head_dim
    angle = positions[..., None, None].astype(jnp.float32) * rope_frequencies(config)  # [..., T, 1, d/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], d // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


def project_qkv(config: Config, layer: int, h: Array, weight: Array, positions: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values of one layer, rotated where the layer uses RoPE.

    Args:
      config: the model's configuration.
      layer: index of the layer, which decides whether it rotates.
      h: [..., T, D], the normalised input.
      weight: [(H + 2K)·d, D], rows of all query heads, then all key heads, then all value heads.
      positions: [..., T] int32.

    Returns:
      q [..., T, H, d], k [..., T, K, d], v [..., T, K, d].
    """
    heads, kv_heads, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    sizes = (heads * d, kv_heads * d, kv_heads * d)
    q, k, v = (rows.reshape(*h.shape[:-1], -1, d) for rows in fused_rows(linear, h, weight, "heads", sizes, unit=d))
    if config.rope_layers[layer]:
        q, k = rotate(config, q, positions), rotate(config, k, positions)
    return q, k, v


def swiglu(gate_up: Array) -> Array:
    """silu(gate) · up for gate_up [..., 2F], gate first; in float32, returned as float32 [..., F]."""
    return gated(*jnp.split(gate_up.astype(jnp.float32), 2, axis=-1))


def gated(gate: Array, up: Array) -> Array:
    """silu(gate) · up."""
    return jax.nn.silu(gate) * up


def dense_mlp(mlp: Params, h: Array) -> Array:
    """The MLP of a dense layer: h [..., D] → [..., D]; gate_up [2F, D], down [D, F]."""
    width = mlp["down"].shape[1]
    hidden = gated(*fused_rows(partial(contract, "...i,oi->...o"), h, mlp["gate_up"], "mlp", (width, width)))
    return linear(hidden.astype(h.dtype), mlp["down"])


def embed(params: Params, tokens: Array) -> Array:
    """Rows of the embedding [V, D] for tokens [...] int32; not scaled. Tokens outside the vocabulary give NaN."""
    table = params["embed"]
    mesh = current_mesh()
    if mesh is None:
        return table.at[tokens].get(mode="fill", wrap_negative_indices=False)
    size, axes = table.shape[0], mesh_axes(mesh, "vocab", table.shape[0])

    def own(table: Array, tokens: Array) -> Array:
        """The rows that this device has, 0 for the others: in the sum over devices a row is one device's."""
        index = tokens - (jax.lax.axis_index(axes) * table.shape[0] if axes else 0)
        rows = table.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return jax.lax.psum(rows, axes)

    in_axes = ("vocab", "embed"), ("batch", ...)
    rows = on_shards(own, (table, tokens), in_axes, [(("batch", ...), (*tokens.shape, table.shape[1]))])
    return jnp.where(((tokens >= 0) & (tokens < size))[..., None], rows, jnp.nan)


def head(config: Config, params: Params, x: Array) -> Array:
    """Final norm and tied head: x [..., D] → float32 logits [..., V], times logit_scale."""
    h = norm(config, x, params["final_norm"])
    return constrain(contract("...i,vi->...v", h, params["embed"]), "batch", ..., "vocab") * config.logit_scale

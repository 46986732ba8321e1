"""Products with a chunk's weights, and the rotation of queries and keys by factors that all layers share."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..config import Config
from ..layers import Array, linear, rope_frequencies


def project(x: Array, weight: Array) -> Array:
    """`layers.linear` of x [T, in] and weight [out, in], said so that XLA finds a library's product in it.

    cuBLAS adds in float32 too and rounds what it stores. Asked for a float32 result that is rounded afterwards, XLA
    would have cuBLAS write that, and a second kernel read it.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return linear(x, weight)
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)


def rotation(config: Config, position: Array) -> tuple[Array, Array]:
    """Rotary encoding of positions [T] as two factors [T, d]: of a value, and of the other value of its pair."""
    angle = position[:, None].astype(jnp.float32) * rope_frequencies(config)  # [T, d/2]
    sine = jnp.sin(angle)
    return jnp.repeat(jnp.cos(angle), 2, axis=1), jnp.stack([-sine, sine], axis=-1).reshape(-1, config.head_dim)


def rotated(x: Array, cosine: Array, sine: Array) -> Array:
    """`layers.rotate` of x [T, heads, d] by factors of `rotation`: in one pass, without halves to be interleaved."""
    values = x.astype(jnp.float32)
    swapped = jnp.flip(values.reshape(*x.shape[:-1], -1, 2), axis=-1).reshape(x.shape)
    return (values * cosine[:, None] + swapped * sine[:, None]).astype(x.dtype)

"""The products of warp decode in pure JAX, token by token: what the kernels are compared with and differentiated by."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..layers import Array, contract, swiglu
from .quantized import Experts


def gate_up_reference(x: Array, experts: Array, gate_up: Experts) -> Array:
    """`moe_gate_up` in pure JAX; it gathers one token's experts at a time."""

    def of_token(operands: tuple[Array, Array]) -> Array:
        row, chosen = operands  # [D], [k]
        weights, valid = _select(gate_up, chosen)
        hidden = swiglu(contract("d,kid->ki", _like(row, weights), weights))
        return jnp.where(valid[:, None], hidden, 0).astype(x.dtype)

    return jax.lax.map(of_token, (x, experts))


def down_reference(hidden: Array, experts: Array, weights: Array, down: Experts, *, dtype: Any) -> Array:
    """`moe_down` in pure JAX; it gathers one token's experts at a time."""

    def of_token(operands: tuple[Array, Array, Array]) -> Array:
        vectors, chosen, factors = operands  # [k, I], [k], [k]
        matrices, valid = _select(down, chosen)
        products = contract("ki,kdi->kd", _like(vectors, matrices), matrices)
        # An unused entry computes with an expert that is not its own: select, 0 × infinity is NaN.
        return jnp.sum(jnp.where(valid[:, None], factors[:, None] * products, 0), axis=0).astype(dtype)

    return jax.lax.map(of_token, (hidden, experts, weights))


def _select(experts: Experts, chosen: Array) -> tuple[Array, Array]:
    """The weights [k, rows, columns] of the chosen experts, and which of the ids [k] are one."""
    valid = (chosen >= 0) & (chosen < experts.shape[0])
    return experts[jnp.where(valid, chosen, 0)], valid


def _like(vector: Array, weights: Array) -> Array:
    """Activations for a product with these weights: bfloat16 with bfloat16, float32 with dequantised ones."""
    return vector.astype(weights.dtype)

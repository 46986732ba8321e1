"""The path that warp decode is compared with, organised by experts: tokens are packed into tiles of one expert each,
padded, multiplied as groups, scattered back and combined.

Its stages are those of the serving engines of today (vLLM's fused experts among them), and stay apart here: each can be
timed, and each leaves the buffer that it takes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

import ffi

from ..layers import Array, contract, swiglu
from .quantized import dequantize, quantize

TILE_TOKENS = 16  # rows of a tile: csrc/warp_decode/operands.h


class Packing(NamedTuple):
    """Where the pairs (token, slot) lie among the tiles."""

    place: Array  # [T, k] int32: row of each pair
    token: Array  # [rows] int32: the token of each row, T for padding
    tile_experts: Array  # [rows / 16] int32: -1 for the tiles that are not used, at the end


def expert_centric(
    x: Array, experts: Array, weights: Array, gate_up: Array, down: Array, *, quantize_activations: bool = False
) -> Array:
    """A mixture's experts, organised by experts.

    Args:
      x: bfloat16 [T, D].
      experts: int32 [T, k], each in [0, E).
      weights: float32 [T, k].
      gate_up: bfloat16 [E, 2I, D], gate rows first.
      down: bfloat16 [E, D, I].
      quantize_activations: round what goes into each product to MXFP8, as engines with MXFP8 products do.

    Returns:
      bfloat16 [T, D].
    """
    packing = pack(experts, gate_up.shape[0])
    rows = x.at[packing.token].get(mode="fill", fill_value=0)  # [rows, D]
    rows = mx_round(rows) if quantize_activations else rows
    hidden = swiglu(grouped_matmul(rows, packing.tile_experts, gate_up)).astype(x.dtype)  # [rows, I]
    hidden = mx_round(hidden) if quantize_activations else hidden
    outputs = grouped_matmul(hidden, packing.tile_experts, down)  # [rows, D]
    return jnp.sum(weights[..., None] * outputs[packing.place].astype(jnp.float32), axis=1).astype(x.dtype)


def pack(experts: Array, count: int) -> Packing:
    """Places every pair in a tile of its expert; by comparing all with all, which takes fewer kernels than a sort.

    Args:
      experts: [T, k] int32, each in [0, count).
      count: number of experts.
    """
    tokens, top_k = experts.shape
    pairs = tokens * top_k
    ids, number = experts.reshape(-1), jnp.arange(pairs, dtype=jnp.int32)
    rank = jnp.sum((ids[:, None] == ids) & (number < number[:, None]), axis=1)  # [pairs]: among its expert's pairs
    expert = jnp.arange(count, dtype=jnp.int32)
    tiles = -(-jnp.sum(ids == expert[:, None], axis=1) // TILE_TOKENS)  # [E]
    end = jnp.sum(jnp.where(expert <= expert[:, None], tiles, 0), axis=1)  # [E]: where the next expert's tiles begin
    place = ((end - tiles)[ids] * TILE_TOKENS + rank).astype(jnp.int32)
    most = min(pairs, min(pairs, count) + pairs // TILE_TOKENS)  # tiles
    tile = jnp.arange(most, dtype=jnp.int32)
    tile_experts = jnp.where(tile < end[-1], jnp.sum(end <= tile[:, None], axis=1), -1).astype(jnp.int32)
    token = jnp.full(most * TILE_TOKENS, tokens, jnp.int32).at[place].set(number // top_k)
    return Packing(place.reshape(tokens, top_k), token, tile_experts)


def mx_round(activations: Array) -> Array:
    """Activations [rows, columns] rounded to MXFP8 and back."""
    return dequantize(quantize(activations[None], "mxfp8"), activations.dtype)[0]


def grouped_matmul(x: Array, tile_experts: Array, weights: Array) -> Array:
    """Each tile of sixteen rows times the weights of its expert.

    Args:
      x: bfloat16 [16 · tiles, K].
      tile_experts: int32 [tiles]; -1 for tiles without one, which come last and whose result is undefined.
      weights: bfloat16 [E, N, K].

    Returns:
      bfloat16 [16 · tiles, N].
    """
    compiled = {name: _compiled for name in ("cpu", "cuda") if ffi.available(name)}
    if not compiled:
        return grouped_matmul_reference(x, tile_experts, weights)
    return jax.lax.platform_dependent(x, tile_experts, weights, default=grouped_matmul_reference, **compiled)


def grouped_matmul_reference(x: Array, tile_experts: Array, weights: Array) -> Array:
    """`grouped_matmul` in pure JAX, tile by tile."""

    def of_tile(operands: tuple[Array, Array]) -> Array:
        rows, expert = operands
        return contract("rk,nk->rn", rows, weights[jnp.maximum(expert, 0)]).astype(x.dtype)

    tiles = x.reshape(-1, TILE_TOKENS, x.shape[-1])
    return jax.lax.map(of_tile, (tiles, tile_experts)).reshape(x.shape[0], -1)


def _compiled(x: Array, tile_experts: Array, weights: Array) -> Array:
    result = jax.ShapeDtypeStruct((x.shape[0], weights.shape[1]), x.dtype)
    return jax.ffi.ffi_call("north_jax.grouped_matmul", result)(x, tile_experts, weights)

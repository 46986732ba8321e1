"""Rows from their tokens to their experts and back, on Hopper: each token's row written k times, and the weighted sum.

A warpgroup moves a row at a time, up to 16 bytes a thread and load: a token's row is read once for all its experts, and
the k rows of its result are all under way at once.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_THREADS = 128  # of a warpgroup
_VECTOR = 8  # 16-bit values that a thread loads at once, at most


def row_layout(width: int) -> Any:
    """How the threads of a warpgroup hold a row, whose width is a multiple of 128."""
    return plgpu.Layout.WG_STRIDED((width,), vec_size=math.gcd(_VECTOR, width // _THREADS))


def spread_rows(h: jax.Array, row: jax.Array, rows: int, *, interpret: Any = None) -> jax.Array:
    """Copies each token's row to the rows of its assignments.

    Args:
      h: [T, D], 16-bit, D a multiple of 128.
      row: [T · k] int32; `rows` or more for none.
      rows: R.
      interpret: `plgpu.InterpretGPUParams()` to run on a CPU.

    Returns:
      [R, D]; rows of no assignment hold anything.
    """
    tokens, width = h.shape
    kernel = plgpu.kernel(
        functools.partial(_spread, top=row.shape[0] // tokens),
        out_type=jax.ShapeDtypeStruct((rows, width), h.dtype),
        grid=(tokens,),
        grid_names=("token",),
        interpret=interpret,
    )
    return kernel(h, row)


def _spread(h: Any, row: Any, out: Any, *, top: int) -> None:
    token = lax.axis_index("token")
    values = plgpu.load(h.at[token], layout=row_layout(h.shape[1]))
    for j in range(top):
        write_row(out, row[token * top + j], values)


def write_row(out: Any, to: jax.Array, values: jax.Array) -> None:
    """Writes a row of `out`, unless it has none of this number."""

    @pl.when(to < out.shape[0])
    def write() -> None:
        out[to] = values


def sum_rows(
    y: jax.Array,
    row: jax.Array,
    weights: jax.Array,
    onto: tuple[jax.Array, jax.Array] | None = None,
    *,
    interpret: Any = None,
) -> jax.Array:
    """Sums the rows of each token's assignments, times their weights, in float32.

    Args:
      y: [R, D], 16-bit, D a multiple of 128.
      row: [T · k] int32; a token has k rows, or none: then R or more.
      weights: [T, k] float32.
      onto: [T, D] twice; the first is added to all, the second to tokens that have rows.
      interpret: `plgpu.InterpretGPUParams()` to run on a CPU.

    Returns:
      [T, D] in y's dtype; 0 without rows, but for what is added.
    """
    tokens, top = weights.shape
    kernel = plgpu.kernel(
        functools.partial(_sum, top=top),
        out_type=jax.ShapeDtypeStruct((tokens, y.shape[1]), y.dtype),
        grid=(tokens,),
        grid_names=("token",),
        interpret=interpret,
    )
    return kernel(y, row, weights.reshape(-1), *(onto or ()))


def _sum(y: Any, row: Any, weights: Any, *rest: Any, top: int) -> None:
    *onto, out = rest
    rows, width = y.shape
    layout = row_layout(width)
    token = lax.axis_index("token")
    at = [row[token * top + j] for j in range(top)]
    counts = at[0] < rows
    loaded = [plgpu.load(y.at[jnp.minimum(a, rows - 1)], layout=layout) for a in at]
    added = [plgpu.load(other.at[token], layout=layout).astype(jnp.float32) for other in onto]
    total = added[1] if onto else jnp.zeros((width,), jnp.float32)
    for j, values in enumerate(loaded):
        total = total + values.astype(jnp.float32) * lax.broadcast(weights[token * top + j], (width,))
    nothing = added[0] if onto else jnp.zeros((width,), jnp.float32)
    total = jnp.where(lax.broadcast(counts, (width,)), total + added[0] if onto else total, nothing)
    out[token] = total.astype(out.dtype)

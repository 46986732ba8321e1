"""Rows from their tokens to their experts and back, on Hopper: each token's row written k times, and the weighted sum.

A warpgroup moves a row at a time, 16 bytes a thread and load: a token's row is read once for all its experts, and the
k rows of its result are all under way at once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_THREADS = 128
_VECTOR = 8  # 16-bit values that a thread moves at once


def spread_rows(h: jax.Array, row: jax.Array, rows: int, *, tokens: int = 1, interpret: Any = None) -> jax.Array:
    """Copies each token's row to the rows of its assignments.

    Args:
      h: [T, D], 16-bit, D a multiple of 1024.
      row: [T · k] int32; `rows` or more for none.
      rows: R.
      tokens: of a block of the grid; divides T.
      interpret: `plgpu.InterpretGPUParams()` to run on a CPU.

    Returns:
      [R, D]; rows of no assignment hold anything.
    """
    count, width = h.shape
    top = row.shape[0] // count
    kernel = plgpu.kernel(
        functools.partial(_spread, top=top, tokens=tokens),
        out_type=jax.ShapeDtypeStruct((rows, width), h.dtype),
        grid=(count // tokens,),
        grid_names=("block",),
        interpret=interpret,
    )
    return kernel(h, row)


def _layout(width: int) -> Any:
    return plgpu.Layout.WG_STRIDED((width,), vec_size=_VECTOR)


def _spread(h: Any, row: Any, out: Any, *, top: int, tokens: int) -> None:
    width = h.shape[1]
    first = lax.axis_index("block") * tokens
    for i in range(tokens):
        values = plgpu.load(h.at[first + i], layout=_layout(width))
        for j in range(top):
            to = row[(first + i) * top + j]

            @pl.when(to < out.shape[0])
            def write(values: jax.Array = values, to: jax.Array = to) -> None:
                out[to] = values


def sum_rows(
    y: jax.Array, row: jax.Array, weights: jax.Array, *others: jax.Array, tokens: int = 1, interpret: Any = None
) -> jax.Array:
    """Sums the rows of each token's assignments, times their weights, and rows of other arrays, in float32.

    Args:
      y: [R, D], 16-bit, D a multiple of 1024.
      row: [T, k] int32; R or more for none.
      weights: [T, k] float32.
      others: [T, D] each.
      tokens: of a block of the grid; divides T.
      interpret: `plgpu.InterpretGPUParams()` to run on a CPU.

    Returns:
      [T, D] in y's dtype.
    """
    width = y.shape[1]
    count = weights.shape[0]
    kernel = plgpu.kernel(
        functools.partial(_sum, others=len(others), tokens=tokens, top=row.size // count),
        out_type=jax.ShapeDtypeStruct((count, width), y.dtype),
        grid=(count // tokens,),
        grid_names=("block",),
        interpret=interpret,
    )
    return kernel(y, row.reshape(-1), weights.reshape(-1), *others)


def _sum(y: Any, row: Any, weights: Any, *rest: Any, others: int, tokens: int, top: int) -> None:
    out = rest[others]
    width = y.shape[1]
    last = y.shape[0] - 1
    first = lax.axis_index("block") * tokens
    for i in range(tokens):
        token = first + i
        at = [row[token * top + j] for j in range(top)]
        # Row 0 is of an assignment if any is: finite.
        loaded = [plgpu.load(y.at[jnp.where(a <= last, a, 0)], layout=_layout(width)) for a in at]
        added = [plgpu.load(other.at[token], layout=_layout(width)) for other in rest[:others]]
        total = None
        for values, a, j in zip(loaded, at, range(top), strict=True):
            weight = jnp.where(a <= last, weights[token * top + j], 0.0)
            part = values.astype(jnp.float32) * lax.broadcast(weight, (width,))
            total = part if total is None else total + part
        for values in added:
            total = total + values.astype(jnp.float32)
        out[token] = total.astype(out.dtype)

"""How tiles of 16-bit values lie in shared memory, and the accumulators of their products."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

ROW_VALUES = 64  # 16-bit values of a 128-byte row, which the copy engine swizzles as a whole


def tiles(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for tiles [..., rows, columns] as TMA writes and wgmma reads them: 8 × 64 blocks, 128-byte swizzle.

    Rows are a multiple of 8, columns of ROW_VALUES.
    """
    blocks = plgpu.TilingTransform((8, ROW_VALUES))  # type: ignore[abstract]
    swizzle = plgpu.SwizzleTransform(128)  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(blocks, swizzle))


def accumulator(rows: int, columns: int) -> Any:
    """Float32 registers of a warpgroup for a product of so many rows and columns, zeroed."""
    return plgpu.ACC((rows, columns), jnp.float32)  # type: ignore[attr-defined]


def store(ref: Any, values: Any) -> None:
    """Stores a warpgroup's values to memory whatever their layout.

    From jax 0.12 on an assignment is refused where it is slow: a column of a row-major array, or banks in conflict.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values

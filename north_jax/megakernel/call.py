"""The decode call: one FFI call that runs a queued quantum over a donated batch."""

from __future__ import annotations

import math
from functools import partial

import jax
import numpy as np

from ..kv_cache import KVCache
from ..layers import Array

TARGET = "north_jax.decode"


@partial(jax.jit, static_argnames="engine", donate_argnames=("rows", "workspace", "counts", "cache"))
def decode_call(
    rows: Array,
    workspace: Array,
    counts: Array,
    full_table: Array,
    sliding_table: Array,
    biases: Array,
    masks: Array,
    cache: KVCache,
    *,
    engine: int,
) -> tuple[Array, Array, Array, KVCache]:
    """Runs the quantum that `engine` has queued first.

    Args:
      rows: [B, ROW_FIELDS] int32, see `abi.Row`; donated.
      workspace: [n] uint8, at least what the quantum's schedule needs; donated.
      counts: [histories, V] int32, see `adjust.count`, for the rows that name one; donated.
      full_table: [B, entries] int32.
      sliding_table: [B, entries] int32.
      biases: [B, MAX_BIASES, 2] int32: token, bits of the float32 bias.
      masks: [B, mask_words(V)] uint32, see `adjust.mask_words`.
      cache: one array of pages a layer, of the weights' type; donated.
      engine: `DecodeEngine.id`.

    Returns:
      rows, workspace, counts and cache as the quantum left them, each in the buffer of its operand.

    Raises:
      jax.errors.JaxRuntimeError, ValueError: there is no such engine, it has no quantum queued, an operand does not
        fit, or the quantum failed; the message says which. (JAX's quick path of repeated calls raises the latter.)
    """
    updated = (rows, workspace, counts, *cache)
    operand_of_result = [0, 1, 2, *range(7, 7 + len(cache))]
    call = jax.ffi.ffi_call(
        TARGET,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated],
        input_output_aliases={operand: result for result, operand in enumerate(operand_of_result)},
    )
    operands = (rows, workspace, counts, full_table, sliding_table, biases, masks, *cache)
    rows, workspace, counts, *pages = call(*operands, engine=np.int64(engine))
    return rows, workspace, counts, tuple(pages)


def read_workspace(workspace: Array, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of the workspace [n] uint8, copied to the host: `shape` of `dtype` from byte `offset` on."""
    part = _part(workspace, offset, size=math.prod(shape) * dtype.itemsize)
    return np.asarray(part).view(dtype).reshape(shape)


@partial(jax.jit, static_argnames="size")
def _part(workspace: Array, offset: int, *, size: int) -> Array:
    """Bytes of the workspace; compiled once for a size, not for every place."""
    return jax.lax.dynamic_slice(workspace, (offset,), (size,))

"""The decode call: one FFI call that runs a queued quantum over a donated batch."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ..kv_cache import KVCache
from ..layers import Array

TARGET = "north_jax.decode"


@partial(jax.jit, static_argnames="engine", donate_argnames=("rows", "workspace", "cache"))
def decode_call(
    rows: Array, workspace: Array, full_table: Array, sliding_table: Array, cache: KVCache, *, engine: int
) -> tuple[Array, Array, KVCache]:
    """Runs the quantum that `engine` has queued first.

    Args:
      rows: [B, ROW_FIELDS] int32, see `abi.Row`; donated.
      workspace: [n] uint8, at least what the quantum's schedule needs; donated.
      full_table: [B, entries] int32.
      sliding_table: [B, entries] int32.
      cache: one array of pages a layer, of the weights' type; donated.
      engine: `DecodeEngine.id`.

    Returns:
      rows, workspace and cache as the quantum left them, each in the buffer of its operand.

    Raises:
      jax.errors.JaxRuntimeError, ValueError: there is no such engine, it has no quantum queued, an operand does not
        fit, or the quantum failed; the message says which. (JAX's quick path of repeated calls raises the latter.)
    """
    updated = (rows, workspace, *cache)
    operand_of_result = [0, 1, *range(4, 4 + len(cache))]
    call = jax.ffi.ffi_call(
        TARGET,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated],
        input_output_aliases={operand: result for result, operand in enumerate(operand_of_result)},
    )
    rows, workspace, *pages = call(rows, workspace, full_table, sliding_table, *cache, engine=np.int64(engine))
    return rows, workspace, tuple(pages)


def float32_view(workspace: Array, offset: int, shape: tuple[int, ...]) -> Array:
    """A float32 array of the workspace [n] uint8, copied out: `shape` of it from byte `offset` on."""
    part = jax.lax.slice(workspace, (offset,), (offset + 4 * int(np.prod(shape)),))
    return jax.lax.bitcast_convert_type(part.reshape(*shape, 4), jnp.float32)

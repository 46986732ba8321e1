"""The decode call: one FFI call that runs a queued quantum over a donated batch."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
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


def float32_view(workspace: Array, offset: int, shape: tuple[int, ...]) -> Array:
    """A float32 array of the workspace [n] uint8, copied out: `shape` of it from byte `offset` on."""
    part = jax.lax.slice(workspace, (offset,), (offset + 4 * int(np.prod(shape)),))
    return jax.lax.bitcast_convert_type(part.reshape(*shape, 4), jnp.float32)

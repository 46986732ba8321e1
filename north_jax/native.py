"""Operations with a compiled form in csrc, each beside its pure-JAX reference of the same contract.

The compiled form runs where `ffi` has it for the platform that a computation is lowered for, the reference elsewhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import ffi

from .kv_cache import PAGE_SIZE

_KV_WRITE_DTYPES = (jnp.bfloat16, jnp.float32)  # of the compiled form; the reference takes any


def kv_write(
    pages: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, start: jax.Array, length: jax.Array
) -> jax.Array:
    """Writes a chunk's keys and values into pages; in place, without a copy, when the caller's jit donates `pages`.

    Token t < length[i] of row i has position p = start[i] + t and goes to slot p % 64 of page
    table[i, (p // 64) % P]. It is dropped if that page number is negative or no page; so are all tokens of a row whose
    start is negative.

    Args:
      pages: [num_pages, 2 (k, v), K, 64, d].
      k: [N, T, K, d], the dtype of pages.
      v: as k.
      table: [N, P] int32 page numbers, -1 for none. Tokens of one call that fall on the same slot leave it undefined,
        so length[i] is at most 64 P, and rows share no page that they write.
      start: [N] int32, positions before the chunk.
      length: [N] int32, tokens to write; 0 for an idle row. Positions stay below 2**31.

    Returns:
      the pages with the rows written.

    Raises:
      ValueError: an operand's shape or dtype does not fit; the message names it.
    """
    _check_kv_write(pages, k, v, table, start, length)
    compiled = {platform: _kv_write_compiled for platform in ("cpu", "cuda") if ffi.available(platform)}
    if not compiled or pages.dtype not in _KV_WRITE_DTYPES:
        return kv_write_reference(pages, k, v, table, start, length)
    return jax.lax.platform_dependent(pages, k, v, table, start, length, default=kv_write_reference, **compiled)


def kv_write_reference(
    pages: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, start: jax.Array, length: jax.Array
) -> jax.Array:
    """`kv_write` as one scatter in pure JAX."""
    token = jnp.arange(k.shape[1], dtype=jnp.int32)
    position = start[:, None] + token  # [N, T]
    page = jnp.take_along_axis(table, position // PAGE_SIZE % table.shape[1], axis=1)  # [N, T]
    written = (token < length[:, None]) & (start[:, None] >= 0) & (page >= 0)
    page = jnp.where(written, page, pages.shape[0])  # one past the end: "drop" drops it, a negative index would wrap
    kv = jnp.stack([k, v], axis=2)  # [N, T, 2, K, d]
    return pages.at[page, :, :, position % PAGE_SIZE].set(kv, mode="drop")


def _kv_write_compiled(
    pages: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, start: jax.Array, length: jax.Array
) -> jax.Array:
    call = jax.ffi.ffi_call(
        "north_jax.kv_write", jax.ShapeDtypeStruct(pages.shape, pages.dtype), input_output_aliases={0: 0}
    )
    return call(pages, k, v, table, start, length)


def _check_kv_write(
    pages: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, start: jax.Array, length: jax.Array
) -> None:
    if pages.ndim != 5 or pages.shape[1] != 2 or pages.shape[3] != PAGE_SIZE:
        raise ValueError(f"kv_write: pages is {list(pages.shape)}, expected [num_pages, 2, K, {PAGE_SIZE}, d]")
    if k.ndim != 4:
        raise ValueError(f"kv_write: k is {list(k.shape)}, expected [N, T, K, d]")
    if table.ndim != 2 or table.shape[1] == 0:
        raise ValueError(f"kv_write: table is {list(table.shape)}, expected [N, P] with P > 0")
    rows, tokens = k.shape[:2]
    chunk = (rows, tokens, pages.shape[2], pages.shape[4])
    int32 = jnp.dtype(jnp.int32)
    for name, operand, shape, dtype in (
        ("k", k, chunk, pages.dtype),
        ("v", v, chunk, pages.dtype),
        ("table", table, (rows, table.shape[1]), int32),
        ("start", start, (rows,), int32),
        ("length", length, (rows,), int32),
    ):
        if operand.shape != shape or operand.dtype != dtype:
            found, expected = f"{operand.dtype.name}{list(operand.shape)}", f"{dtype.name}{list(shape)}"
            raise ValueError(f"kv_write: {name} is {found}, expected {expected}")

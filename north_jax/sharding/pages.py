"""The paged KV cache on a mesh: heads divided over `tensor`, rows and their pages over `data`.

Page numbers are those of the whole pool, as on one device. The pool's first pages are the first part's, and so on, and
a row has its pages in its own part: `joined_tables` makes such tables of one `PagedRows` a part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..config import Config
from ..kv_cache import NO_PAGE, KVCache, PageTables, init_cache
from .fused import kv_head_copies
from .mesh import current_mesh
from .rules import Logical, partition

_PAGES: Logical = ("pages", None, "kv_heads", None, None)
_QUERIES: Logical = ("batch", None, "heads", None)
_KEYS: Logical = ("batch", None, "kv_heads", None)

type AttendPages = Callable[..., tuple[jax.Array, jax.Array]]
"""(pages, q, k, v, table, start, length) → (pages, [N, T, H, d])."""


def init_sharded_cache(
    config: Config, mesh: Mesh, *, full_pages: int, sliding_pages: int, dtype: jnp.dtype | str
) -> KVCache:
    """`init_cache` on a mesh; both numbers of pages are those of all parts of `data` together.

    Where `tensor` is a multiple of the key-value heads, pages hold copies of them, one head a device.

    Raises:
      ValueError: `data` does not divide the pages.
    """
    for name, pages in (("full", full_pages), ("sliding", sliding_pages)):
        if pages % mesh.shape["data"]:
            raise ValueError(f"sharding: {pages} {name} pages cannot be divided over data {mesh.shape['data']}")
    heads = config.num_key_value_heads * kv_head_copies(mesh, config.num_key_value_heads)
    make = partial(
        init_cache,
        dataclasses.replace(config, num_key_value_heads=heads),
        full_pages=full_pages,
        sliding_pages=sliding_pages,
        dtype=dtype,
    )
    return jax.jit(make, out_shardings=NamedSharding(mesh, PartitionSpec("data", None, "tensor")))()


def joined_tables(parts: Sequence[PageTables], *, full_pages: int, sliding_pages: int) -> PageTables:
    """Tables of all rows from those of each part of `data`, whose page numbers begin at 0.

    Args:
      parts: tables of equally many rows each, in the order of the parts.
      full_pages: pages of the full group in each part.
      sliding_pages: pages of the sliding group in each part.
    """

    def joined(tables: Sequence[jax.Array | np.ndarray], count: int) -> np.ndarray:
        moved = [np.where(table == NO_PAGE, NO_PAGE, table + i * count) for i, table in enumerate(tables)]
        return np.concatenate(moved).astype(np.int32)

    return PageTables(joined([p.full for p in parts], full_pages), joined([p.sliding for p in parts], sliding_pages))


def on_page_shards(
    attend: AttendPages,
    pages: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    start: jax.Array,
    length: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`attend(...)`, on each device for its rows and heads where there is a mesh.

    A row whose table names a page of another part gets NaN.

    Raises:
      ValueError: `data` does not divide the rows.
    """
    mesh = current_mesh()
    if mesh is None:
        return attend(pages, q, k, v, table, start, length)
    parts = mesh.shape["data"]
    if q.shape[0] % parts:
        raise ValueError(f"sharding: {q.shape[0]} rows cannot be divided over data {parts}")

    def on_device(pages: jax.Array, *rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v, table, start, length = rows
        count = pages.shape[0]
        own = table - jax.lax.axis_index("data") * count
        foreign = (table != NO_PAGE) & ((own < 0) | (own >= count))
        pages, mixed = attend(pages, q, k, v, jnp.where((table < 0) | foreign, NO_PAGE, own), start, length)
        return pages, jnp.where(jnp.any(foreign, axis=1)[:, None, None, None], jnp.nan, mixed)

    row: Logical = ("batch", ...)
    in_axes = (_PAGES, _QUERIES, _KEYS, _KEYS, row, row, row)
    operands = (pages, q, k, v, table, start, length)
    in_specs = tuple(partition(mesh, axes, operand.shape) for axes, operand in zip(in_axes, operands, strict=True))
    # Unchecked: an FFI call does not say over which axes its result varies. Nothing is summed over devices here.
    run = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=in_specs[:2], check_vma=False)
    return run(*operands)

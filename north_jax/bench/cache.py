"""KV caches of random keys and values: a decode starts in a long context without a prefill."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from north_jax.config import Config
from north_jax.kv_cache import KVCache, PagedRows, init_cache, pages_for, ring_entries
from north_jax.layers import Array

CHUNK = 256  # positions that page tables grow by at once, and most steps of a quantum


class RandomRows:
    """Page tables of rows, over pools that have room for all of them in the largest context."""

    def __init__(self, config: Config, *, rows: int, max_context: int) -> None:
        """Sizes the pools; no device memory yet."""
        self._config, self._rows, self._max_context = config, rows, max_context
        ring = ring_entries(config, max_context, CHUNK)
        self._pages = {"full_pages": rows * pages_for(max_context), "sliding_pages": rows * ring}

    def cache(self, dtype: Any, seed: int = 1) -> KVCache:
        """New pages of standard normal values."""
        return normal_pages(self._config, dtype=dtype, seed=seed, **self._pages)

    def tables(self, contexts: list[int]) -> PagedRows:
        """Tables of rows that hold these contexts; later rows hold nothing."""
        tables = PagedRows(self._config, rows=self._rows, max_context=self._max_context, max_chunk=CHUNK, **self._pages)
        for row, context in enumerate(contexts):
            for start in range(0, context, CHUNK):
                tables.grow(row, start, min(start + CHUNK, context))
        return tables


def normal_pages(
    config: Config, *, full_pages: int, sliding_pages: int, dtype: Any, layers: int | None = None, seed: int = 1
) -> KVCache:
    """`kv_cache.init_cache` with standard normal values instead of zeros, of all layers or the first `layers`."""
    sizes = {"full_pages": full_pages, "sliding_pages": sliding_pages, "dtype": jnp.dtype(dtype)}
    shapes = jax.eval_shape(partial(init_cache, config, **sizes))[:layers]
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(shapes))
    return tuple(_normal(key, s.shape, s.dtype).block_until_ready() for key, s in zip(keys, shapes, strict=True))


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)

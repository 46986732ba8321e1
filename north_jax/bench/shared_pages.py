"""Rows of any length over one pool of random keys and values: what they read they share, what they write is their own.

A context of 256K positions is then held once, and thousands of rows that are compared one after the other cost little.
Every row has the pages in an order of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from north_jax.config import FULL, Config
from north_jax.decoding import Decoder, DecodeRow
from north_jax.kv_cache import NO_PAGE, PAGE_SIZE, KVCache, PageTables, pages_for, ring_entries
from north_jax.sampling import SamplingParams

from .cache import CHUNK, normal_pages


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A row that appends one token.

    Attributes:
      context: positions that it holds already.
      number: which of the rows of this context; those of one number share the page that they write.
      token: its newest one.
    """

    context: int
    number: int
    token: int


class SharedPages:
    """Pools and tables for rows of given contexts."""

    def __init__(self, config: Config, *, contexts: Sequence[int], numbers: int) -> None:
        """Sizes the pools for `numbers` rows of each context."""
        self._config, self._contexts, self._numbers = config, list(contexts), numbers
        self.max_context = max(contexts) + 1
        self._shared = {
            "full": pages_for(self.max_context),
            "sliding": ring_entries(config, self.max_context, CHUNK),
        }

    def cache(self, layers: int, dtype: Any, seed: int = 1) -> KVCache:
        """New pages of standard normal values, for the first `layers` layers."""
        own = len(self._contexts) * self._numbers
        pages = {f"{group}_pages": count + own for group, count in self._shared.items()}
        return normal_pages(self._config, layers=layers, dtype=dtype, seed=seed, **pages)

    def tables(self, rows: Sequence[Row], slots: int) -> PageTables:
        """[slots, entries] of each group: `rows`, then rows without pages."""
        tables = PageTables(*(np.full((slots, count), NO_PAGE, np.int32) for count in self._shared.values()))
        for slot, row in enumerate(rows):
            first_seen = max(row.context - self._config.sliding_window + 1, 0) // PAGE_SIZE
            order = np.random.default_rng([row.context, row.number])
            for table, first, shared in zip(tables, (0, first_seen), self._shared.values(), strict=True):
                last = row.context // PAGE_SIZE
                logical = np.arange(max(first, last - shared + 1), last)  # a model may lack sliding layers
                table[slot, logical % shared] = order.permutation(shared)[: len(logical)]
                table[slot, last % shared] = self._own(row, shared)
        return tables

    def step(self, decoder: Decoder, cache: KVCache, rows: Sequence[Row]) -> tuple[KVCache, list[int]]:
        """One greedy step of `rows` by a compiled decoder: the cache, and the token of each row."""
        greedy = SamplingParams(temperature=0)
        fed = [DecodeRow(i, row.token, row.context, 1, frozenset(), greedy) for i, row in enumerate(rows)]
        drawn: list[int] = []
        tables = self.tables(rows, decoder.max_rows)
        cache = decoder.decode(cache, tables, fed, 1, lambda records: drawn.extend(r.token for r in records))
        return cache, drawn

    def written(self, cache: KVCache, rows: Sequence[Row], slots: int) -> np.ndarray:
        """float32 [layers, rows, 2 (k, v), K, d]: what the rows' tokens left in the cache."""
        pages = {}
        for group, shared in self._shared.items():
            own = [self._own(row, shared) for row in rows]
            pages[group] = np.array(own + [0] * (slots - len(rows)), np.int32)  # one shape for every number of rows
        position = np.array([row.context % PAGE_SIZE for row in rows] + [0] * (slots - len(rows)), np.int32)
        kinds = self._config.layer_types[: len(cache)]
        found = [
            _at(pool, pages["full" if kind == FULL else "sliding"], position)
            for kind, pool in zip(kinds, cache, strict=True)
        ]
        return np.stack([np.asarray(values, np.float32) for values in found])[:, : len(rows)]

    def _own(self, row: Row, shared: int) -> int:
        """The page that a row writes to: rows of another context never read it."""
        return shared + self._contexts.index(row.context) * self._numbers + row.number


@jax.jit
def _at(pool: jax.Array, page: np.ndarray, position: np.ndarray) -> jax.Array:
    return pool[page, :, :, position]

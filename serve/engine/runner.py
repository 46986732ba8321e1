"""The device side of the engine: jitted prefill and decode in a few shapes, over one donated KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from north_jax.config import Config
from north_jax.inference import decode_step, prefill
from north_jax.kv_cache import KVCache, PageTables, init_cache
from north_jax.layers import Array, Params
from north_jax.sampling import SamplingBatch, SamplingParams, sample

from .scheduler import DecodeWork, PrefillWork, Work

_GREEDY = SamplingParams(temperature=0)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefill_and_sample(
    config: Config,
    params: Params,
    cache: KVCache,
    tables: PageTables,
    tokens: Array,
    start: Array,
    length: Array,
    sampling: SamplingBatch,
) -> tuple[KVCache, Array]:
    cache, logits = prefill(config, params, cache, tables, tokens, start, length)
    return cache, sample(logits, sampling, start + length)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _decode_and_sample(
    config: Config,
    params: Params,
    cache: KVCache,
    tables: PageTables,
    tokens: Array,
    start: Array,
    active: Array,
    sampling: SamplingBatch,
) -> tuple[KVCache, Array]:
    cache, logits = decode_step(config, params, cache, tables, tokens, start, active)
    return cache, sample(logits, sampling, start + 1)


class Runner:
    """Runs the scheduler's work. One thread uses it."""

    def __init__(
        self,
        config: Config,
        params: Params,
        *,
        slots: int,
        chunk: int,
        prefill_rows: int,
        full_pages: int,
        sliding_pages: int,
    ) -> None:
        """Allocates the cache.

        Args:
          config: the model's configuration.
          params: DESIGN.md, "Parameters".
          slots: rows of a decode step.
          chunk: most tokens a prefill appends to a row.
          prefill_rows: most rows of a prefill.
          full_pages: pages of the full group.
          sliding_pages: pages of the sliding group.
        """
        self._config = config
        self._params = params
        self._slots = slots
        self._row_shapes = sorted({1, prefill_rows})
        self._length_shapes = sorted({min(64, chunk), chunk})
        self._new_cache = partial(
            init_cache, config, full_pages=full_pages, sliding_pages=sliding_pages, dtype=params["embed"].dtype
        )
        self._cache = self._new_cache()

    def reset(self) -> None:
        """Allocates the cache anew, after a failed call consumed it."""
        self._cache = ()
        self._cache = self._new_cache()

    def warm_up(self, tables: PageTables) -> None:
        """Compiles every shape on idle rows, which write nothing."""
        for rows in self._row_shapes:
            for length in self._length_shapes:
                self._prefill(tables, [()] * rows, [0] * rows, [0] * rows, [_GREEDY] * rows, length)
        self._decode(tables, np.zeros(self._slots, np.int32), np.zeros(self._slots, np.int32), [_GREEDY] * self._slots)

    def run(self, work: Work, tables: PageTables, sampling: Sequence[SamplingParams | None]) -> dict[int, int]:
        """Runs one device call.

        Args:
          work: from the scheduler.
          tables: its page tables, [slots, entries].
          sampling: one entry a slot, None where the slot is empty.

        Returns:
          slot → token drawn, for every row of the work.
        """
        if isinstance(work, PrefillWork):
            rows = work.rows
            longest = max(len(row.tokens) for row in rows)
            tokens = self._prefill(
                tables,
                [row.tokens for row in rows],
                [row.start for row in rows],
                [row.slot for row in rows],
                [sampling[row.slot] or _GREEDY for row in rows],
                _smallest(self._length_shapes, longest),
            )
            return {row.slot: int(token) for row, token in zip(rows, tokens, strict=False)}
        return self._run_decode(work, tables, sampling)

    def _run_decode(
        self, work: DecodeWork, tables: PageTables, sampling: Sequence[SamplingParams | None]
    ) -> dict[int, int]:
        tokens = np.zeros(self._slots, np.int32)
        start = np.zeros(self._slots, np.int32)
        active = np.zeros(self._slots, bool)
        for row in work.rows:
            tokens[row.slot], start[row.slot], active[row.slot] = row.token, row.start, True
        batch = [params if on and params else _GREEDY for params, on in zip(sampling, active, strict=True)]
        drawn = self._decode(tables, tokens, start, batch, active)
        return {row.slot: int(drawn[row.slot]) for row in work.rows}

    def _prefill(
        self,
        tables: PageTables,
        chunks: Sequence[tuple[int, ...]],
        starts: Sequence[int],
        slots: Sequence[int],
        sampling: Sequence[SamplingParams],
        length: int,
    ) -> np.ndarray:
        """Pads the rows to a compiled shape; padding rows have length 0."""
        rows = _smallest(self._row_shapes, len(chunks))
        padding = rows - len(chunks)
        tokens = np.zeros((rows, length), np.int32)
        for i, chunk in enumerate(chunks):
            tokens[i, : len(chunk)] = chunk
        slots = [*slots, *[0] * padding]
        self._cache, drawn = _prefill_and_sample(
            self._config,
            self._params,
            self._cache,
            PageTables(tables.full[slots], tables.sliding[slots]),
            tokens,
            np.array([*starts, *[0] * padding], np.int32),
            np.array([*map(len, chunks), *[0] * padding], np.int32),
            SamplingBatch.of([*sampling, *[_GREEDY] * padding]),
        )
        return np.asarray(drawn)

    def _decode(
        self,
        tables: PageTables,
        tokens: np.ndarray,
        start: np.ndarray,
        sampling: Sequence[SamplingParams],
        active: np.ndarray | None = None,
    ) -> np.ndarray:
        """One step over all slots; without `active` every slot is idle."""
        self._cache, drawn = _decode_and_sample(
            self._config,
            self._params,
            self._cache,
            PageTables(tables.full.copy(), tables.sliding.copy()),
            tokens,
            start,
            np.zeros(self._slots, bool) if active is None else active,
            SamplingBatch.of(sampling),
        )
        return np.asarray(drawn)


def _smallest(shapes: Sequence[int], size: int) -> int:
    """The smallest compiled shape that holds `size`."""
    return next(shape for shape in shapes if shape >= size)

"""The device side of the engine: prefill, decode and sampling, compiled in a few shapes, over one donated KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from north_jax.config import Config
from north_jax.inference import decode_step, prefill
from north_jax.kv_cache import KVCache, PageTables, init_cache
from north_jax.layers import Array, Params
from north_jax.sampling import SamplingBatch, SamplingParams, sample

from .memory import CachePlan
from .scheduler import DecodeWork, PrefillWork, Work

_GREEDY = SamplingParams(temperature=0)
_SHORT = 64  # tokens a row of the smaller prefill shape


class Runner:
    """Runs the scheduler's work. One thread uses it."""

    def __init__(self, config: Config, params: Params, plan: CachePlan) -> None:
        """Allocates the cache; `compile` must follow before the first `run`.

        Args:
          config: the model's configuration.
          params: DESIGN.md, "Parameters".
          plan: the sizes of the cache and of the calls.
        """
        self._config = config
        self._params = params
        self._slots = plan.slots
        self._row_shapes = sorted({1, plan.prefill_rows})
        self._length_shapes = sorted({min(_SHORT, plan.chunk), plan.chunk})
        self._new_cache = partial(
            init_cache,
            config,
            full_pages=plan.full_pages,
            sliding_pages=plan.sliding_pages,
            dtype=params["embed"].dtype,
        )
        self._cache = self._new_cache()
        self._compiled: dict[Any, jax.stages.Compiled] = {}

    def reset(self) -> None:
        """Allocates the cache anew, after a failed call consumed it."""
        self._cache = ()
        self._cache = self._new_cache()

    def compile(self, tables: PageTables) -> None:
        """Compiles every shape, several at a time; `tables` are those of all slots."""
        slots = np.zeros(self._slots, np.int32)
        model = (self._config, self._params, self._cache)
        decode = jax.jit(decode_step, static_argnums=0, donate_argnums=2)
        append = jax.jit(partial(_prefill, slots=self._slots), static_argnums=0, donate_argnums=2)
        lowered: dict[Any, jax.stages.Lowered] = {
            "decode": decode.lower(*model, tables, slots, slots, slots.astype(bool)),
        }
        for rows in self._row_shapes:
            of_rows = PageTables(tables.full[[0] * rows], tables.sliding[[0] * rows])
            for length in self._length_shapes:
                tokens, row = np.zeros((rows, length), np.int32), np.zeros(rows, np.int32)
                lowered[rows, length] = append.lower(*model, of_rows, tokens, row, row, row)
        logits = jax.ShapeDtypeStruct((self._slots, self._config.vocab_size), jnp.float32)
        lowered["sample"] = jax.jit(sample).lower(logits, SamplingBatch.of([_GREEDY] * self._slots), slots)
        with ThreadPoolExecutor() as pool:
            self._compiled = dict(zip(lowered, pool.map(lambda one: one.compile(), lowered.values()), strict=True))

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
            logits = self._prefill(work, tables)
            ends = {row.slot: row.start + len(row.tokens) for row in work.rows}
        else:
            logits = self._decode(work, tables)
            ends = {row.slot: row.start + 1 for row in work.rows}
        positions = np.zeros(self._slots, np.int32)
        positions[list(ends)] = list(ends.values())
        batch = [sampling[slot] or _GREEDY if slot in ends else _GREEDY for slot in range(self._slots)]
        drawn = np.asarray(self._compiled["sample"](logits, SamplingBatch.of(batch), positions))
        return {slot: int(drawn[slot]) for slot in ends}

    def _prefill(self, work: PrefillWork, tables: PageTables) -> Array:
        """Pads the rows to a compiled shape; padding rows have length 0. Gives logits [slots, V]."""
        rows = _smallest(self._row_shapes, len(work.rows))
        length = _smallest(self._length_shapes, max(len(row.tokens) for row in work.rows))
        tokens = np.zeros((rows, length), np.int32)
        slots, starts = np.full(rows, self._slots, np.int32), np.zeros(rows, np.int32)
        lengths = np.zeros(rows, np.int32)
        for i, row in enumerate(work.rows):
            tokens[i, : len(row.tokens)] = row.tokens
            slots[i], starts[i], lengths[i] = row.slot, row.start, len(row.tokens)
        owned = np.minimum(slots, self._slots - 1)
        of_rows = PageTables(tables.full[owned], tables.sliding[owned])
        return self._call((rows, length), of_rows, tokens, starts, lengths, slots)

    def _decode(self, work: DecodeWork, tables: PageTables) -> Array:
        """One step over all slots; gives logits [slots, V]."""
        tokens, starts = np.zeros(self._slots, np.int32), np.zeros(self._slots, np.int32)
        active = np.zeros(self._slots, bool)
        for row in work.rows:
            tokens[row.slot], starts[row.slot], active[row.slot] = row.token, row.start, True
        # The tables are the scheduler's own: the device must not see them change.
        copied = PageTables(tables.full.copy(), tables.sliding.copy())
        return self._call("decode", copied, tokens, starts, active)

    def _call(self, shape: Any, *arguments: Any) -> Array:
        """One call that takes the cache and gives it back."""
        self._cache, logits = self._compiled[shape](self._params, self._cache, *arguments)
        return logits


def _prefill(
    config: Config,
    params: Params,
    cache: KVCache,
    tables: PageTables,
    tokens: Array,
    start: Array,
    length: Array,
    slot: Array,
    *,
    slots: int,
) -> tuple[KVCache, Array]:
    """`prefill`, its logits put into the rows of their slots: [slots, V]; a row of padding has slot = slots."""
    cache, logits = prefill(config, params, cache, tables, tokens, start, length)
    return cache, jnp.zeros((slots, logits.shape[-1])).at[slot].set(logits, mode="drop")


def _smallest(shapes: Sequence[int], size: int) -> int:
    """The smallest compiled shape that holds `size`."""
    return next(shape for shape in shapes if shape >= size)

"""The decoder in plain JAX: one compiled step over all slots and a draw, called by the host once a step."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from ..config import Config
from ..inference import decode_step
from ..kv_cache import KVCache, PageTables
from ..layers import Params
from ..moe import Method
from .slot_sampler import Drawn, SlotSampler, check_draws, draw_of
from .types import DecodeRow, Deliver, Finish, TokenRecord, finish_of


class JaxDecoder:
    """See `types.Decoder`. Every row is computed at its slot's place, so its neighbours do not change its tokens."""

    def __init__(
        self, config: Config, params: Params, *, slots: int, method: Method = "auto", backend: str = "jax"
    ) -> None:
        """Takes the model.

        Args:
          config: the model's configuration.
          params: DESIGN.md, "Parameters".
          slots: rows of the page tables.
          method: how the experts run; see `moe`.
          backend: the name of what this is.
        """
        self.backend = backend
        self.max_rows = slots
        self.sizes: tuple[int, ...] = (slots,)
        self._method = method
        self._config = config
        self._params = params
        self._sampler = SlotSampler(slots, config.vocab_size)
        self._compiled: jax.stages.Compiled | None = None
        self._stopped = threading.Event()
        self._cancelled: set[int] = set()

    def compile(self, cache: KVCache, tables: PageTables) -> None:
        none = np.zeros(self.max_rows, np.int32)
        arguments = (self._config, self._params, cache, tables, none, none, none.astype(bool), self._method)
        self._compiled = _decode_step.lower(*arguments).compile()
        self._sampler.compile()

    def decode(
        self, cache: KVCache, tables: PageTables, rows: Sequence[DecodeRow], steps: int, deliver: Deliver
    ) -> KVCache:
        self._stopped.clear()
        self._cancelled.clear()
        slots = {row.slot for row in rows}
        if len(slots) < len(rows) or not slots <= set(range(self.max_rows)):
            raise ValueError(
                f"rows of slots {[row.slot for row in rows]}: expected different ones below {self.max_rows}"
            )
        check_draws({row.slot: draw_of(row) for row in rows}, self._config.vocab_size)
        live = list(rows)
        for _ in range(steps):
            if not live:
                break
            going = [row for row in live if row.slot not in self._cancelled]
            cache, drawn = self._step(cache, tables, going)
            records, live = _advance(live, drawn)
            deliver(records)
            if self._stopped.is_set():
                break
        return cache

    def stop(self) -> None:
        self._stopped.set()

    def cancel(self, slot: int) -> None:
        self._cancelled.add(slot)

    def _step(self, cache: KVCache, tables: PageTables, rows: Sequence[DecodeRow]) -> tuple[KVCache, dict[int, Drawn]]:
        """One step of these rows: the cache, and slot → what was drawn."""
        if not rows:
            return cache, {}
        assert self._compiled is not None, "compile comes before decode"
        # New arrays for every call: the device may still read those of the last one.
        tokens, starts = np.zeros(self.max_rows, np.int32), np.zeros(self.max_rows, np.int32)
        active = np.zeros(self.max_rows, bool)
        for row in rows:
            tokens[row.slot], starts[row.slot], active[row.slot] = row.token, row.position, True
        cache, logits = self._compiled(self._params, cache, tables, tokens, starts, active)
        return cache, self._sampler.draw(logits, {row.slot: draw_of(row) for row in rows})


def _advance(live: Sequence[DecodeRow], drawn: Mapping[int, Drawn]) -> tuple[list[TokenRecord], list[DecodeRow]]:
    """The records of a step, and the rows that go on; a row without a token was cancelled."""
    records, going = [], []
    for row in live:
        if row.slot not in drawn:
            records.append(TokenRecord(row.slot, -1, Finish.CANCELLED))
            continue
        token, logprobs = drawn[row.slot]
        finish = finish_of(token, row.remaining, row.stop_token_ids)
        records.append(TokenRecord(row.slot, token, finish, logprobs))
        if finish is Finish.NONE:
            going.append(dataclasses.replace(row, token=token, position=row.position + 1, remaining=row.remaining - 1))
    return records, going


# Of the module, so that decoders of one model compile it once.
_decode_step = jax.jit(decode_step, static_argnums=(0, 7), donate_argnums=2)

"""A batch to decode: rows of given lengths over pages of random keys and values, without a prefill."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from north_jax.config import Config
from north_jax.decoding import Decoder, DecodeRow, TokenRecord
from north_jax.kv_cache import KVCache, PagedRows, PageTables
from north_jax.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Start:
    """What a quantum starts from; `cache` makes arrays of their own, to be donated."""

    host_cache: tuple[np.ndarray, ...]
    tables: PageTables
    rows: tuple[DecodeRow, ...]
    slots: int
    max_context: int

    def cache(self) -> KVCache:
        """The pages, in new device arrays."""
        return tuple(jnp.array(pages) for pages in self.host_cache)

    def rows_with(self, **changes: object) -> list[DecodeRow]:
        """All rows, with some fields changed."""
        return [dataclasses.replace(row, **changes) for row in self.rows]


def start(
    config: Config,
    positions: Sequence[int | None],
    *,
    room: int,
    seed: int = 0,
    sampling: Sequence[SamplingParams] | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Start:
    """Slots with `positions` tokens each (None: idle) and pages for `room` more; pages that nobody owns hold NaN."""
    rng = np.random.default_rng(seed)
    context = max(position or 0 for position in positions) + room
    slots = len(positions)
    pages = {"full_pages": slots * (-(-context // 64)) + 1, "sliding_pages": slots * (-(-context // 64)) + 1}
    paged = PagedRows(config, rows=slots, max_context=context, max_chunk=max(CHUNK, room), **pages)
    rows = []
    for slot, position in enumerate(positions):
        if position is None:
            continue
        for first in range(0, position, CHUNK):
            paged.grow(slot, first, min(first + CHUNK, position))
        paged.grow(slot, position, position + room)
        token = int(rng.integers(4, config.vocab_size))
        drawn = sampling[len(rows)] if sampling else GREEDY
        rows.append(DecodeRow(slot, token, position, room, frozenset(), drawn))
    tables = paged.snapshot()
    cache = []
    for kind in config.layer_types:
        table, count = (
            (tables.full, pages["full_pages"]) if kind == "full_attention" else (tables.sliding, pages["sliding_pages"])
        )
        shape = (2, config.num_key_value_heads, 64, config.head_dim)
        values = np.full((count, *shape), np.nan, np.float32)
        owned = np.unique(table[table >= 0])
        values[owned] = rng.standard_normal((len(owned), *shape), np.float32)
        cache.append(values.astype(dtype))
    return Start(tuple(cache), tables, tuple(rows), slots, context)


class Quanta:
    """Quanta of one cache, and the records of each step."""

    def __init__(self, decoder: Decoder, batch: Start) -> None:
        self.decoder, self.tables, self.rows = decoder, batch.tables, list(batch.rows)
        self.cache = batch.cache()
        self.steps: list[list[TokenRecord]] = []

    def run(
        self,
        steps: int,
        rows: Sequence[DecodeRow] | None = None,
        after_step: Callable[[int], None] = lambda count: None,
    ) -> Quanta:
        """One quantum; `after_step` is called with the number of steps delivered so far."""
        thread = threading.current_thread()

        def deliver(records: list[TokenRecord]) -> None:
            assert threading.current_thread() is thread
            self.steps.append(records)
            after_step(len(self.steps))

        rows = self.rows if rows is None else rows
        self.cache = self.decoder.decode(self.cache, self.tables, rows, steps, deliver)
        return self

    def following(self, rows: Sequence[DecodeRow], steps: int) -> list[DecodeRow]:
        """The same rows as the next quantum begins with them, after `steps` steps that none of them ended in."""
        return [
            dataclasses.replace(
                row,
                token=self.of(row.slot)[-1].token,
                position=row.position + steps,
                remaining=row.remaining - steps,
            )
            for row in rows
        ]

    def of(self, slot: int) -> list[TokenRecord]:
        """All records of a slot."""
        return [record for records in self.steps for record in records if record.slot == slot]

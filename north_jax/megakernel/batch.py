"""A quantum's rows as the kernel takes them, and its token entries as a decoder's records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..decoding import DecodeRow, Finish, TokenRecord
from ..kv_cache import NO_PAGE, PageTables
from ..sampling import SamplingBatch
from .abi import ROW_FIELDS, STOP_TOKENS, Row

type Entry = tuple[int, int, int, int, int]  # quantum, step, slot, token, finish: csrc/megakernel/channel.h


def pack_rows(rows: Sequence[DecodeRow], batch: int) -> np.ndarray:
    """[batch, ROW_FIELDS] int32: the parameters of `rows`, then idle rows.

    Raises:
      ValueError: a row has more than STOP_TOKENS stop tokens.
    """
    packed = np.zeros((batch, ROW_FIELDS), np.int32)
    packed[:, Row.STOP : Row.STOP + STOP_TOKENS] = -1
    packed[:, Row.SLOT] = -1
    for values, row in zip(packed, rows, strict=False):
        if len(row.stop_token_ids) > STOP_TOKENS:
            raise ValueError(
                f"slot {row.slot} has {len(row.stop_token_ids)} stop tokens, the megakernel takes {STOP_TOKENS}"
            )
        values[Row.TOKEN], values[Row.POSITION], values[Row.REMAINING] = row.token, row.position, row.remaining
        values[Row.SLOT] = row.slot
        values[Row.STOP : Row.STOP + len(row.stop_token_ids)] = sorted(row.stop_token_ids)
    sampling = SamplingBatch.of([row.sampling for row in rows])
    live = packed[: len(rows)]
    live[:, Row.TEMPERATURE] = np.asarray(sampling.temperature).view(np.int32)
    live[:, Row.TOP_K] = sampling.top_k
    live[:, Row.TOP_P] = np.asarray(sampling.top_p).view(np.int32)
    live[:, Row.MIN_P] = np.asarray(sampling.min_p).view(np.int32)
    live[:, Row.SEED_HIGH : Row.SEED_LOW + 1] = np.asarray(sampling.seed).view(np.int32)
    return packed


def tables_of(rows: Sequence[DecodeRow], tables: PageTables, batch: int) -> PageTables:
    """The tables [batch, entries] of `rows`, then those of idle rows, without pages."""

    def chosen(table: np.ndarray) -> np.ndarray:
        result = np.full((batch, table.shape[1]), NO_PAGE, np.int32)
        result[: len(rows)] = table[[row.slot for row in rows]]
        return result

    return PageTables(chosen(np.asarray(tables.full)), chosen(np.asarray(tables.sliding)))


class Steps:
    """Puts the entries of one quantum, as they come, together to steps."""

    def __init__(self, quantum: int, slots: Iterable[int]) -> None:
        self._quantum = quantum
        self._live = list(slots)
        self._open: dict[int, TokenRecord] = {}  # records of the step that is not complete

    def add(self, entries: Iterable[Entry]) -> Iterator[list[TokenRecord]]:
        """The records of every step that `entries` complete, in the order of the slots."""
        for quantum, _, slot, token, finish in entries:
            if quantum != self._quantum:
                continue  # left by a quantum that failed
            self._open[slot] = TokenRecord(slot, token, Finish(finish))
            if len(self._open) == len(self._live):
                records = [self._open[slot] for slot in self._live]
                self._live = [record.slot for record in records if record.finish is Finish.NONE]
                self._open = {}
                yield records

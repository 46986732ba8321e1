"""A quantum's rows as the kernel takes them, and its token entries as a decoder's records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..adjust import mask_words
from ..decoding import DecodeRow, Finish, TokenRecord
from ..kv_cache import NO_PAGE, PageTables
from ..logprobs import Logprobs
from ..sampling import SamplingBatch
from .abi import MAX_BIASES, ROW_FIELDS, STOP_TOKENS, Row

# Quantum, step, slot, token, finish, log-probability and alternatives where they were asked for: channel.h.
type Entry = tuple[int, int, int, int, int, tuple[float, list[tuple[int, float]]] | None]


def pack_rows(rows: Sequence[DecodeRow], batch: int) -> np.ndarray:
    """[batch, ROW_FIELDS] int32: the parameters of `rows`, then idle rows. A row's HISTORY is that of its slot.

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
    for name in ("presence", "frequency", "repetition"):
        penalties = np.array([getattr(row.sampling, f"{name}_penalty") for row in rows], np.float32)
        live[:, Row[name.upper()]] = penalties.view(np.int32)
    live[:, Row.HISTORY] = [1 + row.slot if row.sampling.penalises else 0 for row in rows]
    live[:, Row.LOGPROBS] = [0 if row.sampling.logprobs is None else 1 + row.sampling.logprobs for row in rows]
    live[:, Row.BIAS_COUNT] = [len(row.sampling.logit_bias) for row in rows]
    live[:, Row.MASKED] = [row.grammar is not None for row in rows]
    return packed


def biases_of(rows: Sequence[DecodeRow], batch: int) -> np.ndarray | None:
    """[batch, MAX_BIASES, 2] int32, token and bits of its bias; None where no row has one."""
    if not any(row.sampling.logit_bias for row in rows):
        return None
    biases = np.zeros((batch, MAX_BIASES, 2), np.int32)
    for own, row in zip(biases, rows, strict=False):
        count = len(row.sampling.logit_bias)
        own[:count, 0] = [token for token, _ in row.sampling.logit_bias]
        own[:count, 1] = np.array([value for _, value in row.sampling.logit_bias], np.float32).view(np.int32)
    return biases


def masks_of(rows: Sequence[DecodeRow], batch: int, vocabulary: int) -> np.ndarray | None:
    """[batch, mask_words(V)] uint32, what the rows' grammars allow now; None where no row has one."""
    if all(row.grammar is None for row in rows):
        return None
    masks = np.zeros((batch, mask_words(vocabulary)), np.uint32)
    for own, row in zip(masks, rows, strict=False):
        if row.grammar is not None:
            own[:] = row.grammar.mask()
    return masks


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
        for quantum, _, slot, token, finish, reported in entries:
            if quantum != self._quantum:
                continue  # left by a quantum that failed
            logprobs = None if reported is None else Logprobs(reported[0], tuple(reported[1]))
            self._open[slot] = TokenRecord(slot, token, Finish(finish), logprobs)
            if len(self._open) == len(self._live):
                records = [self._open[slot] for slot in self._live]
                self._live = [record.slot for record in records if record.finish is Finish.NONE]
                self._open = {}
                yield records

"""Whether every element that a layer's buffer holds is written exactly once in a step."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..abi import PASSES, Buffer, Field, Opcode
from .accesses import NONE, Accesses
from .faults import Report
from .operands import Sizes
from .view import View, distinct

F = Field
_RULE = "coverage"
_WHOLE = (Buffer.PARTIAL, Buffer.PARTIAL_STATS, Buffer.EXPERT_HIDDEN, Buffer.EXPERT_OUT)  # by groups: their own rules


@dataclasses.dataclass(frozen=True)
class Values:
    """What one buffer holds of one layer, by number; LOCAL buffers of each SM by itself.

    Attributes:
      of: [accesses], which values each access is to.
      buffer, layer, sm: [values] of each.
    """

    of: np.ndarray
    buffer: np.ndarray
    layer: np.ndarray
    sm: np.ndarray

    @classmethod
    def among(cls, accesses: Accesses) -> Values:
        """All values that somebody writes or reads."""
        (buffer, sm, layer), of = distinct(np.stack([accesses.buffer, accesses.sm, accesses.layer]))
        return cls(of, buffer, layer, sm)

    def __len__(self) -> int:
        return len(self.buffer)

    def name(self, number: int) -> str:
        """Values in words."""
        where = "" if self.sm[number] == NONE else f" on SM {self.sm[number]}"
        return f"{Buffer(int(self.buffer[number])).name} of layer {self.layer[number]}{where}"


def check_coverage(view: View, sizes: Sizes, accesses: Accesses, values: Values, report: Report) -> None:
    """Reports what is written twice or never."""
    writes = np.flatnonzero(accesses.writes)
    written = np.zeros(len(values), bool)
    written[values.of[writes]] = True

    reads = np.flatnonzero((accesses.writes == 0) & ~written[values.of])
    for number, first in zip(*np.unique(values.of[reads], return_index=True), strict=True):
        task = int(accesses.task[reads[first]])
        report.add(_RULE, f"{report.describe(task)} reads {values.name(number)}, which nobody writes", task=task)

    writes = writes[~np.isin(accesses.buffer[writes], _WHOLE)]
    writes = writes[np.argsort(values.of[writes], kind="stable")]
    parts = np.stack([getattr(accesses, name)[writes] for name in ("row", "row_end", "column", "column_end")])
    extents = np.array([(0, 0), *(sizes.extent(buffer) for buffer in Buffer if buffer)])
    number, begin = np.unique(values.of[writes], return_index=True)
    ends = np.append(begin, len(writes))[1:]
    for value, first, end in zip(number.tolist(), begin.tolist(), ends.tolist(), strict=True):
        rows, columns = extents[values.buffer[value]]
        own = parts[:, first:end]
        if end - first == 1 and (own[:, 0] == (0, rows, 0, columns)).all():
            continue
        tasks = accesses.task[writes[first:end]]
        _check_exact(own, (int(rows), int(columns)), tasks, values.name(value), report)
    _check_histograms(view, sizes, report)
    _check_drawn(view, sizes, report)
    _check_products(view, sizes, report)


def _check_exact(parts: np.ndarray, extent: tuple[int, int], tasks: np.ndarray, name: str, report: Report) -> None:
    """Parts [4, n] cover rows × columns once."""
    row, row_end, column, column_end = parts
    rows = np.unique(np.concatenate([row, row_end, [0, extent[0]]]))
    columns = np.unique(np.concatenate([column, column_end, [0, extent[1]]]))
    count = np.zeros((len(rows), len(columns)), np.int64)
    top, bottom = np.searchsorted(rows, row), np.searchsorted(rows, row_end)
    left, right = np.searchsorted(columns, column), np.searchsorted(columns, column_end)
    for i, j, sign in ((top, left, 1), (bottom, left, -1), (top, right, -1), (bottom, right, 1)):
        np.add.at(count, (i, j), sign)
    count = count.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
    if (count == 1).all():
        return
    for wrong in (count > 1, count < 1):
        for i, j in np.argwhere(wrong)[:1].tolist():
            place = f"rows {rows[i]} to {rows[i + 1] - 1}, columns {columns[j]} to {columns[j + 1] - 1}"
            if count[i, j] > 1:
                found, text = (top <= i) & (i < bottom) & (left <= j) & (j < right), f"written {count[i, j]} times: by"
            else:
                found, text = (top <= i + 1) & (i <= bottom) & (left <= j + 1) & (j <= right), "never written; beside:"
            by = "; ".join(report.describe(int(task)) for task in tasks[found][:4])
            report.add(_RULE, f"{name}, {place}, is {text} {by or 'nobody'}")


def _check_histograms(view: View, sizes: Sizes, report: Report) -> None:
    """Every token of every row is counted once in each pass."""
    every = view.select(Opcode.SAMPLE_HISTOGRAM)
    for number in range(PASSES):
        tasks = every[view[F.SPLIT][every] == number]
        row, column = view[F.BATCH_BEGIN][tasks], view[F.ROW_BEGIN][tasks]
        parts = np.stack([row, row + view[F.BATCH_COUNT][tasks], column, column + view[F.ROW_COUNT][tasks]])
        _check_exact(parts, (sizes.batch, sizes.vocabulary), tasks, f"the histogram of pass {number}", report)


def _check_drawn(view: View, sizes: Sizes, report: Report) -> None:
    """Every row's token is drawn once."""
    tasks = view.select(Opcode.SAMPLE_DRAW)
    begin, end = view[F.BATCH_BEGIN][tasks], view[F.BATCH_BEGIN][tasks] + view[F.BATCH_COUNT][tasks]
    for row in range(sizes.batch):
        found = tasks[(begin <= row) & (row < end)]
        if len(found) != 1:
            by = "; ".join(report.describe(int(task)) for task in found[:3])
            report.add(_RULE, f"row {row}'s token is drawn {len(found)} times by SAMPLE_DRAW: {by or 'nobody'}")


def _check_products(view: View, sizes: Sizes, report: Report) -> None:
    """The parts of a split product cover the input's columns once, for every output row."""
    for opcode in (Opcode.O_PROJ, Opcode.FFN_DOWN):
        every, extent = view.select(opcode), (sizes.hidden, sizes.columns(opcode))
        keys = np.stack([view.layer[every], view[F.BATCH_BEGIN][every], view[F.BATCH_COUNT][every]])
        layers, which = distinct(keys)
        for i, layer in enumerate(layers[0].tolist()):
            tasks = every[which == i]
            row, column = view[F.ROW_BEGIN][tasks], view[F.K_BEGIN][tasks]
            parts = np.stack([row, row + view[F.ROW_COUNT][tasks], column, column + view[F.K_COUNT][tasks]])
            name = f"the product of {opcode.name} in layer {layer} (output rows by input columns)"
            _check_exact(parts, extent, tasks, name, report)

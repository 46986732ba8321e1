"""What every task reads and writes, when at the earliest it begins to, and what ends it.

Rows and columns are those of `Sizes.extent`. Items of a group are accesses of all tasks of the group: each may run any.
Where an expert's rows lie (EXPERT_HIDDEN, EXPERT_OUT) is the routing's choice, so such a buffer is taken as one piece.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ..abi import SAMPLE_BLOCK, Buffer, Field, Opcode
from ..layout import LOCAL
from .groups import ATTENTION, DOWN, UP, Group
from .operands import Sizes
from .view import View, ranges

F = Field
CHOICE, LOAD, STORE = 0, 1, 2  # the role that begins an access
NONE = -1


@dataclasses.dataclass(frozen=True)
class Accesses:
    """Columns of all accesses, [n] int64 each.

    Attributes:
      task: the task.
      buffer, layer, sm: of which layer the buffer holds values; the SM whose copy it is, NONE for the only one.
      row, row_end, column, column_end: the part of it.
      writes: 1, or 0 for a read.
      role: CHOICE, LOAD or STORE: the first role of the task that may make the access.
      counter: what is accessed was waited for at this counter besides; NONE without.
      group: the access is an item's of that group, and over when the item is; NONE: it is over with its task.
      head: KV head of such an item, NONE for all counters of the group.
    """

    task: np.ndarray
    buffer: np.ndarray
    layer: np.ndarray
    sm: np.ndarray
    row: np.ndarray
    row_end: np.ndarray
    column: np.ndarray
    column_end: np.ndarray
    writes: np.ndarray
    role: np.ndarray
    counter: np.ndarray
    group: np.ndarray
    head: np.ndarray

    def __len__(self) -> int:
        return len(self.task)


def find_accesses(view: View, sizes: Sizes, groups: list[Group]) -> Accesses:
    """All accesses to buffers of a well-formed schedule."""
    found = _Collector(view, sizes, groups)
    found.embeddings_and_norms()
    found.products()
    found.attention()
    found.combines()
    found.experts()
    found.side_tasks()
    return found.accesses()


def waits_by_rank(view: View, groups: list[Group], tasks: np.ndarray) -> np.ndarray:
    """Of tasks that go through the active experts: whether each expert's slice waits for that expert's hidden units."""
    first = np.full(view.schedule.config.num_hidden_layers, NONE)
    for group in groups:
        if group.kind == UP:
            first[group.layer] = group.first
    return (view[F.SLICE_NEED][tasks] > 0) & (view[F.SLICE_WAIT][tasks] == first[view.layer[tasks]])


class _Collector:
    def __init__(self, view: View, sizes: Sizes, groups: list[Group]) -> None:
        self._view, self._sizes, self._groups = view, sizes, groups
        self._parts: list[dict[str, np.ndarray]] = []
        self._extents = np.array([(0, 0), *(sizes.extent(buffer) for buffer in Buffer if buffer)])
        self._local = np.isin(list(Buffer), list(LOCAL))

    def accesses(self) -> Accesses:
        names = [field.name for field in dataclasses.fields(Accesses)]
        return Accesses(**{name: np.concatenate([part[name] for part in self._parts]) for name in names})

    def _add(
        self,
        field: Field,
        tasks: np.ndarray,
        *,
        back: np.ndarray | int = 0,
        rows: bool = True,
        columns: tuple[np.ndarray | int, np.ndarray | int] | None = None,
        writes: bool | None = None,
        role: int | None = None,
        counter: np.ndarray | int = NONE,
        group: np.ndarray | int = NONE,
        head: np.ndarray | int = NONE,
    ) -> None:
        """Accesses of tasks to the buffers that a field names; where it names none, there are none.

        Args:
          field: a buffer field; an output is written.
          tasks: numbers of the tasks.
          back: how many layers before the task's own.
          rows: whether BATCH_BEGIN and BATCH_COUNT say which rows; all of the buffer otherwise.
          columns: [first, end); all by default.
          writes: by default, as the field says.
          role: LOAD for inputs, STORE for outputs by default.
          counter, group, head: as in Accesses.
        """
        view, buffer = self._view, self._view[field][tasks]
        writes = field in (F.OUTPUT, F.OUTPUT_2) if writes is None else writes
        extent = self._extents[buffer]
        values: dict[str, np.ndarray | int] = {
            "task": tasks,
            "buffer": buffer,
            "layer": view.layer[tasks] - back,
            "sm": np.where(self._local[buffer], view.sm[tasks], NONE),
            "row": 0,
            "row_end": extent[:, 0],
            "column": 0,
            "column_end": extent[:, 1],
            "writes": int(writes),
            "role": (STORE if writes else LOAD) if role is None else role,
            "counter": counter,
            "group": group,
            "head": head,
        }
        if rows:
            values["row"] = view[F.BATCH_BEGIN][tasks]
            values["row_end"] = view[F.BATCH_BEGIN][tasks] + view[F.BATCH_COUNT][tasks]
        if columns is not None:
            values["column"], values["column_end"] = columns
        full = {name: np.broadcast_to(np.asarray(value, np.int64), tasks.shape) for name, value in values.items()}
        there = (buffer != Buffer.NONE) & (full["column"] < full["column_end"])
        self._parts.append({name: value[there] for name, value in full.items()})

    def _span(self, tasks: np.ndarray, unit: int = 1) -> tuple[np.ndarray, np.ndarray]:
        begin = self._view[F.ROW_BEGIN][tasks]
        return begin * unit, (begin + self._view[F.ROW_COUNT][tasks]) * unit

    def embeddings_and_norms(self) -> None:
        self._add(F.OUTPUT, self._view.select(Opcode.EMBED))
        tasks = self._view.select(Opcode.ADD_RMSNORM)
        back = (self._view[F.INPUT_2][tasks] != Buffer.NONE).astype(np.int64)
        self._add(F.INPUT, tasks, back=back)
        self._add(F.INPUT_2, tasks, back=1)
        self._add(F.INPUT_3, tasks, back=1)
        self._add(F.OUTPUT, tasks)
        self._add(F.OUTPUT_2, tasks)

    def products(self) -> None:
        view, sizes = self._view, self._sizes
        plain = view.select(Opcode.QKV_PROJ, Opcode.ROUTER_GEMM, Opcode.FFN_UPGATE_ACT, Opcode.LM_HEAD)
        self._add(F.INPUT, plain)
        self._add(F.OUTPUT, plain, columns=self._span(plain))
        heads = view.select(Opcode.LM_HEAD)
        dealer = view[F.DEALER][heads]
        self._add(F.OUTPUT_2, heads, columns=(dealer, dealer + 1))

        sliced = view.select(Opcode.O_PROJ, Opcode.FFN_DOWN)
        width, waits = view[F.K_SLICE][sliced], view[F.SLICE_NEED][sliced] > 0
        index, slices = ranges(view[F.K_BEGIN][sliced] // width, view[F.K_COUNT][sliced] // width)
        columns = slices * width[index], (slices + 1) * width[index]
        counter = np.where(waits[index], view[F.SLICE_WAIT][sliced][index] + slices, NONE)
        self._add(F.INPUT, sliced[index], columns=columns, counter=counter)
        begin, end = self._span(sliced)
        part = view[F.SPLIT][sliced] * sizes.hidden
        self._add(F.OUTPUT, sliced, columns=(begin + part, end + part))

        experts = view.select(Opcode.MOE_DOWN)
        self._add(F.INPUT, experts, rows=False)
        self._add(F.INPUT_2, experts, role=CHOICE)
        self._add(F.OUTPUT, experts, columns=self._span(experts))

    def _members(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """(group, task) of all tasks of the groups of a kind."""
        groups = [group for group in self._groups if group.kind == kind]
        tasks = [group.tasks for group in groups]
        numbers = np.repeat([group.number for group in groups], [len(group.tasks) for group in groups])
        return numbers, np.concatenate([np.zeros(0, np.int64), *tasks])

    def attention(self) -> None:
        """Each item: queries, key and value of a KV head; its sums."""
        view, sizes = self._view, self._sizes
        group, tasks = (np.tile(column, sizes.kv_heads) for column in self._members(ATTENTION))
        head = np.repeat(np.arange(sizes.kv_heads), len(tasks) // sizes.kv_heads)
        counter = np.where(view[F.SLICE_NEED][tasks] > 0, view[F.SLICE_WAIT][tasks] + head, NONE)
        first = head * sizes.group, sizes.heads + head, sizes.heads + sizes.kv_heads + head
        for begin, count in zip(first, (sizes.group, 1, 1), strict=True):
            columns = begin * sizes.head_dim, (begin + count) * sizes.head_dim
            self._add(F.INPUT, tasks, columns=columns, counter=counter, group=group, head=head)
        for field in (F.OUTPUT, F.OUTPUT_2):
            self._add(field, tasks, columns=(head, head + 1), counter=counter, group=group, head=head)

    def combines(self) -> None:
        """ATTN_COMBINE. A live row's splits of a head are complete after its queries: that is known besides."""
        view, sizes = self._view, self._sizes
        tasks = view.select(Opcode.ATTN_COMBINE)
        queries = np.full(view.schedule.config.num_hidden_layers, NONE)
        for group in self._groups:
            if group.kind == ATTENTION and view[F.SLICE_NEED][group.tasks[0]] > 0:
                queries[group.layer] = view[F.SLICE_WAIT][group.tasks[0]]
        begin, end = self._span(tasks)
        first, last = begin // sizes.group, (end - 1) // sizes.group
        counter = queries[view.layer[tasks]]
        counter = np.where(counter == NONE, NONE, counter + first)
        for field in (F.INPUT, F.INPUT_2):
            self._add(field, tasks, columns=(first, last + 1), counter=counter)
        self._add(F.OUTPUT, tasks, columns=self._span(tasks, sizes.head_dim), counter=counter)

    def experts(self) -> None:
        """Up projections, and down projections that are claimed."""
        view = self._view
        group, tasks = self._members(UP)
        self._add(F.INPUT, tasks, rows=False, group=group)
        self._add(F.INPUT_2, tasks, rows=False, role=CHOICE)
        self._add(F.OUTPUT, tasks, rows=False, group=group)
        # Where an item waits for its rank's hidden units: all ranks' counters prove the same, the first's will do.
        _, tasks = self._members(DOWN)
        counter = np.where(waits_by_rank(view, self._groups, tasks), view[F.SLICE_WAIT][tasks], NONE)
        self._add(F.INPUT, tasks, rows=False)
        self._add(F.INPUT_2, tasks, rows=False, role=CHOICE)
        self._add(F.OUTPUT, tasks, rows=False, counter=counter)

    def side_tasks(self) -> None:
        view = self._view
        tasks = view.select(Opcode.ROUTER_TOPK)
        self._add(F.INPUT, tasks)
        self._add(F.OUTPUT, tasks)
        tasks = view.select(Opcode.ROUTE_FINALIZE)
        self._add(F.INPUT, tasks)
        self._add(F.OUTPUT, tasks, rows=False)
        tasks = view.select(Opcode.MOE_GATHER)
        self._add(F.INPUT, tasks)
        self._add(F.INPUT_2, tasks, rows=False)
        self._add(F.OUTPUT, tasks, rows=False, columns=self._span(tasks))
        tasks = view.select(Opcode.MOE_COMBINE)
        self._add(F.INPUT, tasks, rows=False)
        self._add(F.INPUT_2, tasks)
        self._add(F.INPUT_3, tasks, rows=False)
        self._add(F.OUTPUT, tasks, columns=self._span(tasks))
        self.sampling()

    def sampling(self) -> None:
        """Each range in every pass, each block, each row."""
        view, ranges = self._view, self._sizes.ranges
        tasks = view.select(Opcode.SAMPLE_HISTOGRAM)
        number, dealer = view[F.SPLIT][tasks], view[F.DEALER][tasks]
        self._add(F.INPUT, tasks, columns=self._span(tasks))
        self._add(F.INPUT_2, tasks)
        self._add(F.OUTPUT, tasks, columns=((number - 1).clip(0) * ranges, number * ranges), writes=False)
        self._add(F.OUTPUT, tasks, columns=(number * ranges + dealer, number * ranges + dealer + 1))
        tasks = view.select(Opcode.SAMPLE_MASS)
        begin, end = self._span(tasks)
        self._add(F.INPUT, tasks, columns=(begin, end))
        self._add(F.INPUT_2, tasks)
        self._add(F.INPUT_3, tasks)
        self._add(F.OUTPUT, tasks, columns=(begin // SAMPLE_BLOCK, -(-end // SAMPLE_BLOCK)))
        tasks = view.select(Opcode.SAMPLE_DRAW)
        self._add(F.INPUT, tasks)
        self._add(F.INPUT_2, tasks)
        self._add(F.INPUT_3, tasks)

"""Whether everything is read after it was written, and overwritten after it was last read.

Values of a layer (see Values) replace, in their buffer, those of the layer before that shares their plane. So there are
two rules. A read begins after the ends of all writes of what it reads. A write begins after the ends of all accesses to
the values that it replaces, where they touch its own part. Because every element is written in every layer, the rules
for neighbours order all.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..abi import OPERATIONS, Buffer, Field, Opcode
from .accesses import CHOICE, LOAD, NONE, STORE, Accesses, waits_by_rank
from .clocks import Clocks
from .coverage import Values
from .faults import Report
from .form import slice_range
from .groups import Group
from .known import Known
from .view import distinct, ranges

F = Field
_BLOCK = 1024  # accesses that are compared at once


def check_races(clocks: Clocks, accesses: Accesses, values: Values, report: Report) -> None:
    """Reports reads that may come too early and writes that may."""
    check = _Races(clocks, accesses, values, report)
    check.reads()
    check.writes()


class _Races:
    def __init__(self, clocks: Clocks, accesses: Accesses, values: Values, report: Report) -> None:
        self._clocks, self._accesses, self._values, self._report = clocks, accesses, values, report
        self._view, self._groups = clocks.view, clocks.groups
        self._known = Known(clocks)
        self._by_item = accesses.group != NONE
        self._order = np.argsort(values.of, kind="stable")
        self._begin = np.searchsorted(values.of[self._order], np.arange(len(values) + 1))

    def reads(self) -> None:
        accesses, of = self._accesses, self._values.of
        items_write = np.zeros(len(self._values), bool)
        items_write[of[self._by_item & (accesses.writes == 1)]] = True
        reads = np.flatnonzero((accesses.writes == 0) & ~items_write[of])
        ends = self._ends((accesses.writes == 1) & ~self._by_item)
        items = self._by_item[reads] & (accesses.counter[reads] != NONE)  # each waits for its part alone
        late = np.concatenate([reads[items], self._late(reads[~items], ends, of[reads[~items]])])
        for alike, part in self._parts(late, of):
            self._after(alike, part[accesses.writes[part] == 1], "read too early", "may read", "has written it")
        self._reads_of_items(np.flatnonzero((accesses.writes == 0) & items_write[of]))

    def _reads_of_items(self, reads: np.ndarray) -> None:
        """Of what a group's items write: a reader has waited for their counters, or knows somebody who has."""
        accesses, first = self._accesses, self._view[F.WAIT]
        items = np.flatnonzero(self._by_item & (accesses.writes == 1))
        writer = np.full(len(self._values), NONE)
        writer[self._values.of[items]] = accesses.group[items]
        writer = writer[self._values.of[reads]]
        task = accesses.task[reads]
        waits = waits_by_rank(self._view, self._groups, task) & (accesses.buffer[reads] == Buffer.EXPERT_HIDDEN)
        # Most combine one row's splits of one head, and wait for just them.
        one = accesses.row[reads] * self._clocks.sizes.kv_heads + accesses.column[reads]
        one += np.array([group.first for group in self._groups])[writer]
        single = (accesses.row_end[reads] - accesses.row[reads] == 1) & (accesses.buffer[reads] != Buffer.EXPERT_HIDDEN)
        single &= accesses.column_end[reads] - accesses.column[reads] == 1
        waits |= single & (first[task] <= one) & (one < first[task] + self._view[F.WAIT_COUNT][task])
        for read, number in zip(reads[~waits].tolist(), writer[~waits].tolist(), strict=True):
            own, group = int(accesses.task[read]), self._groups[number]
            needed = self._counters(group, read)
            needed = needed[(needed < first[own]) | (needed >= first[own] + self._view[F.WAIT_COUNT][own])]
            if not len(needed) or self._known.holds(group, needed, self._start(np.array([read]))[0]):
                continue
            text = (
                f"{self._report.describe(own)} may read {self._values.name(int(self._values.of[read]))} before the "
                f"{group.name} has written it: it does not wait for counter {self._report.counter(int(needed[0]))}"
            )
            self._report.add("read too early", text, task=own, counter=int(needed[0]))

    def writes(self) -> None:
        accesses = self._accesses
        before = self._replaced()
        writes = np.flatnonzero((accesses.writes == 1) & (before[self._values.of] != NONE))
        of = before[self._values.of]
        ends = self._ends(~self._by_item)
        touched, _ = distinct(np.stack([self._values.of[self._by_item], accesses.group[self._by_item]]))
        for number, group in touched.T.tolist():
            ends[number] = np.maximum(ends[number], self._known.sufficient(self._groups[group]))
        for alike, part in self._parts(self._late(writes, ends, of[writes]), of):
            for kind, done in ((0, "has read it"), (1, "has written it")):
                others = part[accesses.writes[part] == kind]
                self._after(alike, others, "overwritten too early", "may overwrite", done)

    def _replaced(self) -> np.ndarray:
        """[values], the values that each replaces in its plane."""
        values, buffers = self._values, self._view.schedule.workspace.buffers
        planes = np.array([1, *(buffers[b].planes if b in buffers else 1 for b in Buffer if b)])[values.buffer]
        plane = values.layer % planes
        order = np.lexsort((values.layer, plane, values.sm, values.buffer))
        same = np.ones(max(len(values) - 1, 0), bool)
        for key in (plane, values.sm, values.buffer):
            same &= key[order][1:] == key[order][:-1]
        before = np.full(len(values), NONE)
        before[order[1:][same]] = order[:-1][same]
        return before

    def _ends(self, chosen: np.ndarray) -> np.ndarray:
        """[values, chains], when the chosen accesses to each are all over."""
        ends = np.zeros((len(self._values), self._view.chains), self._clocks.load.dtype)
        task = self._accesses.task[chosen]
        np.maximum.at(ends, (self._values.of[chosen], self._view.chain[task]), self._view.place[task])
        return ends

    def _start(self, chosen: np.ndarray) -> np.ndarray:
        """[len(chosen), chains], what is over when accesses begin."""
        accesses = self._accesses
        task, role, counter = accesses.task[chosen], accesses.role[chosen], accesses.counter[chosen]
        clocks = {CHOICE: self._clocks.choice, LOAD: self._clocks.load, STORE: self._clocks.store}
        if (role == role[0]).all():
            clock = clocks[int(role[0])][task]
        else:
            clock = np.stack([clocks[kind][number] for kind, number in zip(role.tolist(), task.tolist(), strict=True)])
        waited = counter != NONE
        if waited.any():
            clock[waited] = np.maximum(clock[waited], self._clocks.of_counter(counter[waited]))
        # The norm reads what it replaces before it writes it.
        own = np.flatnonzero((self._view.opcode[task] == Opcode.ADD_RMSNORM) & (accesses.writes[chosen] == 1))
        clock[own, self._view.chain[task[own]]] += 1
        return clock

    def _late(self, chosen: np.ndarray, ends: np.ndarray, of: np.ndarray) -> np.ndarray:
        """Those of the accesses that may begin before ends[of]."""
        late = np.zeros(len(chosen), bool)
        order = np.argsort(self._accesses.role[chosen], kind="stable")
        chosen, of = chosen[order], of[order]
        for i in range(0, len(chosen), _BLOCK):
            block = slice(i, i + _BLOCK)
            late[block] = (self._start(chosen[block]) < ends[of[block]]).any(axis=1)
        return chosen[late]

    def _parts(self, late: np.ndarray, of: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Accesses with one part of values of[access] in common, and the accesses to those that touch that part."""
        if not len(late):
            return
        accesses = self._accesses
        keys = np.stack([of[late], *(column[late] for column in _rectangle(accesses))])
        alike, which = distinct(keys)
        classes = np.split(late[np.argsort(which, kind="stable")], np.cumsum(np.bincount(which))[:-1])
        for own, (number, row, row_end, column, column_end) in zip(classes, alike.T.tolist(), strict=True):
            part = self._order[self._begin[number] : self._begin[number + 1]]
            touch = (accesses.row[part] < row_end) & (row < accesses.row_end[part])
            touch &= (accesses.column[part] < column_end) & (column < accesses.column_end[part])
            yield own, part[touch]

    def _after(self, late: np.ndarray, others: np.ndarray, rule: str, does: str, done: str) -> None:
        """Reports accesses that may begin before others, to the same part, are over."""
        accesses, view = self._accesses, self._view
        clocks = self._start(late)
        tasks = np.unique(accesses.task[others[~self._by_item[others]]])
        early = clocks[:, view.chain[tasks]] < view.place[tasks]
        for i in np.flatnonzero(early.any(axis=1)).tolist():
            self._explain(late[i], others, self._report.describe(int(tasks[early[i].argmax()])), rule, does, done)
        items = others[self._by_item[others]]
        _, which = distinct(np.stack([accesses.group[items], accesses.head[items]]))
        for item in items[np.unique(which, return_index=True)[1]].tolist():
            group = self._groups[accesses.group[item]]
            needed = self._counters(group, item)
            for i in range(len(late)):
                if not self._known.holds(group, needed, clocks[i]):
                    self._explain(late[i], others, f"an item of the {group.name}", rule, does, done)

    def _explain(self, access: int, others: np.ndarray, who: str, rule: str, does: str, done: str) -> None:
        task = int(self._accesses.task[access])
        what = self._values.name(int(self._values.of[others[0]]))
        text = f"{self._report.describe(task)} {does} {what} before {who} {done}; it waits for {self._waits(task)}"
        self._report.add(rule, text, task=task)

    def _waits(self, task: int) -> str:
        """The counters that a task waits for, in words."""
        one = np.array([task])
        slices = slice_range(self._view, self._clocks.sizes, one) if F.SLICE_WAIT in self._fields(task) else ()
        spans = [(self._view[F.WAIT][one], self._view[F.WAIT_COUNT][one]), slices]
        counters = np.concatenate([ranges(*span)[1] for span in spans if span]).tolist()
        return ", ".join(map(self._report.counter, counters)) or "no counter"

    def _fields(self, task: int) -> frozenset[Field]:
        return OPERATIONS[Opcode(int(self._view.opcode[task]))].fields

    def _counters(self, group: Group, access: int) -> np.ndarray:
        """The counters of the items that write, or are, what is accessed."""
        row, row_end, column, column_end = (int(side[access]) for side in _rectangle(self._accesses))
        head = int(self._accesses.head[access])
        heads = (column, column_end) if head == NONE else (head, head + 1)
        return self._known.counters(group, row, row_end, *heads)


def _rectangle(accesses: Accesses) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return accesses.row, accesses.row_end, accesses.column, accesses.column_end

"""What every task knows to be over when it begins: vector clocks.

A clock has an entry per chain (see View): so many of the chain's tasks have ended. What a task knows comes from the
tasks before it in its roles and from the counters that it waited for. A pipeline lets roles run ahead of each other, so
each keeps its own clock: the producer (routed tasks), the loader, the store, the side lane.

Dynamic work proves less. A task of a group may have no item and then waits for none of its slices; a counter that any
task of the group may have completed proves only what all of them knew (save for items that are in every step). That an
item is over is not in the clocks: it is known to those who know that a task is over that waited for the item's counter,
see `known`.

A task that is optional waits, reads and writes where a row asks for it, and arrives in any case. So what comes after it
knows that it has ended, and no more: nothing of what it may have waited for.

A step begins with a live row: a quantum runs only then, and END_STEP ends it otherwise. So there is a row whose items
of attention were run, after the queries that they waited for, and a token's experts are active in every MoE layer.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ..abi import OPERATIONS, Field, Opcode
from .form import slice_range
from .groups import ATTENTION, Group
from .operands import Sizes
from .view import LOADER, MATRIX, SIDE, View, ranges

F = Field


class Clocks:
    """The clocks of a schedule without deadlocks.

    Attributes:
      view, sizes, groups: of the schedule.
      choice: [n, chains], when a routed task reads the router's choice.
      load: [n, chains], when a task's first load may happen, or it begins where it is not a MATRIX task.
      store: [n, chains], when its first store may happen.
      counter: [counters, chains], what a complete counter proves.
    """

    def __init__(self, view: View, sizes: Sizes, groups: list[Group], levels: np.ndarray) -> None:
        self.view, self.sizes, self.groups = view, sizes, groups
        n, chains, counters = len(view), view.chains, len(view.schedule.counter_needs)
        kind = np.int16 if len(view) < 2**15 or view.place.max() < 2**15 else np.int32
        # Counters of a group share a row, behind those of the counters, save those of items that are in every step.
        self._row = np.arange(counters)
        self._group = np.full(n, -1)
        for group in groups:
            if group.counters:
                self._row[group.first : group.first + group.counters] = counters + group.number
                self._group[group.tasks] = group.number
            self._row[group.sure[1]] = group.sure[1]
        sure = np.concatenate([np.zeros((2, 0), np.int64), *(group.sure for group in groups)], axis=1)
        self._sure = sure[:, np.argsort(sure[0], kind="stable")]
        self._sure_begin = np.searchsorted(self._sure[0], np.arange(n + 1))
        self._known = np.zeros((counters + len(groups), chains), kind)
        self._known[counters:] = np.iinfo(kind).max
        self._counters = counters
        optional = [code for code, operation in OPERATIONS.items() if operation.optional]
        self._optional = np.isin(view.opcode, optional)
        self.choice, self.load, self.store = (np.zeros((n, chains), kind) for _ in range(3))
        self._roles = np.zeros((4, view.schedule.sms, chains), kind)  # producer, loader, store, side
        self._first, self._count = view[F.WAIT], np.where(view[F.WAIT_COUNT] > 0, view[F.WAIT_COUNT], 0)
        self._slices = self._sure_slices()
        self.combines = _Combines(view, sizes, groups)
        order = np.argsort(levels, kind="stable")
        for tasks in np.split(order, np.flatnonzero(np.diff(levels[order])) + 1):
            self._step(tasks)
        del self._roles

    def of_counter(self, counter: np.ndarray) -> np.ndarray:
        """[len(counter), chains], what complete counters prove."""
        return self._known[self._row[counter]]

    def learn(self, counter: int, other: int) -> None:
        """Adds to what a counter proves what another does."""
        row = self._known[self._row[counter]]
        np.maximum(row, self._known[self._row[other]], out=row)

    def _sure_slices(self) -> tuple[np.ndarray, np.ndarray]:
        """(first, count) of each task's slices that it waits for in every step."""
        first, count = np.zeros(len(self.view), np.int64), np.zeros(len(self.view), np.int64)
        tasks = self.view.select(Opcode.O_PROJ, Opcode.FFN_DOWN, Opcode.MOE_DOWN)
        first[tasks], count[tasks] = slice_range(self.view, self.sizes, tasks)
        experts = self.view.select(Opcode.MOE_DOWN)
        count[experts] = np.minimum(count[experts], self.sizes.top_k)  # ranks that a live row makes active
        return first, count

    def _step(self, tasks: np.ndarray) -> None:
        """Runs tasks of which none waits for another."""
        lane = self.view.lane[tasks]
        for wanted in (MATRIX, LOADER, SIDE):
            chosen = tasks[lane == wanted]
            if not len(chosen):
                continue
            if wanted == MATRIX:
                self._matrix(chosen)
            else:
                self._in_order(chosen, 1 if wanted == LOADER else 3)

    def _in_order(self, tasks: np.ndarray, role: int) -> None:
        sm = self.view.sm[tasks]
        clock = self._roles[role, sm]
        before = clock.copy()
        self._wait(tasks, clock, self._first, self._count)
        self.load[tasks] = self.store[tasks] = clock
        clock = np.where(self._optional[tasks, None], before, clock)
        self._end(tasks, clock)
        self._roles[role, sm] = clock

    def _matrix(self, tasks: np.ndarray) -> None:
        sm, routed = self.view.sm[tasks], self.view.routed[tasks]
        loader = self._roles[1, sm]
        if routed.any():
            some = tasks[routed]
            choice = self._roles[0, sm[routed]]
            self._wait(some, choice, self._first, self._count)
            self._roles[0, sm[routed]] = self.choice[some] = choice
            loader[routed] = np.maximum(loader[routed], choice)
        if not routed.all():
            rest = loader[~routed]
            self._wait(tasks[~routed], rest, self._first, self._count)
            loader[~routed] = rest
        self.load[tasks] = loader
        self._wait(tasks, loader, *self._slices)
        self._roles[1, sm] = loader
        store = np.maximum(loader, self._roles[2, sm])
        self.store[tasks] = store
        self._end(tasks, store)
        self._roles[2, sm] = store

    def _wait(self, tasks: np.ndarray, clock: np.ndarray, first: np.ndarray, count: np.ndarray) -> None:
        """Adds to each task's clock what its counters prove."""
        for i in range(int(count[tasks].max(initial=0))):
            more = count[tasks] > i
            counter = first[tasks[more]] + i
            self.combines.complete(self, counter)
            proves = self.of_counter(counter)
            if more.all():
                np.maximum(clock, proves, out=clock)
            else:
                clock[more] = np.maximum(clock[more], proves)

    def _end(self, tasks: np.ndarray, clock: np.ndarray) -> None:
        """Ends tasks: their arrivals pass on what they know."""
        group = self._group[tasks]
        if (group >= 0).any():  # items arrive before their task is over
            for number in np.unique(group[group >= 0]).tolist():
                row = self._known[self._counters + number]
                np.minimum(row, clock[group == number].min(axis=0), out=row)
            begin = self._sure_begin[tasks]
            which, sure = ranges(begin, self._sure_begin[tasks + 1] - begin)
            self._arrive(self._sure[1, sure], clock[which])
        clock[np.arange(len(tasks)), self.view.chain[tasks]] = self.view.place[tasks]
        arrives = (group < 0) & (self.view[F.ARRIVE_COUNT][tasks] > 0)
        self._arrive(self.view[F.ARRIVE][tasks[arrives]], clock if arrives.all() else clock[arrives])

    def _arrive(self, counter: np.ndarray, passed: np.ndarray) -> None:
        """Adds to what counters prove."""
        if not len(counter):
            return
        if (counter == counter[0]).all():
            row = self._known[counter[0]]
            np.maximum(row, passed.max(axis=0), out=row)
            return
        order = np.argsort(counter, kind="stable")
        distinct, begin = np.unique(counter[order], return_index=True)
        passed = np.maximum.reduceat(passed[order], begin, axis=0)
        self._known[distinct] = np.maximum(self._known[distinct], passed)


class _Combines:
    """What ATTN_COMBINE tasks prove together: of some live row, the items of a KV head were run.

    They waited for the counter of the head's queries. A counter that proves that all rows' splits of the head are
    complete so proves that one too.
    """

    def __init__(self, view: View, sizes: Sizes, groups: list[Group]) -> None:
        self._view = view
        # By counter that such tasks arrive at: the heads that they may prove.
        self._pending: dict[int, list[_Head]] = {}
        self._is_pending = np.zeros(len(view.schedule.counter_needs), bool)
        combines = view.select(Opcode.ATTN_COMBINE)
        for group in groups:
            if group.kind != ATTENTION or view[F.SLICE_NEED][group.tasks[0]] == 0:
                continue
            tasks = combines[view.layer[combines] == group.layer]
            first, end = view[F.WAIT][tasks], view[F.WAIT][tasks] + view[F.WAIT_COUNT][tasks]
            for number in range(sizes.kv_heads):
                splits = group.first + np.arange(sizes.batch) * sizes.kv_heads + number
                row, waiter = np.nonzero((first <= splits[:, None]) & (splits[:, None] < end))
                waiter = tasks[waiter]
                head = _Head(int(view[F.SLICE_WAIT][group.tasks[0]]) + number, sizes.batch, row, waiter)
                for counter in np.unique(view[F.ARRIVE][waiter[view[F.ARRIVE_COUNT][waiter] > 0]]).tolist():
                    self._pending.setdefault(counter, []).append(head)
                    self._is_pending[counter] = True

    def complete(self, clocks: Clocks, counters: np.ndarray) -> None:
        """Called when counters are complete, before anybody reads what they prove."""
        if not self._is_pending[counters].any():
            return
        for counter in np.unique(counters[self._is_pending[counters]]).tolist():
            self._is_pending[counter] = False
            clock = clocks.of_counter(np.array([counter]))[0]
            for head in self._pending.pop(counter):
                ended = clock[self._view.chain[head.waiters]] >= self._view.place[head.waiters]
                if len(np.unique(head.rows[ended])) == head.batch:
                    clocks.learn(counter, head.queries)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Head:
    queries: int  # counter of the head's queries
    batch: int
    rows: np.ndarray  # whose splits each waiter waited for
    waiters: np.ndarray

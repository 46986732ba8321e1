"""Whether a clock knows that items are over: that somebody who waited for their counters has ended."""

from __future__ import annotations

import numpy as np

from ..abi import Field, Opcode
from .accesses import waits_by_rank
from .clocks import Clocks
from .groups import DOWN, UP, Group
from .view import ranges

F = Field


class Known:
    """Who waits for the counters of each group."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks, self._view = clocks, clocks.view
        view, groups = clocks.view, clocks.groups
        waiting = view.reading(F.WAIT)
        index, counter = ranges(view[F.WAIT][waiting], view[F.WAIT_COUNT][waiting])
        owner = np.full(len(view.schedule.counter_needs), -1)
        for group in groups:
            owner[group.first : group.first + group.counters] = group.number
        of_items = owner[counter] >= 0
        waiter, counter = waiting[index[of_items]], counter[of_items]
        self._waits = {n: (waiter[owner[counter] == n], counter[owner[counter] == n]) for n in range(len(groups))}
        # Of up projections: tasks that each wait for every active rank, and claimers that do so together.
        experts = view.select(Opcode.MOE_DOWN)
        experts = experts[waits_by_rank(view, groups, experts)]
        none = np.zeros(0, np.int64)
        self._sufficient: dict[int, np.ndarray] = {}
        self._each = {g.number: experts[view.layer[experts] == g.layer] if g.kind == UP else none for g in groups}
        self._together = dict.fromkeys(range(len(groups)), none)
        for group in groups:
            if group.kind == DOWN and waits_by_rank(view, groups, group.tasks).all():
                for up in groups:
                    if up.kind == UP and up.layer == group.layer:
                        self._together[up.number] = group.tasks

    def counters(self, group: Group, row: int, row_end: int, head: int, head_end: int) -> np.ndarray:
        """The counters of a part of what a group's items write."""
        if group.kind == UP:
            return group.first + np.arange(group.counters)
        heads = self._clocks.sizes.kv_heads
        return (group.first + np.arange(row, row_end)[:, None] * heads + np.arange(head, head_end)).reshape(-1)

    def sufficient(self, group: Group) -> np.ndarray:
        """A clock that knows that all items of a group are over. Others may, too: `holds` tells."""
        if group.number not in self._sufficient:
            waiter, counter = self._waits[group.number]
            covered = len(np.unique(counter)) == group.counters > 0
            choices = (self._each[group.number], self._together[group.number], waiter if covered else group.tasks)
            self._sufficient[group.number] = self._view.ends(next(tasks for tasks in choices if len(tasks)))
        return self._sufficient[group.number]

    def holds(self, group: Group, counters: np.ndarray, clock: np.ndarray) -> bool:
        """Whether a clock knows that the items that arrive at the counters are over."""
        for tasks, enough in (
            (group.tasks, np.all),
            (self._each[group.number], np.any),
            (self._together[group.number], np.all),
        ):
            if len(tasks) and enough(self._ended(tasks, clock)):
                return True
        waiter, counter = self._waits[group.number]
        return bool(np.isin(counters, counter[self._ended(waiter, clock)]).all())

    def _ended(self, tasks: np.ndarray, clock: np.ndarray) -> np.ndarray:
        return clock[self._view.chain[tasks]] >= self._view.place[tasks]

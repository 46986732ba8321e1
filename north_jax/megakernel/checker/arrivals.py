"""Whether arrivals match waits: a wait names all arrivals of a step, neither more nor fewer."""

from __future__ import annotations

import numpy as np

from ..abi import Field
from .faults import Report
from .form import slice_range
from .groups import Group
from .operands import Sizes
from .view import View, ranges

F = Field


def static_arrivals(view: View, groups: list[Group]) -> np.ndarray:
    """Numbers of the tasks that arrive at ARRIVE themselves, after all that they do."""
    tasks = view.reading(F.ARRIVE)
    by_items = np.zeros(len(view), bool)
    for group in groups:
        by_items[group.tasks] = group.counters > 0
    return tasks[~by_items[tasks] & (view[F.ARRIVE_COUNT][tasks] > 0)]


def check_arrivals(view: View, sizes: Sizes, groups: list[Group], report: Report) -> None:
    """Reports counters whose arrivals are not what the schedule states, and waits for another number."""
    needs = view.schedule.counter_needs.astype(np.int64)
    tasks = static_arrivals(view, groups)
    totals = np.zeros(len(needs), np.int64)
    np.add.at(totals, view[F.ARRIVE][tasks], view[F.ARRIVE_COUNT][tasks])
    for group in groups:
        totals[group.first : group.first + group.counters] += group.each

    def signals(counter: int) -> str:
        found = [report.describe(int(task)) for task in tasks[view[F.ARRIVE][tasks] == counter]]
        found += [f"the {g.name}" for g in groups if g.first <= counter < g.first + g.counters]
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return f"signalled by {'; '.join(found[:3])}{more}" if found else "signalled by nobody"

    def wrong_total(counter: int) -> str:
        return f"{totals[counter]} arrivals in a step, the schedule states {needs[counter]}; {signals(counter)}"

    report.counters("arrivals", np.flatnonzero(totals != needs), wrong_total)
    waiting = view.reading(F.WAIT)
    slicing = view.reading(F.SLICE_WAIT)
    for tasks_, (first, count), need in (
        (waiting, (view[F.WAIT][waiting], view[F.WAIT_COUNT][waiting]), F.WAIT_NEED),
        (slicing, slice_range(view, sizes, slicing), F.SLICE_NEED),
    ):
        index, counter = ranges(first, count)
        task = tasks_[index]
        asked = view[need][task]

        def words(i: int, counter: np.ndarray = counter, asked: np.ndarray = asked) -> str:
            name = report.counter(int(counter[i]))
            return f"it waits for {asked[i]} arrivals at counter {name}, which gets {totals[counter[i]]}: " + signals(
                int(counter[i])
            )

        report.tasks("wait", task, (asked != totals[counter]) | (asked < 1), words)

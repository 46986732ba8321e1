"""Who waits for whom: proves that no interleaving ends in a deadlock, or shows the circle that waits for itself.

Each SM is taken to run its MATRIX and LOADER tasks one after the other, as if a pipeline had no room to run ahead, and
its SIDE tasks likewise. If that ends, a pipeline of any depth does: room only takes orders away. Where any task of a
group may run an item, whoever waits for the item is taken to wait for all of them. So the proof holds for every
routing, every order of claims, every number of staging slots and pages.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ..abi import Field
from .arrivals import static_arrivals
from .faults import Report
from .form import slice_range
from .groups import Group
from .operands import Sizes
from .view import SIDE, View, distinct, ranges

F = Field


@dataclasses.dataclass(frozen=True)
class Graph:
    """Nodes: the tasks, the counters, the groups, and the ranges of counters that somebody waits for together.

    An edge goes from what must come first.
    """

    tasks: int
    counters: int
    source: np.ndarray
    target: np.ndarray
    nodes: int

    @classmethod
    def of(cls, view: View, sizes: Sizes, groups: list[Group]) -> Graph:
        """The graph of a well-formed schedule."""
        tasks, counters = len(view), len(view.schedule.counter_needs)
        source, target = [], []

        def edges(a: np.ndarray, b: np.ndarray) -> None:
            source.append(a)
            target.append(b)

        line = view.sm * 2 + (view.lane == SIDE)
        order = np.argsort(line, kind="stable")
        follows = line[order][1:] == line[order][:-1]
        edges(order[:-1][follows], order[1:][follows])

        arriving = static_arrivals(view, groups)
        edges(arriving, tasks + view[F.ARRIVE][arriving])
        for group in groups:
            node = tasks + counters + group.number
            edges(group.tasks, np.full(len(group.tasks), node))
            edges(np.full(group.counters, node), tasks + group.first + np.arange(group.counters))

        nodes = tasks + counters + len(groups)
        waiting, slicing = view.reading(F.WAIT), view.reading(F.SLICE_WAIT)
        first, count = slice_range(view, sizes, slicing)
        spans = np.stack(
            [
                np.concatenate([view[F.WAIT][waiting], first]),
                np.concatenate([view[F.WAIT_COUNT][waiting], count]),
            ]
        )
        waiters = np.concatenate([waiting, slicing])[spans[1] > 0]
        together, which = distinct(spans[:, spans[1] > 0])
        index, counter = ranges(*together)
        edges(tasks + counter, nodes + index)
        edges(nodes + which, waiters)
        return cls(tasks, counters, np.concatenate(source), np.concatenate(target), nodes + together.shape[1])

    def levels(self) -> np.ndarray:
        """[nodes], the length of the longest way to each node; -1 for what waits for itself in the end."""
        order = np.argsort(self.source, kind="stable")
        targets = self.target[order]
        begin = np.searchsorted(self.source[order], np.arange(self.nodes + 1))
        missing = np.bincount(self.target, minlength=self.nodes)
        levels = np.full(self.nodes, -1)
        front, level = np.flatnonzero(missing == 0), 0
        while len(front):
            levels[front] = level
            after = targets[ranges(begin[front], begin[front + 1] - begin[front])[1]]
            np.subtract.at(missing, after, 1)
            front, level = np.unique(after[missing[after] == 0]), level + 1
        return levels

    def circle(self, levels: np.ndarray) -> list[int]:
        """Nodes that wait for each other in turn, each for the next."""
        stuck = levels < 0
        inside = stuck[self.source] & stuck[self.target]
        before = dict(zip(self.target[inside].tolist(), self.source[inside].tolist(), strict=True))
        node, seen = int(self.target[inside][0]), dict[int, int]()
        while node not in seen:
            seen[node] = len(seen)
            node = before[node]
        return [n for n, at in seen.items() if at >= seen[node]]


def check_deadlock(view: View, sizes: Sizes, groups: list[Group], report: Report) -> np.ndarray | None:
    """Reports a circle of waits; without one, gives the level of every task: each comes after all that it waits for."""
    graph = Graph.of(view, sizes, groups)
    levels = graph.levels()
    if (levels >= 0).all():
        return levels[: graph.tasks]
    circle = graph.circle(levels)
    start = next(i for i, node in enumerate(circle) if node < graph.tasks)  # any circle has a task
    circle = circle[start:] + circle[:start]
    lines, counter = [], ""
    for node, following in zip(circle, [*circle[1:], circle[0]], strict=True):
        if node < graph.tasks:
            ahead = f"comes after, on the same SM, {report.describe(following)}" if following < graph.tasks else ""
            lines.append(f"{report.describe(node)} {ahead or 'waits for'}")
        elif node < graph.tasks + graph.counters:
            counter = report.counter(node - graph.tasks)
            signal = f"which {report.describe(following)} signals" if following < graph.tasks else "of"
            lines.append(f"counter {counter}, {signal}")
        elif node < graph.tasks + graph.counters + len(groups):
            lines.append(
                f"the {groups[node - graph.tasks - graph.counters].name}, of which {report.describe(following)}"
            )
    blocked = int((levels[: graph.tasks] < 0).sum())
    text = "; ".join(lines)
    report.add("deadlock", f"{blocked} tasks never run, for: {text}, and so on", task=circle[0])
    return None

"""Dynamic work: tasks that share the items of one operation in one layer, dealt or claimed.

Which task runs which item depends on lengths, routing and, where items are claimed, on chance. So rules speak of
groups: any task of a group may run any item, and an item is over when the counter that it arrives at is complete.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ..abi import MAX_SPLITS, Field, Opcode
from .faults import Report
from .operands import Sizes
from .view import View, distinct

F = Field
ATTENTION, UP, DOWN = "attention", "up projection", "down projection"
_KINDS = {
    ATTENTION: (Opcode.ATTN_DECODE, Opcode.ATTN_DRAIN),
    UP: (Opcode.MOE_UPGATE_ACT, Opcode.MOE_UPGATE_ACT_DRAIN),
    DOWN: (Opcode.MOE_DOWN_DRAIN,),
}
_OWN = (F.DEALER, F.ROUND_BEGIN, F.ROUND_END, F.WAIT, F.WAIT_NEED, F.WAIT_COUNT, F.TASK)  # may differ in a group


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """The tasks that share the items of an operation in a layer.

    Attributes:
      number: index among the groups.
      kind: ATTENTION, UP or DOWN.
      layer: the layer.
      tasks: their numbers.
      claims: whether items are claimed from a queue.
      first: first of the counters that items arrive at: of row · K + h, or of expert rank.
      counters: how many; 0 where the tasks themselves arrive.
      each: arrivals at every one of them.
      sure: (task, counter) of the items that are in every step, where they are dealt by rank: [2, n].
    """

    number: int
    kind: str
    layer: int
    tasks: np.ndarray
    claims: bool
    first: int
    counters: int
    each: int
    sure: np.ndarray

    @property
    def name(self) -> str:
        """The group in words."""
        return f"{self.kind} of layer {self.layer}"


def find_groups(view: View, sizes: Sizes, report: Report) -> list[Group]:
    """All groups. Reports those whose items would be run twice or not at all."""
    groups: list[Group] = []
    for kind, opcodes in _KINDS.items():
        tasks = view.select(*opcodes)
        for layer in np.unique(view.layer[tasks]).tolist():
            members = tasks[view.layer[tasks] == layer]
            if _alike(view, f"{kind} of layer {layer}", members, report):
                groups.append(_group(view, sizes, len(groups), kind, layer, members))
    for group in groups:
        _check_shares(view, sizes, group, report)
    _check_queues(view, groups, report)
    return groups


def _group(view: View, sizes: Sizes, number: int, kind: str, layer: int, tasks: np.ndarray) -> Group:
    one = view.fields[:, tasks[0]]
    arrivals = int(one[F.ARRIVE_COUNT])
    counters, each = 0, 0
    if kind == ATTENTION:
        counters, each = sizes.batch * sizes.kv_heads, MAX_SPLITS * arrivals
    elif kind == UP:
        counters, each = sizes.ranks, sizes.expert_width // int(one[F.ROW_COUNT]) * arrivals
    claims = Opcode(int(one[F.OPCODE])) in (Opcode.ATTN_DRAIN, Opcode.MOE_UPGATE_ACT_DRAIN, Opcode.MOE_DOWN_DRAIN)
    first = int(one[F.ARRIVE]) if counters else 0
    sure = np.zeros((2, 0), np.int64)
    if kind == UP and not claims:
        sure = _sure_items(view, sizes, tasks, first)
    return Group(number, kind, layer, tasks, claims, first, counters, each, sure)


def _sure_items(view: View, sizes: Sizes, tasks: np.ndarray, first: int) -> np.ndarray:
    """(task, counter) of the items of the first k ranks: they are active as soon as any row is live."""
    tiles = sizes.expert_width // int(view[F.ROW_COUNT][tasks[0]])
    item = np.arange(sizes.top_k * tiles)
    dealer, dealers = view[F.DEALER][tasks], view[F.DEALERS][tasks]
    begin, end = view[F.ROUND_BEGIN][tasks], view[F.ROUND_END][tasks]
    number = item[:, None] // dealers
    own = (item[:, None] % dealers == dealer) & (begin <= number) & (number < end)
    item, which = np.nonzero(own)
    return distinct(np.stack([tasks[which], first + item // tiles]))[0]


def _alike(view: View, name: str, tasks: np.ndarray, report: Report) -> bool:
    """Whether the tasks agree in everything but their share; reports those that do not."""
    fields = view.fields[:, tasks].copy()
    fields[list(_OWN)] = 0
    if (fields == fields[:, :1]).all():
        return True
    common = np.array([np.bincount(np.unique(row, return_inverse=True)[1]).argmax() for row in fields])
    values = np.array([np.unique(row)[at] for row, at in zip(fields, common, strict=True)])
    differs = fields != values[:, None]

    def words(i: int) -> str:
        field = F(int(np.flatnonzero(differs[:, i])[0]))
        return f"it shares the {name} with tasks whose {field.name} is {values[field]}"

    report.tasks("shared work", tasks, differs.any(axis=0), words)
    return False


def _check_shares(view: View, sizes: Sizes, group: Group, report: Report) -> None:
    """Every dealer is there once, and its rounds follow each other without gaps."""
    rule, tasks = "shared work", group.tasks
    if group.kind == DOWN:
        return
    dealers = int(view[F.DEALERS][tasks[0]])
    rounds = 1
    dealer, first, end = (view[f][tasks] for f in (F.DEALER, F.ROUND_BEGIN, F.ROUND_END))
    if group.kind == UP and not group.claims:
        tiles = sizes.expert_width // int(view[F.ROW_COUNT][tasks[0]])
        rounds = -(-sizes.ranks * tiles // dealers)
    else:
        end = np.ones_like(end)
    order = np.lexsort((end, first, dealer))
    tasks, dealer, first, end = tasks[order], dealer[order], first[order], end[order]
    same = np.append(False, dealer[1:] == dealer[:-1])
    before = np.where(same, np.roll(end, 1), 0)
    # The task that begins with round 0 also brings the arrivals of what does not exist: it must be one.
    again = same & ((first < before) | (first == 0))

    def twice(i: int) -> str:
        other = report.describe(int(tasks[i - 1]))
        return f"DEALER {dealer[i]} of the {group.name} has rounds before {before[i]} already, by {other}"

    report.tasks(rule, tasks, again, twice)
    gap = ~again & (first > before)
    report.tasks(
        rule, tasks, gap, lambda i: f"nobody runs rounds {before[i]} to {first[i] - 1} of DEALER {dealer[i]} before it"
    )
    last = ~np.append(same[1:], False) & (end < rounds)
    report.tasks(rule, tasks, last, lambda i: f"nobody runs rounds {end[i]} to {rounds - 1} of DEALER {dealer[i]}")
    missing = np.setdiff1d(np.arange(dealers), dealer)
    if len(missing):
        report.add(rule, f"the {group.name} lacks DEALER {missing[0]} of {dealers} ({len(missing)} are missing)")


def _check_queues(view: View, groups: list[Group], report: Report) -> None:
    """No two groups claim from one queue."""
    owners: dict[int, Group] = {}
    for group in groups:
        if not group.claims:
            continue
        queue = int(view[F.QUEUE][group.tasks[0]])
        if queue in owners:
            name = view.schedule.queue_names[queue]
            report.add(
                "queue",
                f"the {owners[queue].name} and the {group.name} claim from the same queue, {queue} ({name}): "
                f"{report.describe(int(group.tasks[0]))}",
                task=int(group.tasks[0]),
            )
        owners[queue] = group

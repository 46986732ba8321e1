"""One step of a schedule, item by item: lengths, live rows and routing, and what the lists make of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from ..abi import MAX_SPLITS, Field, Opcode
from ..division import attention_items, attention_splits, dealt, expert_items, routes
from ..schedule import Schedule
from .arrivals import static_arrivals
from .faults import Report
from .groups import ATTENTION, DOWN, Group
from .operands import Sizes
from .view import View

F = Field


@dataclasses.dataclass(frozen=True, eq=False)
class Instance:
    """What a step meets.

    Attributes:
      name: for reports.
      positions: [B] int, what each row holds already.
      live: [B] bool, at least one.
      experts: [layers, B, k] int32, distinct in a row.
    """

    name: str
    positions: np.ndarray
    live: np.ndarray
    experts: np.ndarray


_EDGES = (0, 1, 63, 64, 65, 127, 128, 2047, 2048, 4094, 4095, 4096, 4097, 8191, 131071)


def instances(schedule: Schedule, seed: int) -> Iterator[Instance]:
    """Extremes, then random ones: lengths about the ends of pages, windows and splits; alike and distinct experts."""
    rng = np.random.default_rng(seed)
    config, batch = schedule.config, schedule.batch
    experts, k, layers = config.num_experts, config.num_experts_per_tok, config.num_hidden_layers
    alike = np.broadcast_to(np.arange(k), (layers, batch, k))
    spread = np.arange(batch * k).reshape(batch, k) % experts  # distinct within a row, and apart as far as may be
    apart = np.broadcast_to(spread, (layers, batch, k))
    everyone = np.ones(batch, bool)
    edges = np.array(_EDGES)
    for position in edges:
        yield Instance(f"all rows at {position}, with the same experts", np.full(batch, position), everyone, alike)
    yield Instance("lengths at every edge, no expert shared", rng.choice(edges, batch), everyone, apart)
    for row in {0, batch - 1}:
        only = np.arange(batch) == row
        yield Instance(f"row {row} alone, at 0", np.zeros(batch, np.int64), only, apart)
        yield Instance(f"row {row} alone, at 4096", np.full(batch, 4096), only, alike)
    for number in range(8):
        live = rng.random(batch) < rng.choice([0.3, 0.7, 1.0])
        live[rng.integers(batch)] = True
        random = rng.integers(0, rng.choice([70, 5000, 200_000]), batch)
        positions = np.where(rng.random(batch) < 0.3, rng.choice(edges, batch), random)
        chosen = rng.random((layers, batch, experts)).argsort(axis=2)[:, :, :k]
        yield Instance(f"random {number} of seed {seed}", positions, live, chosen)


def check_instance(view: View, sizes: Sizes, groups: list[Group], instance: Instance, report: Report) -> None:
    """Reports items that are run twice or never, and counters that do not get what the schedule states."""
    tasks = static_arrivals(view, groups)
    arrived = np.zeros(len(view.schedule.counter_needs), np.int64)
    np.add.at(arrived, view[F.ARRIVE][tasks], view[F.ARRIVE_COUNT][tasks])
    step = _Step(view, sizes, instance, arrived, report)
    for group in groups:
        if group.kind == ATTENTION:
            step.attention(group)
        elif group.kind != DOWN:
            step.experts(group)
    needs = view.schedule.counter_needs
    wrong = np.flatnonzero(arrived != needs)
    report.counters(
        "instance", wrong, lambda counter: f"{arrived[counter]} of {needs[counter]} arrivals with {instance.name}"
    )


class _Step:
    def __init__(self, view: View, sizes: Sizes, instance: Instance, arrived: np.ndarray, report: Report) -> None:
        self._view, self._sizes, self._instance = view, sizes, instance
        self._arrived, self._report = arrived, report

    def attention(self, group: Group) -> None:
        positions, live = self._instance.positions.tolist(), self._instance.live.tolist()
        window = int(self._view[F.WINDOW][group.tasks[0]])
        heads, each = self._sizes.kv_heads, int(self._view[F.ARRIVE_COUNT][group.tasks[0]])
        items = attention_items(positions, live, heads, window)
        run = self._run(group, len(items))
        last = {row: attention_splits(position, window).number - 1 for row, position in enumerate(positions)}
        for number in run.tolist():
            row, head, split = items[number]
            missing = MAX_SPLITS - 1 - split if split == last[row] else 0
            self._arrived[group.first + row * heads + head] += each * (1 + missing)
        dealer, dealers = self._view[F.DEALER][group.tasks], self._view[F.DEALERS][group.tasks]
        for row in np.flatnonzero(~self._instance.live).tolist():
            for head in range(heads):
                brings = (dealer == (row * heads + head) % dealers).sum()
                self._arrived[group.first + row * heads + head] += each * MAX_SPLITS * brings

    def experts(self, group: Group) -> None:
        tiles = self._sizes.expert_width // int(self._view[F.ROW_COUNT][group.tasks[0]])
        each = int(self._view[F.ARRIVE_COUNT][group.tasks[0]])
        chosen = routes(self._instance.experts[group.layer].astype(np.int32), self._instance.live.tolist())
        active = len(chosen.experts)
        run = self._run(group, len(expert_items(active, tiles)))
        np.add.at(self._arrived, group.first + run // tiles, each)
        first = group.tasks[self._view[F.ROUND_BEGIN][group.tasks] == 0]
        dealer, dealers = self._view[F.DEALER][first], self._view[F.DEALERS][first]
        for rank in range(active, self._sizes.ranks):
            self._arrived[group.first + rank] += each * tiles * (dealer == rank % dealers).sum()

    def _run(self, group: Group, items: int) -> np.ndarray:
        """Numbers of the items that the group's tasks run: with a queue each once, otherwise those that are dealt."""
        if group.claims:
            return np.arange(items)
        parts = []
        for task in group.tasks.tolist():
            dealer, dealers = int(self._view[F.DEALER][task]), int(self._view[F.DEALERS][task])
            own = (int(self._view[F.ROUND_BEGIN][task]), int(self._view[F.ROUND_END][task]))
            if self._view.opcode[task] == Opcode.ATTN_DECODE:
                own = (0, items)
            parts.append(np.array(dealt(items, dealer, dealers, own), np.int64))
        run = np.concatenate(parts)
        times = np.bincount(run, minlength=items)
        wrong = np.flatnonzero(times != 1)
        for item in wrong[:1].tolist():
            text = f"item {item} of {items} of the {group.name} is run {times[item]} times with {self._instance.name}"
            self._report.add("instance", text)
        return run

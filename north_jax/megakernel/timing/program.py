"""A schedule as the simulator walks it: for every SM what is streamed, what is staged, and who waits for whom."""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

from ..schedule import Schedule

type Arrivals = tuple[tuple[int, int], ...]  # counter, how many


class Phase(enum.IntEnum):
    """What an SM is busy with, for reports."""

    NORM = 0
    QKV = 1
    ROUTER = 2
    ATTENTION = 3
    UP = 4
    OUT = 5
    DOWN = 6
    HEAD = 7
    SIDE = 8  # top-k, gathers, combines, sampling


class Page(NamedTuple):
    """What one slot of the ring is filled with."""

    bytes: int
    service: float  # µs of the memory's queue
    port: float  # µs into the SM
    work: float  # µs of its consumers
    stage: int  # of the SM's loader that must be ready, counted from the entry's base; -1: none


class Item(NamedTuple):
    """A tile with accumulators of its own: pages, then signals."""

    phase: Phase
    layer: int
    pages: tuple[Page, ...]
    arrivals: Arrivals


class Entry(NamedTuple):
    """A place in an SM's stream: one item, or a queue to claim items from until it is empty."""

    item: Item | None
    queue: int
    layer: int
    base: int  # of the stages that pages name
    gate: tuple[int, ...]  # counters that the producer waits for: routing
    gate_time: float  # µs from seeing them to knowing the experts


class Stage(NamedTuple):
    """Work of loader or side warps: wait, load, compute, perhaps signal. Stages of one group wait side by side."""

    phase: Phase
    layer: int
    group: int
    counters: tuple[int, ...]
    previous: bool  # they are the previous step's
    bytes: int  # loaded; 0: what was polled is the data
    compute: float
    arrivals: Arrivals


@dataclasses.dataclass(slots=True)
class Program:
    """All SMs. A schedule's counters, and one more that END_STEP arrives at."""

    schedule: Schedule
    stream: list[list[Entry]]
    loader: list[list[Stage]]
    side: list[list[Stage]]
    queues: list[list[Item]]
    needs: list[int]  # arrivals at each counter in a step
    end: int  # counter that ends the step
    bytes: int = 0  # streamed in a step

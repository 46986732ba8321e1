"""Runs a program: every page, signal and poll of some steps, in order of time.

Memory is one first-come queue. A producer asks for its next page when the ring has a free slot, its window is open and,
for routed tiles, the experts are known. Consumers take pages in order, when they have landed and their activations are
staged. Left out: DRAM refresh, the clearing of exchange buffers, contention among signals at one address.
"""

from __future__ import annotations

import gc

from .events import Clock, Counters, Memory
from .lane import Lane
from .machine import Kernel, Machine
from .pipeline import Pipeline
from .program import Program
from .timeline import Timeline


def simulate(program: Program, machine: Machine, kernel: Kernel, steps: int = 1, until: int | None = None) -> Timeline:
    """Runs `steps` steps on end, the first from empty rings; or less of the second, up to the norm of layer `until`.

    Raises:
      RuntimeError: the lists wait for each other, or for a signal that nobody sends.
    """
    clock, memory = Clock(), Memory(machine, kernel)
    counters = Counters(program.needs, steps, clock, memory, machine.fence if kernel.fences else 0.0)
    schedule = program.schedule
    timeline = Timeline(schedule.sms, schedule.config.num_hidden_layers + 1, until)
    shared = (clock, memory, counters, timeline)
    claims = [[0] * len(program.queues) for _ in range(steps)]
    pipelines = [Pipeline(sm, program, steps, machine, kernel, shared, claims) for sm in range(schedule.sms)]
    side = [Lane(stages, steps, machine, kernel, shared, lambda: None) for stages in program.side]
    parts: list[Pipeline | Lane] = [*pipelines, *side]
    for part in parts:
        part.start()
    collects = gc.isenabled()
    gc.disable()  # a third of the time would go into walking the program in search of garbage that is not there
    try:
        clock.run()
    finally:
        if collects:
            gc.enable()
    if not clock.stopped and not all(part.finished for part in parts):
        raise RuntimeError("the schedule stands still: lists wait for each other, or for a signal that nobody sends")
    timeline.ends = [counters.visible[program.end + step * len(program.needs)] for step in range(steps)]
    return timeline

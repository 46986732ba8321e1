"""Loader and side warps: they stage activations, or do work of their own, task by task."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from .events import Clock, Counters, Memory
from .machine import Kernel, Machine
from .program import Phase, Stage
from .timeline import Timeline

NEVER = math.inf


class Lane:
    """One lane of one SM, through all steps."""

    def __init__(
        self,
        stages: list[Stage],
        steps: int,
        machine: Machine,
        kernel: Kernel,
        shared: tuple[Clock, Memory, Counters, Timeline],
        staged: Callable[[], None],
    ) -> None:
        """`staged` is called whenever a stage is done."""
        self._stages, self._machine, self._kernel, self._staged = stages, machine, kernel, staged
        self._clock, self._memory, self._counters, self._timeline = shared
        self.ready = [NEVER] * (len(stages) * steps)  # when each stage of each step is done
        self._first = self._end = self._left = 0  # the group at work: stages that wait side by side
        self._free = self._begin = 0.0  # when the last group was done; when this one began to wait
        self._asked, self._asked_at = -1, 0.0  # the stage that consumers wait for, and since when

    @property
    def finished(self) -> bool:
        """Whether all stages of all steps are done."""
        return self._end == len(self.ready) and self._left == 0

    def start(self) -> None:
        """Begins with the next group; without one, ends."""
        self._first, size = self._end, len(self._stages)
        if self._first == len(self.ready):
            return
        group = self._stages[self._first % size].group
        self._end += 1
        while self._end % size and self._stages[self._end % size].group == group:
            self._end += 1
        self._left = self._end - self._first
        if self._kernel.staged_ahead or self._stages[self._first % size].phase in (Phase.NORM, Phase.SIDE):
            self._wait(self._free)
        else:
            self._begin = NEVER
            self._on_demand()

    def request(self, number: int, time: float) -> None:
        """Consumers have come to a stage that is not ready; where nobody stages ahead, it begins now."""
        self._asked, self._asked_at = number, time
        if self._begin == NEVER:
            self._on_demand()

    def _on_demand(self) -> None:
        if self._first <= self._asked:
            self._wait(max(self._free, self._asked_at))

    def _wait(self, begin: float) -> None:
        self._begin = begin
        for number in range(self._first, self._end):
            step, place = divmod(number, len(self._stages))
            stage = self._stages[place]
            counters = stage.counters if step >= stage.previous else ()
            self._counters.when_complete(step - stage.previous, counters, partial(self._complete, number))

    def _complete(self, number: int, visible: float) -> None:
        self._clock.at(max(visible, self._begin), self._look, (number, visible))

    def _look(self, time: float, argument: tuple[int, float]) -> None:
        """One of the polls is under way that sees the counters complete."""
        number, visible = argument
        step, place = divmod(number, len(self._stages))
        stage = self._stages[place]
        polls = stage.counters and step >= stage.previous
        seen = self._memory.seen(time, visible, self._begin) if polls else self._begin
        if stage.bytes:
            self._clock.at(seen, self._load, (number, stage.bytes))
        else:
            self._finish(number, seen)

    def _load(self, time: float, argument: tuple[int, int]) -> None:
        """Loads a batch of what is to be staged: a whole one takes an access, what is left at the end in proportion."""
        number, size = argument
        trip, most = self._memory.access(time), self._machine.loads_in_flight
        if self._kernel.bulk_staging:
            self._finish(number, time + trip + size / self._machine.sm_port)
        elif size > most:
            self._clock.at(time + trip, self._load, (number, size - most))
        else:
            whole = self._stages[number % len(self._stages)].bytes == size
            self._finish(number, time + trip * (1.0 if whole else size / most))

    def _finish(self, number: int, time: float) -> None:
        step, place = divmod(number, len(self._stages))
        stage = self._stages[place]
        ready = self.ready[number] = time + stage.compute
        if self._timeline.stage(step, stage, ready):
            self._clock.stopped = True
        self._free = max(self._free, ready)
        if stage.arrivals:
            self._counters.send(ready, step, stage.arrivals)
        self._left -= 1
        if self._left == 0:
            self.start()
        self._staged()

"""What all SMs share: the clock, memory and the counters."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .machine import Kernel, Machine


class Clock:
    """Events in order of time; equal times in the order in which they were set."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._number = itertools.count()
        self.stopped = False

    def at(self, time: float, action: Callable[..., None], argument: Any) -> None:
        """Calls action(time, argument) when it is time."""
        heapq.heappush(self._events, (time, next(self._number), action, argument))

    def run(self) -> None:
        """Runs until no event is left, or until somebody sets `stopped`."""
        events, pop = self._events, heapq.heappop
        while events and not self.stopped:
            time, _, action, argument = pop(events)
            action(time, argument)


class Memory:
    """One first-come queue of page requests, and small accesses that wait behind a part of it."""

    def __init__(self, machine: Machine, kernel: Kernel) -> None:
        self._machine, self._kernel = machine, kernel
        self.free = 0.0  # when all that was asked for is served
        self.served = 0  # bytes
        self._random = random.Random(0).random
        self._landing: deque[tuple[float, float]] = deque()  # when, and µs of streaming
        self._in_flight = 0.0  # the sum of those: µs that it takes to stream what has not landed

    def serve(self, time: float, size: int, service: float) -> float:
        """Queues a request. Gives for how long memory had nothing to do before it."""
        self.served += size
        self._in_flight += service
        idle = time - self.free
        if idle <= 0.0:
            self.free += service
        else:
            self.free = time + service
        self._landing.append((self.free + self._machine.page_latency, service))
        return max(idle, 0.0)

    def access(self, time: float) -> float:
        """µs that a store, a poll or a batch of loads takes when it starts now."""
        landing = self._landing
        while landing and landing[0][0] <= time:
            self._in_flight -= landing.popleft()[1]
        return self._machine.access_latency + self._machine.access_share * self._in_flight

    def seen(self, time: float, visible: float, begin: float) -> float:
        """When a poller that began at `begin` knows of what became visible at `visible`; one of them is now."""
        trip = self.access(time)
        first = begin + trip / 2  # when the first poll is answered
        if visible <= first:
            return begin + trip
        pause = self._machine.poll_pause
        period = max((trip + pause) / self._kernel.polls, pause)
        return visible + self._random() * period + trip / 2


class _Wait:
    """Somebody who waits for several counters."""

    __slots__ = ("left", "then", "visible")

    def __init__(self, left: int, visible: float, then: Callable[[float], None]) -> None:
        self.left, self.visible, self.then = left, visible, then


class Counters:
    """The counters of all steps."""

    def __init__(self, needs: Sequence[int], steps: int, clock: Clock, memory: Memory, fence: float) -> None:
        self._count = len(needs)
        self._left = list(needs) * steps
        self.visible = [0.0] * len(self._left)  # when the last arrival could be seen
        self._waits: list[list[_Wait]] = [[] for _ in self._left]
        self._clock, self._memory, self._fence = clock, memory, fence

    def send(self, time: float, step: int, arrivals: Sequence[tuple[int, int]]) -> None:
        """Arrivals (counter, how many) that are stored at `time`."""
        self._clock.at(time, self._arrive, (step, arrivals))

    def _arrive(self, time: float, argument: tuple[int, Sequence[tuple[int, int]]]) -> None:
        step, arrivals = argument
        visible = time + self._memory.access(time) + self._fence
        for counter, number in arrivals:
            index = counter + step * self._count
            self._left[index] -= number
            self.visible[index] = max(self.visible[index], visible)
            if self._left[index] == 0:
                for wait in self._waits[index]:
                    wait.left -= 1
                    wait.visible = max(wait.visible, self.visible[index])
                    if wait.left == 0:
                        wait.then(wait.visible)

    def when_complete(self, step: int, counters: Sequence[int], then: Callable[[float], None]) -> None:
        """Calls then(time at which all of them can be seen) once that is known; at once where it is."""
        indices = [counter + step * self._count for counter in counters]
        left = [index for index in indices if self._left[index] > 0]
        wait = _Wait(len(left), max((self.visible[index] for index in indices), default=0.0), then)
        if not left:
            then(wait.visible)
        for index in left:
            self._waits[index].append(wait)

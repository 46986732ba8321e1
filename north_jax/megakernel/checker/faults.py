"""What the checker finds: faults that explain themselves in words."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ..schedule import Schedule

MOST = 8  # faults of one rule that are explained; the others are counted


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a schedule.

    Attributes:
      rule: the rule that is broken, in few words.
      text: what breaks it: tasks, counters, buffers.
      task: number of the task at fault, where it is one.
      counter: number of the counter at fault, where it is one.
    """

    rule: str
    text: str
    task: int | None = None
    counter: int | None = None

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


class ScheduleError(ValueError):
    """A schedule that must not run; `faults` are all that was found."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = tuple(faults)


class Report:
    """Collects the faults of a schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._faults: list[Fault] = []
        self._found = collections.Counter[str]()  # by rule

    def __bool__(self) -> bool:
        """Whether there are faults."""
        return bool(self._faults)

    def faults(self) -> list[Fault]:
        """All faults; those that were too many of a rule are one."""
        more = {rule: found - MOST for rule, found in self._found.items() if found > MOST}
        return self._faults + [Fault(rule, f"{number} more of these") for rule, number in more.items()]

    def add(self, rule: str, text: str, *, task: int | None = None, counter: int | None = None) -> None:
        """One fault."""
        self._found[rule] += 1
        if self._found[rule] <= MOST:
            self._faults.append(Fault(rule, text, task, counter))

    def tasks(self, rule: str, tasks: np.ndarray, wrong: np.ndarray, words: Callable[[int], str]) -> None:
        """Faults of those `tasks` that are `wrong`; words(i) says what is wrong with tasks[i]."""
        found = np.flatnonzero(wrong).tolist()
        for i in found[:MOST]:
            self.add(rule, f"{self.describe(int(tasks[i]))}: {words(i)}", task=int(tasks[i]))
        self._found[rule] += len(found[MOST:])

    def counters(self, rule: str, counters: np.ndarray, words: Callable[[int], str]) -> None:
        """Faults of `counters`; words(counter) says what is wrong with one."""
        found = counters.tolist()
        for counter in found[:MOST]:
            self.add(rule, f"counter {self.counter(counter)}: {words(counter)}", counter=counter)
        self._found[rule] += len(found[MOST:])

    def counter(self, counter: int) -> str:
        """A counter in words."""
        return f"{counter} ({self._schedule.counter_names[counter]})"

    def describe(self, task: int) -> str:
        """A task in words."""
        return self._schedule.describe(task)

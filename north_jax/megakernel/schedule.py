"""A schedule: the task lists of one step for a batch size, with the names of its counters and its buffers."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..config import Config
from .abi import DESCRIPTOR_FIELDS, OPERATIONS, Field, Opcode
from .layout import Workspace


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The lists that the SMs walk in every step. Arrays are read-only.

    Attributes:
      config: the model.
      batch: rows.
      order: name of the wave order.
      tasks: [n, DESCRIPTOR_FIELDS] int32, SM by SM, each list in order.
      begin: [SMs + 1] int32; SM s has tasks begin[s] … begin[s + 1] − 1.
      counter_names: what each counter counts, for reports.
      counter_needs: [counters] int32, arrivals at each in one step.
      queue_names: what each claim word claims.
      workspace: the buffers.
    """

    config: Config
    batch: int
    order: str
    tasks: np.ndarray
    begin: np.ndarray
    counter_names: tuple[str, ...]
    counter_needs: np.ndarray
    queue_names: tuple[str, ...]
    workspace: Workspace

    def __post_init__(self) -> None:
        if self.tasks.dtype != np.int32 or self.tasks.ndim != 2 or self.tasks.shape[1] != DESCRIPTOR_FIELDS:
            raise ValueError(
                f"tasks is {self.tasks.dtype}{list(self.tasks.shape)}, expected int32[n, {DESCRIPTOR_FIELDS}]"
            )
        for array in (self.tasks, self.begin, self.counter_needs):
            array.setflags(write=False)

    @property
    def sms(self) -> int:
        """SMs that the lists are for."""
        return len(self.begin) - 1

    def list_of(self, sm: int) -> np.ndarray:
        """[n, DESCRIPTOR_FIELDS], the tasks of one SM in order."""
        return self.tasks[self.begin[sm] : self.begin[sm + 1]]

    def describe(self, task: int) -> str:
        """One task in words: opcode, layer, SM and the fields that it reads."""
        row = self.tasks[task]
        sm = int(np.searchsorted(self.begin, task, side="right")) - 1
        try:
            opcode = Opcode(int(row[Field.OPCODE]))
        except ValueError:
            return f"task {task} on SM {sm}: unknown opcode {row[Field.OPCODE]}"
        shown = ", ".join(f"{Field(f).name} {row[f]}" for f in sorted(OPERATIONS[opcode].fields) if f != Field.LAYER)
        return f"task {task} on SM {sm}: {opcode.name} of layer {row[Field.LAYER]} ({shown})"

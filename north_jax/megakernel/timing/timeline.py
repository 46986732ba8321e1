"""What a simulation saw."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict

import numpy as np

from .program import Phase, Stage


@dataclasses.dataclass(slots=True)
class Tally:
    """One phase of one layer on one SM; times in µs.

    Attributes:
      waiting, starving, working: of the consumers, for activations, for pages, at work.
      idle: of all memory, until it was asked for a page of this tally.
      bytes: asked for.
      landed, done: when the first page was there and the last one consumed.
    """

    waiting: float = 0.0
    starving: float = 0.0
    working: float = 0.0
    idle: float = 0.0
    bytes: int = 0
    landed: float = math.inf
    done: float = 0.0


class Timeline:
    """Tallies, and when each SM's loaders and producers were done."""

    def __init__(self, sms: int, layers: int, until: int | None = None) -> None:
        """`layers` counts the head as one more; the second step is of interest up to the norm of layer `until`."""
        self.sms, self.layers, self._until = sms, layers, until
        self.tallies: dict[tuple[int, int, int, Phase], Tally] = {}
        self.staged: dict[tuple[int, int, Phase], list[float]] = defaultdict(list)  # by step, layer
        self.known: dict[tuple[int, int], list[float]] = defaultdict(list)  # experts, by step and layer
        self.ends: list[float] = []  # of the steps: when the last signal could be seen

    def stage(self, step: int, stage: Stage, ready: float) -> bool:
        """Notes that a stage is done at `ready`. Gives whether all of interest has been seen."""
        key = step, stage.layer, stage.phase
        self.staged[key].append(ready)
        if key != (1, self._until, Phase.NORM):
            return False
        return len(self.staged[key]) == len(self.staged[0, stage.layer, stage.phase])

    def tally(self, step: int, sm: int, layer: int, phase: Phase) -> Tally:
        """The tally of a phase."""
        key = (step, sm, layer, phase)
        found = self.tallies.get(key)
        if found is None:
            found = self.tallies[key] = Tally()
        return found

    def total(self, step: int, field: str) -> np.ndarray:
        """[SMs, layers, phases] of a field of Tally in one step."""
        result = np.zeros((self.sms, self.layers, len(Phase)))
        for (at, sm, layer, phase), tally in self.tallies.items():
            if at == step:
                result[sm, layer, phase] = getattr(tally, field)
        return result

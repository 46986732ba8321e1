"""What a step has to do: the rows' positions and the experts that their tokens chose."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from ...config import SPARSE, Config
from ...random_weights.popularity import SKEW, SKEWED, UNIFORM


@dataclasses.dataclass(frozen=True)
class Load:
    """One step of a batch whose rows are all live.

    Attributes:
      positions: of each row's token; the row attends to one key more.
      active: distinct experts in each layer, 0 in dense ones.
    """

    positions: tuple[int, ...]
    active: tuple[int, ...]

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.positions)


def load(config: Config, contexts: Sequence[int], routing: str = UNIFORM) -> Load:
    """A step of rows with these contexts, the new token included.

    Layers get the expected number of distinct experts, rounded so that the sum over layers stays exact within one.
    """
    mean = distinct_experts(config.num_experts, config.num_experts_per_tok, len(contexts), routing)
    active, owed = [], 0.0
    for kind in config.mlp_layer_types:
        owed += mean if kind == SPARSE else 0.0
        active.append(round(owed) if kind == SPARSE else 0)
        owed -= active[-1]
    return Load(tuple(context - 1 for context in contexts), tuple(active))


@functools.cache
def distinct_experts(experts: int, chosen: int, rows: int, routing: str) -> float:
    """Expected number of distinct experts when each row draws `chosen` distinct ones."""
    if routing == UNIFORM:
        return experts * (1 - (1 - chosen / experts) ** rows)
    if routing != SKEWED:
        raise ValueError(f"routing is {UNIFORM} or {SKEWED}, not {routing}")
    # The largest of log p + Gumbel noise are a draw without replacement.
    rng, draws = np.random.default_rng(0), 400
    score = -SKEW * np.log(np.arange(1, experts + 1)) + rng.gumbel(size=(draws, rows, experts))
    best = np.argpartition(-score, chosen - 1, axis=-1)[..., :chosen]
    hit = np.zeros((draws, experts), bool)
    np.put_along_axis(hit, best.reshape(draws, -1), True, axis=1)
    return float(hit.sum(axis=1).mean())

"""Do two passes choose the same experts, and if not, was it close?

Where two experts' router logits are nearly equal, rounding decides which one runs, and both choices are right. The
yardstick of a layer is how far JAX's own router logits, in the weights' type, are from those in float32: a choice is a
*near tie* where the last expert chosen and the first one left out are less than NEAR yardsticks apart in float32.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .measures import rms
from .passes import Pass

NEAR = 4.0  # yardsticks: of errors that large there is one in thousands
_LEAST = 1e-6  # of the logits' rms: a yardstick below it is that of float32's own rounding


@dataclasses.dataclass(frozen=True, slots=True)
class Routing:
    """Of one layer.

    Attributes:
      choices: tokens that were routed.
      same: tokens with the same experts.
      near_ties: tokens whose choice is a near tie, as float32 sees it.
      changed_near: tokens with other experts where that is a near tie between those exchanged.
    """

    choices: int
    same: int
    near_ties: int
    changed_near: int

    @property
    def changed_clear(self) -> int:
        """Tokens with other experts although it was no near tie: rounding does not explain them."""
        return self.choices - self.same - self.changed_near


def yardsticks(exact: Pass, theirs: Pass) -> list[float]:
    """By layer: rms difference of JAX's router logits in the weights' type from those in float32; 0 without experts."""
    found = []
    for one, other in zip(exact.layers, theirs.layers, strict=True):
        if "router_logits" not in one:
            found.append(0.0)
            continue
        logits = one["router_logits"]
        found.append(max(float(rms(other["router_logits"] - logits)), _LEAST * float(rms(logits))))
    return found


def routing(exact: Pass, found: Pass, measures: list[float]) -> list[Routing | None]:
    """Compares the experts of every layer.

    Args:
      exact: in float32.
      found: of a backend.
      measures: of `yardsticks`.

    Returns:
      by layer; None where there are no experts.
    """
    layers: list[Routing | None] = []
    for number, (one, other) in enumerate(zip(exact.experts, found.experts, strict=True)):
        if one is None or other is None:
            layers.append(None)
            continue
        logits, near = exact.layers[number]["router_logits"], NEAR * measures[number]
        chosen = one.shape[1]
        ranked = -np.sort(-logits, axis=1)
        margins = ranked[:, chosen - 1] - ranked[:, chosen] if chosen < logits.shape[1] else np.full(len(one), np.inf)
        changed = np.flatnonzero((one != other).any(axis=1))
        gaps = [_gap(logits[token], one[token], other[token]) for token in changed]
        layers.append(
            Routing(
                choices=len(one),
                same=len(one) - len(changed),
                near_ties=int(np.sum(margins < near)),
                changed_near=sum(gap < near for gap in gaps),
            )
        )
    return layers


def _gap(logits: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> float:
    """Between the largest logit that is out and the least one that is in instead: logits [E], experts [k] each."""
    out, into = np.setdiff1d(ours, theirs), np.setdiff1d(theirs, ours)
    return float(logits[out].max() - logits[into].min())

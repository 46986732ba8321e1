"""Where greedy texts part, and by how much of a logit.

A text of a backend is read by float32: up to the first token that float32 would not have chosen, both have said the
same. Where float32's logits of the two tokens are closer than rounding moves them, the texts part at a near tie.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .measures import rms
from .routing import NEAR


@dataclasses.dataclass(frozen=True, slots=True)
class Parting:
    """The first token of a text that is not the one it is compared with.

    Attributes:
      position: of the token in the text, from 0.
      token: the text's.
      other: the one it is compared with.
      margin: float32 logit of `other` less that of `token`.
      near_tie: whether the margin is below NEAR times what rounding moves a logit by.
    """

    position: int
    token: int
    other: int
    margin: float
    near_tie: bool


def rounding(exact: np.ndarray, theirs: np.ndarray) -> float:
    """The rms difference of JAX's logits in the weights' type from those in float32: [S, V] each."""
    return float(rms(theirs - exact))


def parting(text: Sequence[int], others: Sequence[int] | None, exact: np.ndarray, moved: float) -> Parting | None:
    """Where a text leaves another one.

    Args:
      text: S tokens.
      others: the text it is compared with; None for float32's.
      exact: [S, V], float32's logits along `text`, before each of its tokens.
      moved: of `rounding`.

    Returns:
      None if they are equal.
    """
    compared = exact.argmax(axis=1).tolist() if others is None else others
    for position, (token, other) in enumerate(zip(text, compared, strict=True)):
        if token != other:
            margin = float(exact[position, other] - exact[position, token])
            return Parting(position, int(token), int(other), margin, abs(margin) < NEAR * moved)
    return None

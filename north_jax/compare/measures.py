"""How far two arrays are apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


def errors(found: np.ndarray, exact: np.ndarray, rows_axis: int) -> np.ndarray:
    """Relative errors: the norm over all axes after `rows_axis`, which is kept with those before it."""
    axes = tuple(range(rows_axis + 1, exact.ndim))
    distance = np.sqrt(np.sum(np.square(found - exact, dtype=np.float64), axis=axes))
    return distance / np.sqrt(np.sum(np.square(exact, dtype=np.float64), axis=axes))


def rms(values: np.ndarray, axis: int | None = None) -> Any:
    return np.sqrt(np.mean(np.square(values), axis=axis))


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Between an array and the exact one of its shape.

    Attributes:
      error: norm of the difference, in norms of the exact array; 0 where both are 0.
      median: that error of single rows (positions), the median: a few positions with another expert do not move it.
      cosine: of the angle between them, as vectors; 1 where both are 0.
      maximum: the largest absolute difference of two numbers, in their own unit.
    """

    error: float
    median: float
    cosine: float
    maximum: float

    @classmethod
    def of(cls, found: np.ndarray, exact: np.ndarray) -> Difference:
        """Of [S, n] arrays. Raises ValueError for different shapes. NaN gives NaN, never 0."""
        if found.shape != exact.shape:
            raise ValueError(f"an array of shape {found.shape} beside one of {exact.shape}")
        a, b = found.astype(np.float64), exact.astype(np.float64)
        lengths = np.linalg.norm(a), np.linalg.norm(b)
        if not any(lengths):
            return cls(0.0, 0.0, 1.0, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):  # an exact 0 beside something else: infinite
            error = float(np.linalg.norm(a - b) / lengths[1])
            median = float(np.median(errors(a, b, 0)))
            cosine = float(np.sum(a * b) / lengths[0] / lengths[1])
        return cls(error, median, cosine, float(np.max(np.abs(a - b), initial=0)))

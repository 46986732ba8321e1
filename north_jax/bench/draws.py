"""Do drawn tokens follow the distribution that a request asks for? Exact probabilities, and a chi-square test."""

from __future__ import annotations

import math

import numpy as np

from north_jax.sampling import SamplingParams

_LEAST_EXPECTED = 20  # draws of a bin


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """[V] float64: temperature, then top-k, then top-p and min-p over what top-k left; ties by token."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    order = np.argsort(-weights, kind="stable")
    ranked = weights[order]
    if params.top_k:
        ranked[params.top_k :] = 0
    before = np.cumsum(ranked) - ranked
    keep = (before < params.top_p * ranked.sum()) | (params.top_p >= 1)
    keep &= ranked >= params.min_p * ranked[0]
    keep[0] = True
    result = np.zeros_like(weights)
    result[order] = np.where(keep, ranked, 0)
    return result / result.sum()


def surprise(tokens: np.ndarray, exact: np.ndarray) -> float:
    """How far draws are from a distribution, in standard deviations of a normal variable (Wilson and Hilferty).

    Args:
      tokens: [n] int, drawn independently.
      exact: [V], their probabilities.

    Returns:
      about normal for correct draws; infinity if a token came that has probability 0.
    """
    counts = np.bincount(tokens, minlength=len(exact))
    if counts[exact == 0].any():
        return math.inf
    order = np.argsort(-exact, kind="stable")
    expected = exact[order] * len(tokens)
    bins = np.minimum(np.cumsum(expected) - expected, len(tokens) - 1e-9) // _LEAST_EXPECTED
    _, bins = np.unique(bins, return_inverse=True)
    wanted, found = np.bincount(bins, expected), np.bincount(bins, counts[order])
    freedom = len(wanted) - 1
    if freedom == 0:
        return 0.0
    chi_square = float(np.sum((found - wanted) ** 2 / np.maximum(wanted, 1e-9)))
    spread = 2 / (9 * freedom)
    return ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)

"""How popular experts are under a routing, and router biases that make random logits choose them so.

`skewed` is the routing that vLLM was measured with: each row draws distinct experts one after the other, with
probability ∝ 1/rank^1.2. How many distinct experts a batch of independent rows meets depends only on how often each
expert is chosen, so a router whose logits are a bias and unit normal noise meets as many, if its biases choose each
expert as often.
"""

from __future__ import annotations

import functools
import statistics

import numpy as np

UNIFORM, SKEWED = "uniform", "skewed"
SKEW = 1.2  # experts drawn with probability ∝ 1/rank^1.2: the skewed routing that vLLM was measured with
ROUTINGS = (UNIFORM, SKEWED)
TOLERANCE = 0.02  # of the number of distinct experts; beyond it a measurement does not count
_DRAWS = 10_000
_ROUNDS = 12
_quantile = np.vectorize(statistics.NormalDist().inv_cdf)


def _chosen_share(scores: np.ndarray, chosen: int) -> np.ndarray:
    """[E], how often each expert is among the `chosen` largest of scores [draws, E]."""
    best = np.argpartition(-scores, chosen - 1, axis=1)[:, :chosen]
    return np.bincount(best.reshape(-1), minlength=scores.shape[1]) / len(scores)


@functools.cache
def shares(experts: int, chosen: int, routing: str) -> np.ndarray:
    """[E], the probability that a row chooses each expert, the most popular first.

    Raises:
      ValueError: `routing` is not one of ROUTINGS.
    """
    if routing == UNIFORM:
        return np.full(experts, chosen / experts)
    if routing != SKEWED:
        raise ValueError(f"routing is {UNIFORM} or {SKEWED}, not {routing}")
    # The largest of log p + Gumbel noise are a draw without replacement.
    gumbel = np.random.default_rng(1).gumbel(size=(_DRAWS, experts))
    return _chosen_share((gumbel - SKEW * np.log(np.arange(1, experts + 1))).astype(np.float32), chosen)


def distinct(experts: int, chosen: int, routing: str, rows: int) -> float:
    """Expected number of distinct experts that `rows` independent rows choose."""
    return float(np.sum(1 - (1 - shares(experts, chosen, routing)) ** rows))


@functools.cache
def biases(experts: int, chosen: int, routing: str) -> np.ndarray:
    """[E], the bias of each expert's logit in units of the noise's deviation, the most popular expert first.

    The threshold of being chosen stays where it is without biases, so that router weights keep their size.
    """
    wanted = shares(experts, chosen, routing)
    if routing == UNIFORM or chosen == experts:
        return np.zeros(experts)
    floor = 0.5 / _DRAWS
    wanted = np.clip(wanted, floor, 1 - floor)
    noise = np.random.default_rng(2).standard_normal((_DRAWS, experts), np.float32)
    threshold = -_quantile(chosen / experts)
    bias = (threshold + _quantile(wanted)).astype(np.float32)
    for _ in range(_ROUNDS):
        found = np.clip(_chosen_share(noise + bias, chosen), floor, 1 - floor)
        bias += (0.7 * (_quantile(wanted) - _quantile(found))).astype(np.float32)
    # A common shift changes no choice.
    few = noise[: _DRAWS // 10]
    selected = np.partition(few + bias, -chosen, axis=1)[:, -chosen].mean()
    usual = np.partition(few, -chosen, axis=1)[:, -chosen].mean()
    return bias - selected + usual

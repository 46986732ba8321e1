"""Log-probabilities of drawn tokens and of their likeliest alternatives.

They are the log-softmax of the logits after `adjust` and before temperature, top-k, top-p and min-p: what the request's
penalties, bias and grammar make of the model, not what its randomness does. OpenAI's reference leaves the choice open.
vLLM names the alternatives logprobs_mode: its default, raw_logprobs, is this without penalties and bias, and its
processed_logprobs would divide by the temperature and truncate too.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .layers import Array
from .sampling import MAX_LOGPROBS


class Logprobs(NamedTuple):
    """Of one drawn token."""

    logprob: float  # natural logarithm
    top: tuple[tuple[int, float], ...]  # (token, logprob), the likeliest first; fewer than asked for where others are
    # impossible

    @classmethod
    def of(cls, logprob: float, tokens: np.ndarray, values: np.ndarray) -> Logprobs:
        """From a row of `TopLogprobs`, cut to as many alternatives as were asked for."""
        pairs = zip(tokens.tolist(), values.tolist(), strict=True)
        return cls(float(logprob), tuple((token, value) for token, value in pairs if value > -np.inf))


class TopLogprobs(NamedTuple):
    """Of S rows. MAX_LOGPROBS alternatives, or V where the vocabulary is smaller: m."""

    chosen: Array  # [S] float32
    tokens: Array  # [S, m] int32, the likeliest first and of equal ones the lowest
    values: Array  # [S, m] float32


def top_logprobs(logits: Array, chosen: Array) -> TopLogprobs:
    """Log-probabilities of the chosen tokens and of the likeliest ones.

    Args:
      logits: [S, V] float32.
      chosen: [S] int32; −1 gives anything.
    """
    largest = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True))
    values, tokens = jax.lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[-1]))
    of_chosen = jnp.take_along_axis(logits, jnp.maximum(chosen, 0)[:, None], axis=-1)
    return TopLogprobs(((of_chosen - largest) - total)[:, 0], tokens, (values - largest) - total)

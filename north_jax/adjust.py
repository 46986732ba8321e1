"""What changes logits before a token is drawn: penalties, bias, and the tokens that a grammar allows.

In this order, on float32:

1. repetition_penalty r (Keskar et al., CTRL; as Transformers and vLLM): the logit x of a token of the prompt or
   generated so far becomes x / r where x > 0, and x · r otherwise;
2. x − (count · frequency_penalty + presence_penalty) for tokens generated count > 0 times (OpenAI's definition, in
   which the prompt does not count);
3. logit_bias is added. It comes last, so that ±100 bans or forces a token whatever the penalties say;
4. what the mask does not allow becomes −infinity.

NaN and +infinity stay as they are: a fault of the model is not hidden. Each part may be absent, which costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from .layers import Array
from .sampling import SamplingParams

PROMPT_SEEN = 1 << 30  # bit of an entry of counts: the token is in the prompt; the bits below count how often generated
_LEAST_BIASES = 32  # columns of a Bias; more take the next power of two, so that few shapes are compiled


class Penalties(NamedTuple):
    """Penalties of S rows, and what they look at."""

    presence: Array | np.ndarray  # [S] float32
    frequency: Array | np.ndarray  # [S] float32
    repetition: Array | np.ndarray  # [S] float32
    counts: Array  # [S, V] int32, see `count`; anything in rows whose penalties are neutral

    @classmethod
    def of(cls, params: Sequence[SamplingParams], counts: Array) -> Penalties:
        """Host arrays for one SamplingParams a row, beside `counts` as they are."""
        return cls(
            np.array([p.presence_penalty for p in params], np.float32),
            np.array([p.frequency_penalty for p in params], np.float32),
            np.array([p.repetition_penalty for p in params], np.float32),
            counts,
        )


class Bias(NamedTuple):
    """Sparse biases of S rows."""

    tokens: Array | np.ndarray  # [S, n] int32; V or more for none
    values: Array | np.ndarray  # [S, n] float32

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocabulary: int) -> Bias | None:
        """Host arrays for one SamplingParams a row, None where no row has a bias."""
        most = max((len(p.logit_bias) for p in params), default=0)
        if most == 0:
            return None
        columns = max(_LEAST_BIASES, 1 << (most - 1).bit_length())
        tokens = np.full((len(params), columns), vocabulary, np.int32)
        values = np.zeros((len(params), columns), np.float32)
        for row, p in enumerate(params):
            for column, (token, value) in enumerate(p.logit_bias):
                tokens[row, column], values[row, column] = token, value
        return cls(tokens, values)


def count(prompt: Sequence[int] | np.ndarray, generated: Sequence[int], vocabulary: int) -> np.ndarray:
    """How often each token was generated, with PROMPT_SEEN set in those of the prompt: [vocabulary] int32."""
    counts = np.bincount(np.asarray(generated, np.int64), minlength=vocabulary).astype(np.int32)
    counts[np.asarray(prompt, np.int64)] |= PROMPT_SEEN
    return counts


def mask_words(vocabulary: int) -> int:
    """uint32 words of a mask: bit i % 32 of word i // 32 allows token i (the layout of llguidance and XGrammar)."""
    return -(-vocabulary // 32)


def adjust(
    logits: Array, *, penalties: Penalties | None = None, bias: Bias | None = None, mask: Array | None = None
) -> Array:
    """Applies what is given, in the order above.

    Args:
      logits: [S, V] float32.
      penalties: of the rows.
      bias: of the rows.
      mask: [S, mask_words(V)] uint32, all ones in a row without a grammar.

    Returns:
      [S, V] float32.
    """
    if penalties is not None:
        logits = _penalise(logits, penalties)
    if bias is not None:
        rows = jnp.arange(len(logits))[:, None]
        logits = logits.at[rows, bias.tokens].add(jnp.asarray(bias.values), mode="drop")
    if mask is not None:
        bits = jnp.asarray(mask)[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
        allowed = bits.reshape(len(logits), -1)[:, : logits.shape[-1]] > 0
        logits = jnp.where(allowed | ~(logits < jnp.inf), logits, -jnp.inf)
    return logits


def _penalise(logits: Array, penalties: Penalties) -> Array:
    presence, frequency, repetition = (jnp.asarray(x)[:, None] for x in penalties[:3])
    seen = penalties.counts > 0
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen & (repetition != 1), repeated, logits)
    generated = penalties.counts & (PROMPT_SEEN - 1)
    penalty = generated.astype(jnp.float32) * frequency + presence
    return jnp.where((generated > 0) & ((frequency != 0) | (presence != 0)), logits - penalty, logits)

"""Sampling: what a request asks for, and the draw of a whole batch on the device.

First `adjust.adjust` changes logits as penalties, bias and a grammar say, and `logprobs.top_logprobs` reports on the
result. What follows is here: temperature, then top-k, then top-p and min-p over what top-k left. The draw inverts the
CDF in token order, first over blocks of tokens and then within one, with two uniform numbers per row and position, so a
row's tokens depend on its own seed, position and logits alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .layers import Array

DRAW_BLOCK = 512  # tokens drawn from in the second step of a draw
MAX_BIASES = 300  # tokens of one request's logit_bias, as many as OpenAI takes
MAX_LOGPROBS = 20  # alternatives reported for one token, likewise
_GROUPS = 32  # of a sum in a fixed order: lanes of a warp
_COLDEST, _HOTTEST = 1e-30, 1e30  # beyond them a draw is as greedy or flat, but 1 / temperature may leave float32


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request draws its tokens.

    Attributes:
      temperature: 0 for greedy; logits are divided by it otherwise.
      top_k: keep the k likeliest tokens; 0 keeps all.
      top_p: keep the smallest set of likeliest tokens whose probability reaches top_p; 1 keeps all.
      min_p: keep tokens at least min_p times as likely as the likeliest; 0 keeps all.
      seed: 64 bits; the same seed draws the same tokens.
      presence_penalty: taken once from the logit of every token generated so far; −2 to 2, 0 for none.
      frequency_penalty: taken from the logit of a token as often as it was generated; −2 to 2, 0 for none.
      repetition_penalty: divides the positive and multiplies the other logits of tokens that the prompt or the text so
        far holds; > 0, 1 for none.
      logit_bias: (token, bias) pairs of different tokens, at most MAX_BIASES; each bias, −100 to 100, is added to the
        token's logit.
      logprobs: how many alternatives to report with the log-probability of each token, 0 to MAX_LOGPROBS; None reports
        nothing.

    Raises:
      ValueError: a value is out of range; the message names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a finite number >= 0, got {self.temperature}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be >= 0 (0 keeps all), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} must be in [-2, 2], got {getattr(self, name)}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty must be a finite number > 0, got {self.repetition_penalty}")
        if len(self.logit_bias) > MAX_BIASES:
            raise ValueError(f"logit_bias must name at most {MAX_BIASES} tokens, got {len(self.logit_bias)}")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError("logit_bias must name each token once")
        for token, bias in self.logit_bias:
            if token < 0 or not -100 <= bias <= 100:
                raise ValueError(f"logit_bias must give tokens >= 0 values in [-100, 100], got {token}: {bias}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs must be in [0, {MAX_LOGPROBS}], got {self.logprobs}")

    @property
    def penalises(self) -> bool:
        """Whether a token's logit depends on what was said before: the row needs its `TokenHistory`."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


class SamplingBatch(NamedTuple):
    """`SamplingParams` of S slots as arrays."""

    temperature: Array | np.ndarray  # [S] float32
    top_k: Array | np.ndarray  # [S] int32
    top_p: Array | np.ndarray  # [S] float32
    min_p: Array | np.ndarray  # [S] float32
    seed: Array | np.ndarray  # [S, 2] uint32: high word, low word

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> SamplingBatch:
        """Host arrays for one SamplingParams a slot."""
        words = [((p.seed >> 32) & 0xFFFFFFFF, p.seed & 0xFFFFFFFF) for p in params]
        return cls(
            np.array([p.temperature and min(max(p.temperature, _COLDEST), _HOTTEST) for p in params], np.float32),
            np.array([p.top_k for p in params], np.int32),
            np.array([p.top_p for p in params], np.float32),
            np.array([p.min_p for p in params], np.float32),
            np.array(words, np.uint32).reshape(-1, 2),
        )


def sample(logits: Array, batch: SamplingBatch, positions: Array) -> Array:
    """Draws one token a row.

    Args:
      logits: [S, V] float32.
      batch: the rows' parameters.
      positions: [S] int32, the position the token will take: with the seed it fixes the random number.

    Returns:
      [S] int32. Greedy rows take the lowest token among equal maxima. A row whose logits hold NaN or +infinity, or
      nothing above −infinity, gives −1.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawing = jnp.asarray(batch.temperature) > 0
    token = jax.lax.cond(
        jnp.any(drawing), lambda: jnp.where(drawing, _draw(logits, batch, positions), greedy), lambda: greedy
    )
    return jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), token, -1)


def _draw(logits: Array, batch: SamplingBatch, positions: Array) -> Array:
    temperature = jnp.asarray(batch.temperature)[:, None]
    below = logits - jnp.max(logits, axis=-1, keepdims=True)  # before the division, which a logit may overflow
    weights = jnp.exp(below / jnp.where(temperature > 0, temperature, 1))  # the likeliest token has weight 1
    filtered = jnp.any(jnp.asarray(batch.top_k) > 0) | jnp.any(jnp.asarray(batch.top_p) < 1) | jnp.any(batch.min_p > 0)
    weights = jax.lax.cond(filtered, lambda: _filter(weights, batch), lambda: weights)
    keys = jax.random.wrap_key_data(jnp.asarray(batch.seed), impl="threefry2x32")
    fold = jax.vmap(lambda key, position: jax.random.uniform(jax.random.fold_in(key, position), (2,), jnp.float32))
    uniform = fold(keys, positions)  # [S, 2]
    # A float32 uniform has 2^23 values, too few to tell 2^18 tokens apart evenly: two of them choose in two steps.
    blocks = jnp.pad(weights, ((0, 0), (0, -weights.shape[-1] % DRAW_BLOCK)))
    blocks = blocks.reshape(len(weights), -1, DRAW_BLOCK)
    block = _pick(_block_sums(blocks), uniform[:, 0])  # [S]
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # [S, DRAW_BLOCK]
    return block * DRAW_BLOCK + _pick(within, uniform[:, 1])


def _block_sums(blocks: Array) -> Array:
    """Sums of blocks [S, n, DRAW_BLOCK] in the order of all implementations: [S, n].

    As a warp adds them: entry i belongs to lane i mod 32, each lane adds its entries in order, and then halves of the
    lanes are added.
    """
    lanes = blocks.reshape(*blocks.shape[:2], -1, _GROUPS)
    sums = functools.reduce(jnp.add, (lanes[:, :, i] for i in range(lanes.shape[2])))
    half = _GROUPS // 2
    while half:
        sums, half = sums[..., :half] + sums[..., half : 2 * half], half // 2
    return sums[..., 0]


def _running_sums(weights: Array) -> Array:
    """Running sums over the last axis of weights [S, n], likewise in a fixed order: [S, n].

    The entries are cut into 32 groups that follow each other. Each adds its own in order, and the sum of those before
    it, which were added in order too. So the sums never fall, and the last is the total.
    """
    rows, n = weights.shape
    each = -(-n // _GROUPS)
    groups = jnp.pad(weights, ((0, 0), (0, _GROUPS * each - n))).reshape(rows, _GROUPS, each)

    def add(total: Array, one: Array) -> tuple[Array, Array]:
        total = total + one
        return total, total

    zero = jnp.zeros((rows, _GROUPS), weights.dtype)
    ends, running = jax.lax.scan(add, zero, jnp.moveaxis(groups, 2, 0), unroll=min(each, 64))
    _, after = jax.lax.scan(add, zero[:, 0], jnp.moveaxis(ends, 1, 0), unroll=True)
    before = jnp.concatenate([zero[:, :1], jnp.moveaxis(after, 0, 1)[:, :-1]], axis=1)
    return (before[:, :, None] + jnp.moveaxis(running, 0, 2)).reshape(rows, -1)[:, :n]


def _pick(weights: Array, uniform: Array) -> Array:
    """The first entry of weights [S, n] at which their sum exceeds uniform [S] of the total: [S] int32."""
    cumulative = _running_sums(weights)
    beyond = (cumulative > uniform[:, None] * cumulative[:, -1:]) & (weights > 0)
    return jnp.argmax(beyond, axis=-1).astype(jnp.int32)  # uniform is below 1, so there is one


def _filter(weights: Array, batch: SamplingBatch) -> Array:
    """Zeroes the weights [S, V] that top-k, top-p or min-p exclude; ties are ranked by token."""
    vocabulary = weights.shape[-1]
    order = jnp.argsort(-weights, axis=-1, stable=True)
    ranked = jnp.take_along_axis(weights, order, axis=-1)
    top_k = jnp.asarray(batch.top_k)[:, None]
    rank = jnp.arange(vocabulary)[None]
    ranked = jnp.where((rank < top_k) | (top_k == 0), ranked, 0)
    before = jnp.cumsum(ranked, axis=-1) - ranked  # weight of the likelier tokens
    top_p = jnp.asarray(batch.top_p)[:, None]
    keep = (before < top_p * jnp.sum(ranked, axis=-1, keepdims=True)) | (top_p >= 1)
    keep = (keep & (ranked >= jnp.asarray(batch.min_p)[:, None] * ranked[:, :1])) | (rank == 0)
    kept = jnp.where(keep, ranked, 0)
    return jnp.put_along_axis(jnp.zeros_like(weights), order, kept, axis=-1, inplace=False)

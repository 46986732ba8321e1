"""What each operation of a step computes, in float64 on the host: plain formulas over what it was given.

Independent of `layers`, `attention` and `moe`, which are measured beside it. B rows; other letters as in DESIGN.md,
"Parameters".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from north_jax.config import Config
from north_jax.kv_cache import PAGE_SIZE
from north_jax.layers import Params
from north_jax.megakernel.division import attention_splits

_EVERY = 16  # rows of the vocabulary of which one is looked at: those of a tile
_FEW = 4096  # rows of a vocabulary that is looked at as a whole


def f64(values: Any) -> np.ndarray:
    return np.asarray(values).astype(np.float64)


class HostWeights:
    """Weights in float64, each fetched when it is first asked for, and kept: 37 MB an expert of North's."""

    def __init__(self, params: Params, layer: int) -> None:
        self._params, self._layer = params, params["layers"][layer]
        self._kept: dict[tuple[str, int | None], np.ndarray] = {}
        self.vocabulary = looked_at(params["embed"].shape[0])

    def of_layer(self, name: str, expert: int | None = None) -> np.ndarray:
        """A weight of the layer, or of one of its experts, in its own shape."""
        if (name, expert) not in self._kept:
            held = (self._layer if name in self._layer else self._layer["mlp"])[name]
            self._kept[name, expert] = f64(held if expert is None else held[expert])
        return self._kept[name, expert]

    def final_norm(self) -> np.ndarray:
        """[D]."""
        return f64(self._params["final_norm"])

    def head(self) -> np.ndarray:
        """[rows of `vocabulary`, D]."""
        if ("embed", None) not in self._kept:
            self._kept["embed", None] = f64(self._params["embed"][self.vocabulary])
        return self._kept["embed", None]

    def embedding(self, tokens: np.ndarray) -> np.ndarray:
        """tokens [B] → [B, D]."""
        return f64(self._params["embed"][tokens])


def looked_at(vocabulary: int) -> np.ndarray:
    """Tokens whose logits are compared: one of every tile of the head, or all of a small vocabulary."""
    if vocabulary <= _FEW:
        return np.arange(vocabulary)
    tile = np.arange(-(-vocabulary // _EVERY))
    return np.minimum(tile * _EVERY + tile * 7 % _EVERY, vocabulary - 1)


def norm(config: Config, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [..., D] → [..., D]."""
    if config.norm_type == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + config.norm_eps) * weight


def project_qkv(config: Config, layer: int, h: np.ndarray, weight: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """h [B, D], positions [B] → [B, H + 2K, d]: queries, keys, values, rotated where the layer does."""
    d, rotated = config.head_dim, config.num_attention_heads + config.num_key_value_heads
    heads = (h @ weight.T).reshape(len(h), -1, d)
    if config.rope_layers[layer]:
        angle = positions[:, None] * config.rope_theta ** (-np.arange(0, d, 2) / d)  # [B, d/2]
        pairs = (heads[:, :rotated, 0::2] + 1j * heads[:, :rotated, 1::2]) * np.exp(1j * angle)[:, None]
        heads[:, :rotated, 0::2], heads[:, :rotated, 1::2] = pairs.real, pairs.imag
    return heads


def attention(
    config: Config,
    qkv: np.ndarray,
    pool: np.ndarray,
    table: np.ndarray,
    positions: Sequence[int],
    window: int | None,
) -> np.ndarray:
    """Attention to the pages and to the new token.

    Args:
      config: the model's configuration.
      qkv: [B, H + 2K, d], of the new tokens.
      pool: [pages, 2, K, PAGE_SIZE, d], of any type.
      table: [B, entries] int32.
      positions: of the new tokens.
      window: keys a query sees, its own included; None for all.

    Returns:
      [B, H, d].
    """
    heads, kv_heads, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    out = np.empty((len(qkv), heads, d))
    for row, position in enumerate(positions):
        first = max(position + 1 - window, 0) if window else 0
        q, k, v = np.split(qkv[row], [heads, heads + kv_heads])
        if first < position:
            pages = np.arange(first // PAGE_SIZE, (position - 1) // PAGE_SIZE + 1)
            held = f64(pool[table[row, pages % table.shape[1]]])  # [pages, 2, K, PAGE_SIZE, d]
            held = np.moveaxis(held, 0, 2).reshape(2, kv_heads, -1, d)
            held = held[:, :, first - pages[0] * PAGE_SIZE : position - pages[0] * PAGE_SIZE]
            k, v = (np.concatenate([old, new[:, None]], axis=1) for old, new in zip(held, (k, v), strict=True))
        else:
            k, v = k[:, None], v[:, None]
        scores = q.reshape(kv_heads, -1, d) @ np.swapaxes(k, 1, 2) / np.sqrt(d)  # [K, H/K, keys]
        out[row] = (_softmax(scores) @ v).reshape(heads, d)
    return out


def fold(
    partial: np.ndarray, stats: np.ndarray, positions: Sequence[int], window: int | None, base: float
) -> np.ndarray:
    """The splits of attention put together.

    Args:
      partial: [B, K, MAX_SPLITS, H/K, d], sums that are not normalised.
      stats: [B, K, MAX_SPLITS, H/K, 2]: logarithm to `base` of the unit of a split's sums, and the sum of its weights.
      positions: of the new tokens.
      window: keys a query sees; None for all.
      base: e or 2.

    Returns:
      [B, H, d].
    """
    out = np.empty((len(partial), partial.shape[1] * partial.shape[3], partial.shape[4]))
    for row, position in enumerate(positions):
        number = attention_splits(position, window or 0).number
        most, total = np.moveaxis(stats[row, :, :number], -1, 0)  # [K, splits, H/K]
        factor = base ** (most - most.max(axis=1, keepdims=True))
        sums = np.sum(factor[..., None] * partial[row, :, :number], axis=1)
        out[row] = (sums / np.sum(factor * total, axis=1)[..., None]).reshape(out.shape[1:])
    return out


def route(config: Config, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Router logits [B, E] → experts [B, k], the largest logit first and of equal ones the first; weights [B, k]."""
    experts = np.argsort(-logits, axis=1, kind="stable")[:, : config.num_experts_per_tok]
    chosen = np.take_along_axis(logits, experts, axis=1)
    if config.expert_selection_fn == "softmax":
        return experts, _softmax(chosen)
    weights = 1 / (1 + np.exp(-chosen))
    return experts, weights / weights.sum(axis=1, keepdims=True) if config.norm_topk_prob else weights


def hidden_units(h: np.ndarray, gate_up: np.ndarray) -> np.ndarray:
    """silu(gate) · up: h [..., D], gate_up [2F, D] → [..., F]."""
    gate, up = np.split(h @ gate_up.T, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def expert_units(h: np.ndarray, experts: np.ndarray, weights: HostWeights) -> np.ndarray:
    """Each row's experts' hidden units, without the router's weights: h [B, D], experts [B, k] → [B, k, I]."""
    out = np.empty((*experts.shape, weights.of_layer("down", int(experts.flat[0])).shape[1]))
    for expert in np.unique(experts):
        row, place = np.nonzero(experts == expert)
        out[row, place] = hidden_units(h[row], weights.of_layer("gate_up", int(expert)))
    return out


def experts_down(hidden: np.ndarray, experts: np.ndarray, weights: HostWeights) -> np.ndarray:
    """The sum of what each row's experts make of their hidden units [B, k, I]: [B, D]."""
    out = np.zeros((len(hidden), weights.of_layer("down", int(experts.flat[0])).shape[0]))
    for expert in np.unique(experts):
        row, place = np.nonzero(experts == expert)
        out[row] += hidden[row, place] @ weights.of_layer("down", int(expert)).T
    return out


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)

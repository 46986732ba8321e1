"""Rows with known results: float32 on the same rounded weights, and what JAX makes of them in the weights' own type.

Where two experts are nearly equal, rounding decides which one runs, and two correct decoders differ by an expert. Rows
can be chosen among many so that this does not happen: all their routing margins are wide, and JAX in the weights' type
chooses the same experts as float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np

from north_jax.config import Config
from north_jax.kv_cache import KVCache
from north_jax.layers import Array, Params

from .layerwise import layers, logits
from .shared_pages import Row, SharedPages

CANDIDATES = 32  # rows of a pass; one size, so that one pass is compiled
MARGIN = 0.015  # between the last expert chosen and the next, in units of the router logits' deviation
_PASSES = 8


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What a decoder makes of one row.

    Attributes:
      logits: depth → float32 [V], the head's over that many layers.
      written: float32 [layers, 2 (k, v), K, d].
    """

    logits: dict[int, np.ndarray]
    written: np.ndarray


@dataclasses.dataclass(frozen=True)
class Reference:
    """A row, what it is exactly, and what JAX makes of it."""

    row: Row
    exact: Outputs
    theirs: Outputs


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One pass of CANDIDATES rows."""

    outputs: dict[int, Array]  # depth → [N, D]
    written: np.ndarray  # [layers, N, 2, K, d]
    experts: np.ndarray  # [layers with experts, N, k]
    margins: np.ndarray  # [N], the least of all layers

    def of(self, number: int, heads: dict[int, np.ndarray]) -> Outputs:
        return Outputs({depth: head[number] for depth, head in heads.items()}, self.written[:, number])


def references(
    config: Config,
    params: Params,
    cache: KVCache,
    pages: SharedPages,
    context: int,
    *,
    depths: Collection[int],
    wanted: int,
    same_experts: bool,
) -> list[Reference]:
    """Finds rows and their results.

    Args:
      config: the model's configuration, or a longer one's; see `layerwise.layers`.
      params: DESIGN.md, "Parameters".
      cache: pages of `pages`; not changed.
      pages: gives the rows' tables, for CANDIDATES rows of this context.
      context: positions that the rows hold.
      depths: numbers of layers after which logits are wanted.
      wanted: rows; fewer come where `same_experts` finds no more.
      same_experts: only rows whose choice of experts rounding does not touch.
    """
    rng = np.random.default_rng(context)
    found: dict[int, Reference] = {}
    for _ in range(_PASSES):
        rows = [Row(context, number, int(rng.integers(config.vocab_size))) for number in range(CANDIDATES)]
        exact = _run(config, params, cache, pages, rows, depths, jnp.float32)
        theirs = _run(config, params, cache, pages, rows, depths, params["embed"].dtype)
        good = np.ones(CANDIDATES, bool)
        if same_experts:
            good = (exact.margins > MARGIN) & (exact.experts == theirs.experts).all(axis=(0, 2))
        new = [int(number) for number in np.flatnonzero(good) if number not in found][: wanted - len(found)]
        if new:
            heads, their_heads = (
                {depth: np.asarray(logits(config, params, x)) for depth, x in run.outputs.items()}
                for run in (exact, theirs)
            )
        for number in new:
            found[number] = Reference(rows[number], exact.of(number, heads), theirs.of(number, their_heads))
        if len(found) == wanted:
            break
    return list(found.values())


def _run(
    config: Config,
    params: Params,
    cache: KVCache,
    pages: SharedPages,
    rows: list[Row],
    depths: Collection[int],
    dtype: Any,
) -> _Pass:
    tokens = np.array([[row.token] for row in rows], np.int32)
    start = np.array([row.context for row in rows], np.int32)
    tables = pages.tables(rows, len(rows))
    outputs: dict[int, Array] = {}
    written, experts, margins = [], [], []
    for number, layer in enumerate(layers(config, params, cache, tables, tokens, start, np.ones_like(start), dtype)):
        if number + 1 in depths:
            outputs[number + 1] = layer.output[:, 0]
        written.append(np.asarray(jnp.stack([layer.keys[:, 0], layer.values[:, 0]], axis=1), np.float32))
        if layer.experts is not None and layer.router_logits is not None:
            experts.append(np.asarray(layer.experts)[:, 0])
            margins.append(_margin(np.asarray(layer.router_logits)[:, 0], config.num_experts_per_tok))
    none = np.zeros((0, len(rows), 1), np.int32)
    return _Pass(
        outputs,
        np.stack(written),
        np.stack(experts) if experts else none,
        np.min(margins, axis=0) if margins else np.full(len(rows), np.inf),
    )


def _margin(router_logits: np.ndarray, chosen: int) -> np.ndarray:
    """[N], how far the last expert chosen is above the first one not, of router_logits [N, E]."""
    ranked = -np.sort(-router_logits, axis=1)
    if chosen == ranked.shape[1]:
        return np.full(len(ranked), np.inf)
    return ranked[:, chosen - 1] - ranked[:, chosen]

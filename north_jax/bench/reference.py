"""Rows with known results: float32 on the same rounded weights, and what JAX makes of them in the weights' own type.

Where two experts are nearly equal, rounding decides which one runs, and two correct decoders differ by an expert. So
rows are chosen among many: those whose experts are least in doubt, given how far JAX's own router logits are from the
exact ones in every layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np

from north_jax.config import Config
from north_jax.kv_cache import KVCache
from north_jax.layers import Array, Params

from .layerwise import layers, logits
from .shared_pages import Row, SharedPages

CANDIDATES = 64  # rows of a pass; one size, so that one pass is compiled
DOUBT = 0.01  # expected number of experts chosen otherwise: a row below it is beyond doubt
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
    experts: np.ndarray  # [layers with experts, N, k], ascending
    router_logits: np.ndarray  # [layers with experts, N, E]

    def of(self, number: int, heads: dict[int, np.ndarray]) -> Outputs:
        """One row's; copies, so that the others' need not be kept."""
        logits_of_row = {depth: head[number].copy() for depth, head in heads.items()}
        return Outputs(logits_of_row, self.written[:, number].copy())


def references(
    config: Config,
    params: Params,
    cache: KVCache,
    pages: SharedPages,
    context: int,
    *,
    depths: Collection[int],
    wanted: int,
    beyond_doubt: bool,
) -> list[Reference]:
    """Finds rows and their results.

    Args:
      config: the model's configuration, or a longer one's; see `layerwise.layers`.
      params: DESIGN.md, "Parameters".
      cache: pages of `pages`; not changed.
      pages: gives the rows' tables, for CANDIDATES rows of this context.
      context: positions that the rows hold.
      depths: numbers of layers after which logits are wanted.
      wanted: rows; fewer come where no more are beyond doubt.
      beyond_doubt: only rows whose experts rounding does not touch; otherwise those least in doubt of one pass.
    """
    rng = np.random.default_rng(context)
    found: dict[int, Reference] = {}
    for _ in range(_PASSES):
        rows = [Row(context, number, int(rng.integers(config.vocab_size))) for number in range(CANDIDATES)]
        exact = _run(config, params, cache, pages, rows, depths, jnp.float32)
        theirs = _run(config, params, cache, pages, rows, depths, params["embed"].dtype)
        doubts = doubt(exact.router_logits, theirs.router_logits, config.num_experts_per_tok)
        same = (exact.experts == theirs.experts).all(axis=(0, 2))
        order = np.argsort(doubts, kind="stable").tolist()
        good = [number for number in order if not beyond_doubt or (same[number] and doubts[number] < DOUBT)]
        new = [number for number in good if number not in found][: wanted - len(found)]
        if new:
            heads, their_heads = (
                {depth: np.asarray(logits(config, params, x)) for depth, x in run.outputs.items()}
                for run in (exact, theirs)
            )
        for number in new:
            found[number] = Reference(rows[number], exact.of(number, heads), theirs.of(number, their_heads))
        if len(found) == wanted or not beyond_doubt:
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
    written, experts, router_logits = [], [], []
    for number, layer in enumerate(layers(config, params, cache, tables, tokens, start, np.ones_like(start), dtype)):
        if number + 1 in depths:
            outputs[number + 1] = layer.output[:, 0]
        written.append(np.asarray(jnp.stack([layer.keys[:, 0], layer.values[:, 0]], axis=1), np.float32))
        if layer.experts is not None and layer.router_logits is not None:
            experts.append(np.asarray(layer.experts)[:, 0])
            router_logits.append(np.asarray(layer.router_logits)[:, 0])
    return _Pass(
        outputs,
        np.stack(written),
        np.array(experts, np.int32).reshape(len(experts), len(rows), config.num_experts_per_tok),
        np.array(router_logits, np.float32).reshape(len(experts), len(rows), config.num_experts),
    )


def doubt(exact: np.ndarray, theirs: np.ndarray, chosen: int) -> np.ndarray:
    """[N], the expected number of layers in which errors as large as theirs change the last expert chosen.

    Args:
      exact, theirs: [layers, N, E], router logits.
      chosen: experts of a token.
    """
    if chosen == exact.shape[2]:
        return np.zeros(exact.shape[1])
    ranked = -np.sort(-exact, axis=2)
    margin = ranked[:, :, chosen - 1] - ranked[:, :, chosen]
    error = np.sqrt(np.mean(np.square(theirs - exact), axis=2)) + 1e-12
    return np.sum(0.5 * _erfc(margin / (2 * error)), axis=0)


_erfc = np.vectorize(math.erfc, otypes=[float])

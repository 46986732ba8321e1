"""Rows with known results: float32 on the same rounded weights, and what JAX makes of them in the weights' own type.

Where two experts are nearly equal, rounding decides which one runs, and two correct decoders differ by an expert. So
rows are chosen among many: those whose experts are least in doubt, given how far JAX's own router logits are from the
exact ones in every layer. And where a decoder has run other experts all the same, it is held against float32 with
those: what is left is rounding, and `gaps` says how near a tie each of its choices was.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
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
_LEAST = 1e-6  # of router logits' rms: a yardstick below it is that of float32's own rounding


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
    """A row, what it is exactly, and what JAX makes of it in the weights' type.

    Attributes:
      row: the row.
      exact: in float32.
      theirs: JAX's.
      their_exact: in float32 with the experts that JAX ran.
      their_gaps: [layers with experts], `gaps` of those in yardsticks.
      yardsticks: [layers with experts], how far JAX's router logits are from exact ones, rms over a pass.
    """

    row: Row
    exact: Outputs
    theirs: Outputs
    their_exact: Outputs
    their_gaps: np.ndarray
    yardsticks: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One pass of N rows."""

    outputs: dict[int, Array]  # depth → [N, D]
    written: np.ndarray  # [layers, N, 2, K, d]
    experts: np.ndarray  # [layers with experts, N, k], ascending
    router_logits: np.ndarray  # [layers with experts, N, E]

    def heads(self, config: Config, params: Params) -> dict[int, np.ndarray]:
        """depth → logits [N, V]."""
        return {depth: np.asarray(logits(config, params, x)) for depth, x in self.outputs.items()}

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
            # Rows beyond doubt have run the exact ones.
            their_exact = (
                exact if beyond_doubt else _run(config, params, cache, pages, rows, depths, jnp.float32, theirs.experts)
            )
            yardsticks = _yardsticks(their_exact.router_logits, theirs.router_logits)
            their_gaps = gaps(their_exact.router_logits, theirs.experts) / yardsticks[:, None]
            heads, their_heads, their_exact_heads = (run.heads(config, params) for run in (exact, theirs, their_exact))
        for number in new:
            found[number] = Reference(
                rows[number],
                exact.of(number, heads),
                theirs.of(number, their_heads),
                their_exact.of(number, their_exact_heads),
                their_gaps[:, number],
                yardsticks,
            )
        if len(found) == wanted or not beyond_doubt:
            break
    return list(found.values())


def given_experts(
    config: Config,
    params: Params,
    cache: KVCache,
    pages: SharedPages,
    rows: Sequence[Row],
    experts: np.ndarray,
    *,
    depth: int,
    slots: int,
) -> tuple[list[Outputs], np.ndarray]:
    """What rows are in float32 with the experts that a decoder has run.

    Args:
      config, params, cache, pages: as of `references`.
      rows: at most `slots`.
      experts: int32 [layers with experts, rows, k].
      depth: number of layers after which logits are wanted.
      slots: rows of the pass: one number for all batches, so that one pass is compiled.

    Returns:
      the rows' results, and `gaps` [layers with experts, rows] of the experts.
    """
    idle = ((0, 0), (0, slots - len(rows)), (0, 0))
    found = _run(config, params, cache, pages, rows, [depth], jnp.float32, np.pad(experts, idle), slots)
    heads = found.heads(config, params)
    count = len(rows)
    return [found.of(n, heads) for n in range(count)], gaps(found.router_logits[:, :count], experts)


def gaps(router_logits: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """[layers, N], how far the largest router logit that was not chosen lies above the least one that was.

    0 where the experts are those of the largest logits.

    Args:
      router_logits: [layers, N, E].
      experts: [layers, N, k].
    """
    least = np.take_along_axis(router_logits, experts, axis=2).min(axis=2)
    others = router_logits.copy()
    np.put_along_axis(others, experts, -np.inf, axis=2)
    return np.maximum(others.max(axis=2) - least, 0)


def _yardsticks(exact: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """[layers], the rms distance of router logits [layers, N, E]."""

    def rms_of_layers(values: np.ndarray) -> np.ndarray:
        return np.sqrt(np.mean(np.square(values), axis=(1, 2)))

    return np.maximum(rms_of_layers(theirs - exact), _LEAST * rms_of_layers(exact))


def _run(
    config: Config,
    params: Params,
    cache: KVCache,
    pages: SharedPages,
    rows: Sequence[Row],
    depths: Collection[int],
    dtype: Any,
    experts: np.ndarray | None = None,
    slots: int = CANDIDATES,
) -> _Pass:
    """A pass of `rows` and idle ones up to `slots`; `experts` [layers with experts, slots, k] run where given."""
    tokens = np.zeros((slots, 1), np.int32)
    start, length = np.zeros((2, slots), np.int32)
    tokens[: len(rows), 0] = [row.token for row in rows]
    start[: len(rows)], length[: len(rows)] = [row.context for row in rows], 1
    tables = pages.tables(rows, slots)
    given = None if experts is None else experts[:, :, None]
    outputs: dict[int, Array] = {}
    written, chosen, router_logits = [], [], []
    for number, layer in enumerate(layers(config, params, cache, tables, tokens, start, length, dtype, given)):
        if number + 1 in depths:
            outputs[number + 1] = layer.output[:, 0]
        written.append(np.asarray(jnp.stack([layer.keys[:, 0], layer.values[:, 0]], axis=1), np.float32))
        if layer.experts is not None and layer.router_logits is not None:
            chosen.append(np.asarray(layer.experts)[:, 0])
            router_logits.append(np.asarray(layer.router_logits)[:, 0])
    return _Pass(
        outputs,
        np.stack(written),
        np.array(chosen, np.int32).reshape(len(chosen), slots, config.num_experts_per_tok),
        np.array(router_logits, np.float32).reshape(len(chosen), slots, config.num_experts),
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

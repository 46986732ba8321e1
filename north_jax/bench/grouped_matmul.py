"""Speed of the grouped matmul alone, and of a layer's experts.

    python -m north_jax.bench grouped_matmul --out result.json

--sweep measures every tiling instead of the one that a prefill takes: what the experts' tilings are chosen by.

Three products of the model's geometry: the experts' first one without and with SwiGLU in its epilogue, and the second
one. Assignments fall on experts evenly, or as random routing has it. Every result is held against a dense product.
Beside them stand the dense product of as many rows with one matrix, by XLA, and a layer's experts as a prefill runs
them after the router: rows to their experts, both products, weighted sums.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from north_jax.config import Config
from north_jax.kernels.device import has_cuda, multiprocessors
from north_jax.kernels.grouped_matmul import grouped_matmul
from north_jax.kernels.tiling import Tiling
from north_jax.kernels.work_items import Groups, WorkItems, sort_rows, sorted_rows, work_items
from north_jax.layers import Array, linear
from north_jax.packed.experts import sorted_experts, tilings_for

from .options import add_common
from .record import Results

TILINGS = (
    Tiling(),
    Tiling(cluster=2),
    Tiling(row_warpgroups=1, stages=5, align=8),
    Tiling(row_warpgroups=1, columns=128, stages=8, align=8),
)
PRODUCTS = ("plain", "gated", "down")
ROUTINGS = ("even", "random")
_KEYS = ("kind", "tokens", "product", "assignments", "routing", *(field.name for field in dataclasses.fields(Tiling)))
_MANY = 32768  # assignments, from which on tiles of 128 rows are measured, else those of 64
_CHECKED = 512  # rows of a group
_CALLS = 10  # of a round
_LAYERS = 4  # of experts in a program
_ROUNDS = 3  # the quickest counts
_TOLERANCE = 2e-2  # of the largest value: a result is rounded to bfloat16


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """What is measured at once."""

    product: str
    assignments: int
    routing: str
    tiling: Tiling


def measure(config: Config, case: Case, weights: Array, *, interpret: Any = None) -> dict[str, Any]:
    """Times one product.

    Args:
      config: gives the sizes.
      case: what to measure.
      weights: [E, N, K] of the product.
      interpret: `plgpu.InterpretGPUParams()` to run on a CPU.

    Raises:
      FloatingPointError: a result differs from a dense product's.
    """
    experts, columns, depth = weights.shape
    tiling, gated = case.tiling, case.product == "gated"
    blocks = multiprocessors() if interpret is None else 2
    rows = sorted_rows(case.assignments, experts, tiling)
    groups, work = _listed(_routed(case, experts), experts, tiling, rows, columns, blocks)
    x = jax.random.normal(jax.random.key(1), (rows, depth), jnp.float32).astype(weights.dtype)
    product = partial(_product, tiling=tiling, gated=gated, blocks=blocks, interpret=interpret)
    begun = time.perf_counter()
    error = float(_error(product(x, weights, work), x, weights, groups, gated))
    first = time.perf_counter() - begun
    if not error < _TOLERANCE:
        raise FloatingPointError(f"{case}: the result is off by {error:.3g} of the largest value")
    rounds, calls = (1, 1) if interpret is not None else (_ROUNDS, _CALLS)
    seconds = _time(partial(product, x, weights, work), rounds, calls)
    return {
        "kind": "grouped_matmul",
        **{name: getattr(case, name) for name in ("product", "assignments", "routing")},
        **dataclasses.asdict(tiling),
        "ms": round(seconds * 1e3, 4),
        "tflop_s": round(2 * case.assignments * columns * depth / seconds / 1e12, 1),
        "weights_tb_s": round(weights.nbytes / seconds / 1e12, 3),
        "error": float(f"{error:.3g}"),
        "first_call_s": round(first, 2),
    }


def measure_dense(case: Case, weights: Array) -> dict[str, Any]:
    """Times XLA's product of as many rows with the first group's matrix."""
    columns, depth = weights.shape[1:]
    x = jax.random.normal(jax.random.key(1), (case.assignments, depth), jnp.float32).astype(weights.dtype)
    seconds = _time(partial(jax.jit(linear), x, weights[0]), _ROUNDS, _CALLS)
    return {
        "kind": "dense",
        **{name: getattr(case, name) for name in ("product", "assignments")},
        "ms": round(seconds * 1e3, 4),
        "tflop_s": round(2 * case.assignments * columns * depth / seconds / 1e12, 1),
    }


def measure_experts(config: Config, tokens: int, gate_up: Array, down: Array) -> dict[str, Any]:
    """Times a layer's experts of so many tokens, each with distinct random ones.

    The time is that of one of several in a program, as a prefill has them.
    """
    k = config.num_experts_per_tok
    keys = jax.random.split(jax.random.key(2))
    h = jax.random.normal(keys[0], (tokens, config.hidden_size), jnp.float32).astype(down.dtype)
    weights, experts = jax.lax.top_k(jax.random.uniform(keys[1], (tokens, config.num_experts)), k)
    operands = (h, experts, weights, jnp.ones(tokens, bool), gate_up, down)
    seconds = _time(partial(_several_experts, *operands), _ROUNDS, _CALLS) / _LAYERS
    flops = 6 * tokens * k * config.hidden_size * config.intermediate_size
    return {
        "kind": "experts",
        "tokens": tokens,
        "ms": round(seconds * 1e3, 4),
        "tflop_s": round(flops / seconds / 1e12, 1),
        "weights_tb_s": round((gate_up.nbytes + down.nbytes) / seconds / 1e12, 3),
    }


@jax.jit
def _several_experts(h: Array, experts: Array, weights: Array, valid: Array, gate_up: Array, down: Array) -> Array:
    for _ in range(_LAYERS):
        h = _experts(h, experts, weights, valid, gate_up, down)
    return h


_experts = jax.jit(sorted_experts)  # lowered once


def _routed(case: Case, experts: int) -> Array:
    if case.routing == "even":
        return jnp.arange(case.assignments, dtype=jnp.int32) % experts
    return jnp.asarray(np.random.default_rng(0).integers(0, experts, case.assignments), jnp.int32)


_product = jax.jit(grouped_matmul, static_argnames=("tiling", "gated", "blocks", "interpret"))


@partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _listed(
    expert: Array, experts: int, tiling: Tiling, rows: int, columns: int, blocks: int
) -> tuple[Groups, WorkItems]:
    groups, _ = sort_rows(expert, experts, tiling)
    return groups, work_items(groups, tiling, rows=rows, columns=columns, blocks=blocks // tiling.cluster)


@partial(jax.jit, static_argnums=4)
def _error(result: Array, x: Array, weights: Array, groups: Groups, gated: bool) -> Array:
    """The largest difference from dense products of a few rows of a few groups, relative to the largest value."""
    count = weights.shape[0]
    some = min(_CHECKED, x.shape[0])
    worst = largest = jnp.float32(0)
    for group in sorted({0, count // 3, count - 1}):
        first = jnp.minimum(groups.start[group], x.shape[0] - some)
        number = first + jnp.arange(some) - groups.start[group]
        mine = ((number >= 0) & (number < groups.size[group]))[:, None]
        rows, found = (jax.lax.dynamic_slice_in_dim(array, first, some) for array in (x, result))
        dense = jnp.einsum("rk,nk->rn", rows, weights[group], preferred_element_type=jnp.float32)
        if gated:
            gate, up = jnp.split(dense, 2, axis=-1)
            dense = jax.nn.silu(gate) * up
        difference = jnp.where(mine, found.astype(jnp.float32) - dense, 0)
        worst = jnp.maximum(worst, jnp.max(jnp.abs(difference)))
        largest = jnp.maximum(largest, jnp.max(jnp.where(mine, jnp.abs(dense), 0)))
    return worst / largest  # NaN where no group has rows


def _time(call: Callable[[], Array], rounds: int, calls: int) -> float:
    """Seconds of a call, of several queued one after another, after one that does not count."""
    jax.block_until_ready(call())
    best = float("inf")
    for _ in range(rounds):
        begun = time.perf_counter()
        result = None
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)
        best = min(best, (time.perf_counter() - begun) / calls)
    return best


def _weights(config: Config, product: str) -> Array:
    d_model, width = config.hidden_size, config.intermediate_size
    columns, depth = (d_model, width) if product == "down" else (2 * width, d_model)
    drawn = jax.random.normal(jax.random.key(0), (config.num_experts, columns, depth), jnp.bfloat16)
    return (drawn * depth**-0.5).block_until_ready()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument(
        "--product", choices=PRODUCTS, nargs="+", default=["gated", "down"], help="(default: gated down)"
    )
    parser.add_argument(
        "--assignments",
        type=int,
        nargs="+",
        default=[65536, 1024],
        help="rows (default: 65536 1024, of 8192 and 128 tokens)",
    )
    parser.add_argument("--routing", choices=ROUTINGS, nargs="+", default=list(ROUTINGS), help="(default: both)")
    parser.add_argument("--sweep", action="store_true", help="every tiling, not only the one that a prefill takes")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="*",
        default=[128, 512, 2048, 8192],
        help="of a layer's experts (default: 128 512 2048 8192)",
    )


def run(options: argparse.Namespace) -> None:
    if not has_cuda():
        raise SystemExit("the grouped matmul runs on a GPU; tests/kernels run it on a CPU")
    config = Config.from_json(options.config)
    results = Results(options.out, _KEYS)
    weights = {product: _weights(config, product) for product in {"gated", "down", *options.product}}

    def keep(measured: Callable[[], dict[str, Any]], **key: Any) -> None:
        row = results.find(**dict.fromkeys(_KEYS) | key) or results.add(measured())
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)

    for tokens in options.tokens:
        keep(partial(measure_experts, config, tokens, weights["gated"], weights["down"]), kind="experts", tokens=tokens)
    for product in options.product:
        for assignments in options.assignments:
            taken = tilings_for(assignments, config.num_experts)
            tilings = [taken.down if product == "down" else taken.up]
            if options.sweep:
                tilings = [tiling for tiling in TILINGS if (tiling.rows > 64) == (assignments >= _MANY)]
            cases = [Case(product, assignments, routing, tiling) for tiling in tilings for routing in options.routing]
            key = {"product": product, "assignments": assignments}
            keep(partial(measure_dense, cases[0], weights[product]), kind="dense", **key)
            for case in cases:
                tiling = dataclasses.asdict(case.tiling)
                measured = partial(measure, config, case, weights[product])
                keep(measured, kind="grouped_matmul", **key, routing=case.routing, **tiling)

"""Speed of the grouped matmul alone, by tiling: what the experts' tilings are chosen by.

    python -m north_jax.bench grouped_matmul --out result.json

Three products of the model's geometry: the experts' first one without and with SwiGLU in its epilogue, and the second
one. Assignments fall on experts evenly, or as random routing has it. Every result is held against a dense product.
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
from north_jax.layers import Array

from .options import add_common
from .record import Results

TILINGS = (
    Tiling(),
    Tiling(cluster=2),
    Tiling(stages=3),
    Tiling(columns=128, stages=6),
    Tiling(columns=128, stages=6, cluster=2),
    Tiling(align=8),
    Tiling(row_warpgroups=1, stages=5, align=8),
    Tiling(row_warpgroups=1, columns=128, stages=8, align=8),
    Tiling(row_warpgroups=1, stages=4, align=8, cluster=2),
)
PRODUCTS = ("plain", "gated", "down")
ROUTINGS = ("even", "random")
_KEYS = ("kind", "product", "assignments", "routing", *(field.name for field in dataclasses.fields(Tiling)))
_CALLS = 10  # of a round
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
    groups, _ = sort_rows(_routed(case, experts), experts, tiling)
    work = work_items(groups, tiling, rows=rows, columns=columns, blocks=blocks // tiling.cluster)
    x = jax.random.normal(jax.random.key(1), (rows, depth), jnp.float32).astype(weights.dtype)

    @jax.jit
    def product(x: Array, weights: Array, work: WorkItems) -> Array:
        return grouped_matmul(x, weights, work, tiling, gated=gated, blocks=blocks, interpret=interpret)

    begun = time.perf_counter()
    error = _error(product(x, weights, work), x, weights, groups, gated)
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


def _routed(case: Case, experts: int) -> Array:
    if case.routing == "even":
        return jnp.arange(case.assignments, dtype=jnp.int32) % experts
    return jnp.asarray(np.random.default_rng(0).integers(0, experts, case.assignments), jnp.int32)


def _error(result: Array, x: Array, weights: Array, groups: Groups, gated: bool) -> float:
    """The largest difference from dense products of a few groups, relative to the largest value."""
    worst, largest = 0.0, 0.0
    count = weights.shape[0]
    for group in sorted({0, count // 3, count - 1}):
        first, size = int(groups.start[group]), int(groups.size[group])
        dense = jnp.einsum("rk,nk->rn", x[first : first + size], weights[group], preferred_element_type=jnp.float32)
        if gated:
            gate, up = jnp.split(dense, 2, axis=-1)
            dense = jax.nn.silu(gate) * up
        if size:
            difference = jnp.abs(result[first : first + size].astype(jnp.float32) - dense)
            worst, largest = max(worst, float(jnp.max(difference))), max(largest, float(jnp.max(jnp.abs(dense))))
    return worst / largest if largest else float("nan")


def _time(call: Callable[[], Array], rounds: int, calls: int) -> float:
    """Seconds of a call, of several queued one after another."""
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
    parser.add_argument("--product", choices=PRODUCTS, nargs="+", default=list(PRODUCTS), help="(default: all)")
    parser.add_argument(
        "--assignments",
        type=int,
        nargs="+",
        default=[65536, 1024],
        help="rows (default: 65536 1024, of 8192 and 128 tokens)",
    )
    parser.add_argument("--routing", choices=ROUTINGS, nargs="+", default=list(ROUTINGS), help="(default: both)")


def run(options: argparse.Namespace) -> None:
    if not has_cuda():
        raise SystemExit("the grouped matmul runs on a GPU; tests/kernels run it on a CPU")
    config = Config.from_json(options.config)
    results = Results(options.out, _KEYS)
    for product in options.product:
        weights = _weights(config, product)
        for assignments in options.assignments:
            for routing in options.routing:
                for tiling in TILINGS:
                    case = Case(product, assignments, routing, tiling)
                    key = {
                        "product": product,
                        "assignments": assignments,
                        "routing": routing,
                        **dataclasses.asdict(tiling),
                    }
                    if (row := results.find(kind="grouped_matmul", **key)) is None:
                        row = results.add(measure(config, case, weights))
                    print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)

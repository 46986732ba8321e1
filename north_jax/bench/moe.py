"""A layer of experts for few tokens: warp decode's forms and the expert-centric path, by tokens and weights' format.

    python -m north_jax.bench moe --out result.json

Uniform routing, drawn anew for every call; --layers layers of weights take turns, so that the L2 holds none of what a
call reads. --calls calls are one compiled program, which XLA records as a CUDA graph where it can ("graph" says whether
it did: the host then calls none of our handlers): the time of a call is that of the program over its calls, the median
of several. "floor_us" is the time that reading the chosen experts once takes at the rate at which this run read a large
array. Errors are against float64, with the stored weights.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax

import ffi
from north_jax.config import Config
from north_jax.geometries import NORTH
from north_jax.layers import Array
from north_jax.moe import MAX_TOKENS, dequantize, expert_centric, warp_decode

from . import bandwidth, moe_errors
from .moe_layers import FORMATS, Inputs, Layer, bytes_of_expert, distinct_experts, random_inputs, random_layers
from .options import add_common
from .peers import vllm_experts
from .record import Results

type Run = Callable[..., Array]  # (x, experts, weights, gate_up, down) → [T, D]

PATHS: dict[str, Run] = {
    "plain": partial(warp_decode, form="plain"),
    "shared": partial(warp_decode, form="shared"),
    "expert-centric": expert_centric,
    "expert-centric, MXFP8 activations": partial(expert_centric, quantize_activations=True),
}
_KEYS = ("kind", "path", "format", "tokens")
_QUEUED = 5  # programs on their way at once: waiting for each would count the host's latency
_ERROR_TOKENS = 4


def seconds_per_call(run: Run, layers: list[Layer], inputs: Inputs, *, repeats: int) -> tuple[float, bool]:
    """Device time of one call among many, and whether all were replayed without the host.

    Args:
      run: a path.
      layers: weights, which take turns.
      inputs: of each call.
      repeats: measurements, of which the median is taken.
    """
    calls = inputs.experts.shape[0]

    def program(x: Array, out: Array, layers: list[Layer], experts: Array, weights: Array) -> tuple[Array, Array]:
        for call in range(calls):
            layer = layers[call % len(layers)]
            x, _ = jax.lax.optimization_barrier((x, out))  # no call begins before the last one has ended
            out = run(x, experts[call], weights[call], layer.gate_up, layer.down)
        return x, out

    # Donated, so that every execution finds the same buffers: a graph is recorded anew for others.
    compiled = jax.jit(program, donate_argnums=(0, 1), keep_unused=True)
    state = inputs.x + 0, inputs.x + 0
    times = []
    called = 0
    for repeat in range(repeats + 2):  # the first ones compile and record
        before, begun = _host_calls(), time.perf_counter()
        for _ in range(_QUEUED):
            state = compiled(*state, layers, inputs.experts, inputs.weights)
        jax.block_until_ready(state)
        if repeat >= 2:
            times.append((time.perf_counter() - begun) / (_QUEUED * calls))
            called += _host_calls() - before
    return statistics.median(times), called == 0


def _host_calls() -> int:
    return int(importlib.import_module("ffi._native").warp_decode_calls()) if ffi.build_info().cpu else 0


def measure(
    config: Config, path: str, format: str, layers: list[Layer], tokens: int, *, calls: int, repeats: int, peak: float
) -> dict[str, Any]:
    """One row: a path with weights of a format and a number of tokens; peak in bytes a second."""
    inputs = random_inputs(config, tokens, calls)
    seconds, graph = seconds_per_call(PATHS[path], layers, inputs, repeats=repeats)
    experts = distinct_experts(inputs)
    read = experts * bytes_of_expert(layers[0])
    peer = vllm_experts(tokens) if config == Config.from_json(NORTH) and format == "bfloat16" else None
    return {
        "kind": "moe-time",
        "path": path,
        "format": format,
        "tokens": tokens,
        "us": round(seconds * 1e6, 2),
        "tb_s": round(read / seconds / 1e12, 3),
        "floor_us": round(read / peak * 1e6, 2),
        "percent_of_peak": round(100 * read / peak / seconds, 1),
        "vllm_us": peer,
        "distinct_experts": round(experts, 2),
        "graph": graph,
    }


def measure_errors(config: Config, path: str, format: str, layer: Layer) -> dict[str, Any]:
    """One row: how far a path is from float64."""
    inputs = random_inputs(config, _ERROR_TOKENS, 1)
    expected = moe_errors.oracle(layer, inputs)
    if path.startswith("expert-centric") and format != "bfloat16":
        layer = Layer(dequantize(layer.gate_up), dequantize(layer.down))  # type: ignore[arg-type]
    found = moe_errors.measure(jax.jit(PATHS[path]), layer, inputs, expected)
    return {"kind": "moe-error", "path": path, "format": format, "tokens": _ERROR_TOKENS, **found}


def wanted(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Format and path, in the order that draws the fewest weights; the expert-centric path takes bfloat16 alone."""
    for format in options.format:
        for path in options.path:
            yield format, path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="(default: 1 to 64)")
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS), help="(default: all)")
    parser.add_argument("--path", nargs="+", choices=PATHS, default=list(PATHS), help="(default: all)")
    parser.add_argument("--layers", type=int, default=6, help="layers that take turns (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=48, help="calls of one program (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of a row (default: %(default)s)")


def run(options: argparse.Namespace) -> None:
    if not all(1 <= tokens <= MAX_TOKENS for tokens in options.tokens):
        raise SystemExit(f"--tokens: from 1 to {MAX_TOKENS}")
    config = Config.from_json(options.config)
    results = Results(options.out, _KEYS)
    peak_key = {"kind": "moe-peak", "path": "read", "format": "int32", "tokens": 0}
    peak_row = results.find(**peak_key)
    if peak_row is None:
        peak_row = results.add({**peak_key, "tb_s": round(bandwidth.measure()["read"] / 1e12, 4)})
    print(f"reading a large array: {peak_row['tb_s']} TB/s", flush=True)
    held: tuple[str, list[Layer]] = ("", [])
    for format, path in wanted(options):
        if held[0] != format:
            held = ("", [])
            held = (format, random_layers(config, format, options.layers))
        if results.find(kind="moe-error", path=path, format=format, tokens=_ERROR_TOKENS) is None:
            print(_line(results.add(measure_errors(config, path, format, held[1][0]))), flush=True)
        if path.startswith("expert-centric") and format != "bfloat16":
            continue
        for tokens in options.tokens:
            if results.find(kind="moe-time", path=path, format=format, tokens=tokens) is None:
                sizes = {"calls": options.calls, "repeats": options.repeats, "peak": peak_row["tb_s"] * 1e12}
                print(_line(results.add(measure(config, path, format, held[1], tokens, **sizes))), flush=True)
    print(table(results.of_kind("moe-time")))


def _line(row: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value}" for name, value in row.items())


def table(rows: list[dict[str, Any]]) -> str:
    """Microseconds by path, format and tokens, as Markdown."""
    tokens = sorted({row["tokens"] for row in rows})
    times = {(row["path"], row["format"], row["tokens"]): row["us"] for row in rows}
    lines = [
        "| path | format | " + " | ".join(map(str, tokens)) + " |",
        "| --- | --- |" + " ---: |" * len(tokens),
    ]
    for path, format in dict.fromkeys((row["path"], row["format"]) for row in rows):
        cells = [str(times.get((path, format, count), "")) for count in tokens]
        lines.append("| " + " | ".join([path, format, *cells]) + " |")
    return "\n".join(lines)

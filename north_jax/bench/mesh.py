"""A model on meshes of devices beside one: errors against float32, times, and what is exchanged.

    python -m north_jax.bench mesh --mesh tensor=2 expert=2 --out result.json

Weights are random, the same everywhere. Two programs are compared on every mesh: the whole-sequence pass over one
prompt, and decode steps of a batch over paged keys and values. The exact logits are those of one device in float32,
layer by layer. A mesh agrees if its error is at most 1.25 × that of one device. Programs are compiled side by side;
every row is printed and kept when it is there. Exits with 1 if a mesh does not agree.

On a CPU: XLA_FLAGS=--xla_force_host_platform_device_count=8 and a small --config.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from north_jax.compare.measures import Difference
from north_jax.compare.passes import jax_pass
from north_jax.config import Config
from north_jax.forward_pass import hidden_states
from north_jax.inference import decode_step
from north_jax.kv_cache import KVCache, PagedRows, PageTables, init_cache, pages_for, ring_entries
from north_jax.layers import Array, Params, head
from north_jax.model import param_shapes
from north_jax.random_weights.weights import random_params
from north_jax.sharding import exchanges, init_sharded_cache, make_mesh, shardings_of

from .options import add_common
from .record import Results

ONE = "one device"
FACTOR = 1.25  # most that an error may exceed one device's, where XLA fuses more and so rounds less to bfloat16
_KEYS = ("kind", "mesh", "tokens", "batch")
_KINDS = ("mesh-forward", "mesh-decode")
_COMPARED_POSITIONS = 64  # the last ones of the prompt: all logits of a long one are gigabytes
_COMPARED_STEPS = 8
_RUNS = 3

type Compiled = Callable[..., Any]


class Bench:
    """A model with random weights, the inputs of both programs, and the exact logits."""

    def __init__(self, config: Config, *, tokens: int, batch: int, steps: int, method: Any) -> None:
        """Draws inputs; the weights come later, beside compiling.

        Args:
          config: the model's configuration.
          tokens: of the prompt; decode is timed behind as many.
          batch: rows of decode.
          steps: of decode that are timed.
          method: how decode runs the experts; see `moe`.
        """
        self.config, self.tokens, self.batch, self.steps, self.method = config, tokens, batch, steps, method
        rng = np.random.default_rng(0)
        self.prompt = rng.integers(0, config.vocab_size, (1, tokens)).astype(np.int32)
        self.fed = rng.integers(0, config.vocab_size, (_COMPARED_STEPS, batch)).astype(np.int32)
        end = max(tokens + steps, _COMPARED_STEPS)
        self._pages = {
            "full_pages": batch * pages_for(end),
            "sliding_pages": batch * ring_entries(config, end, end),
        }
        rows = PagedRows(config, rows=batch, max_context=end, max_chunk=end, **self._pages)
        for row in range(batch):
            rows.grow(row, 0, end)
        self._tables = PageTables(*map(np.asarray, rows.snapshot()))
        self._active = np.ones(batch, bool)

    def cache(self, mesh: Mesh | None) -> KVCache:
        if mesh is None:
            return init_cache(self.config, **self._pages, dtype=self.config.dtype)
        return init_sharded_cache(self.config, mesh, **self._pages, dtype=self.config.dtype)

    def lower(self, kind: str, mesh: Mesh | None) -> Any:
        """A program for a mesh, from shapes alone."""
        params = param_shapes(self.config)
        if mesh is not None:
            params = jax.tree.map(_placed, params, shardings_of(self.config, mesh))
        with _on(mesh):
            if kind == "mesh-forward":
                return jax.jit(partial(_last_logits, self.config)).lower(params, self.prompt)
            step = jax.jit(partial(decode_step, self.config, method=self.method), donate_argnums=1)
            cache = jax.tree.map(lambda pages: _placed(pages, pages.sharding), self.cache(mesh))
            return step.lower(params, cache, *self._step_arguments(self.fed[0], 0))

    def exact(self, params: Params) -> dict[str, np.ndarray]:
        """Logits in float32, layer by layer, on one device."""
        last = min(_COMPARED_POSITIONS, self.tokens)
        forward = jax_pass(self.config, params, self.prompt[0], last, jnp.float32).logits
        rows = [jax_pass(self.config, params, row, len(row), jnp.float32).logits for row in self.fed.T]
        return {"mesh-forward": forward, "mesh-decode": np.stack(rows, axis=1).reshape(-1, forward.shape[-1])}

    def run(self, kind: str, compiled: Compiled, params: Params, mesh: Mesh | None) -> tuple[np.ndarray, float]:
        """Logits [S, V] to compare, and milliseconds of one call."""
        with _on(mesh):
            return (self._forward if kind == "mesh-forward" else self._decode)(compiled, params, mesh)

    def _forward(self, compiled: Compiled, params: Params, mesh: Mesh | None) -> tuple[np.ndarray, float]:
        logits = np.asarray(compiled(params, self.prompt)[0])
        times = []
        for _ in range(_RUNS):
            begun = time.perf_counter()
            compiled(params, self.prompt).block_until_ready()
            times.append(time.perf_counter() - begun)
        return logits, statistics.median(times) * 1e3

    def _decode(self, compiled: Compiled, params: Params, mesh: Mesh | None) -> tuple[np.ndarray, float]:
        """Steps from an empty context, then steps behind keys and values of 0, whose time is that of any."""
        cache, found = self.cache(mesh), []
        for position, tokens in enumerate(self.fed):
            cache, logits = compiled(params, cache, *self._step_arguments(tokens, position))
            found.append(np.asarray(logits))
        begun = time.perf_counter()
        for step in range(self.steps):
            cache, logits = compiled(params, cache, *self._step_arguments(self.fed[0], self.tokens + step))
        logits.block_until_ready()
        return np.concatenate(found), (time.perf_counter() - begun) / self.steps * 1e3

    def _step_arguments(self, tokens: np.ndarray, position: int) -> tuple[Any, ...]:
        return self._tables, tokens, np.full(self.batch, position, np.int32), self._active


def _last_logits(config: Config, params: Params, tokens: Array) -> Array:
    """Logits of the last positions."""
    return head(config, params, hidden_states(config, params, tokens)[:, -_COMPARED_POSITIONS:])


def _on(mesh: Mesh | None) -> Any:
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def _placed(array: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def summary(compiled: jax.stages.Compiled) -> dict[str, dict[str, int]]:
    """How many exchanges of each kind a program has, and the values of the largest."""
    sizes = defaultdict(list)
    for kind, size in exchanges(compiled):
        sizes[kind].append(size)
    return {kind: {"count": len(found), "largest": max(found)} for kind, found in sorted(sizes.items())}


def parse_mesh(text: str) -> dict[str, int]:
    """ "tensor=2,expert=4" → sizes of `make_mesh`.

    Raises:
      argparse.ArgumentTypeError: it names no axis, one twice, or a size that is no number.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in ("tensor", "expert") or axis in sizes or not size.isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r} is no mesh: write tensor=N, expert=N or tensor=N,expert=M")
        sizes[axis] = int(size)
    return sizes


def name_of(sizes: dict[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument(
        "--mesh",
        type=parse_mesh,
        nargs="+",
        default=[{"tensor": 2}, {"expert": 2}],
        help="(default: tensor=2 expert=2)",
    )
    parser.add_argument("--tokens", type=int, default=1024, help="of the prompt (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="rows of decode (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="of decode that are timed (default: %(default)s)")
    parser.add_argument("--method", choices=("warp", "auto"), default="warp", help="decode's experts (default: warp)")


def run(options: argparse.Namespace) -> None:
    config = Config.from_json(options.config)
    results = Results(options.out, _KEYS)
    meshes: dict[str, Mesh | None] = {ONE: None}
    for sizes in options.mesh:
        try:
            meshes[name_of(sizes)] = mesh = make_mesh(**sizes)
            shardings_of(config, mesh)
        except ValueError as error:
            raise SystemExit(f"--mesh: {error}") from None
    sizes = {"tokens": options.tokens, "batch": options.batch}
    key = [{"kind": kind, "mesh": name, **sizes} for name in meshes for kind in _KINDS]
    if any(results.find(**one) is None for one in key):
        bench = Bench(config, **sizes, steps=options.steps, method=options.method)
        measure(bench, meshes, lambda row: _keep(results, {**row, **sizes}))
    rows = [row for one in key if (row := results.find(**one)) is not None]
    print(table(rows))
    wrong = disagreements(rows)
    print(*wrong or [f"every error is at most {FACTOR} × that of one device"], sep="\n")
    sys.exit(1 if wrong else 0)


def measure(bench: Bench, meshes: dict[str, Mesh | None], keep: Callable[[dict[str, Any]], None]) -> None:
    """Runs both programs on one device and on every mesh; `keep` is given each row."""
    begun = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s  {what}", flush=True)

    def compile(lowered: Any) -> tuple[Any, float]:
        start = time.perf_counter()
        return lowered.compile(), time.perf_counter() - start

    with ThreadPoolExecutor() as pool:
        drawn = pool.submit(random_params, bench.config)
        futures: dict[tuple[str, str], Future[tuple[Any, float]]] = {}
        for name, mesh in meshes.items():
            for kind in _KINDS:
                futures[name, kind] = pool.submit(compile, bench.lower(kind, mesh))
        whole = drawn.result()
        say("weights are drawn, programs are traced")
        exact = bench.exact(whole)
        say("float32 is computed")
        own: dict[str, tuple[np.ndarray, Difference]] = {}  # of one device
        for name, mesh in meshes.items():
            params = whole if mesh is None else jax.device_put(whole, shardings_of(bench.config, mesh))
            held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))
            for kind in _KINDS:
                compiled, seconds = futures.pop((name, kind)).result()
                logits, ms = bench.run(kind, compiled, params, mesh)
                found = Difference.of(logits, exact[kind])
                first, base = own.setdefault(kind, (logits, found))
                keep(
                    {
                        "kind": kind,
                        "mesh": name,
                        "ms": round(ms, 3),
                        "error": found.error,
                        "one_device_error": base.error,
                        "cosine": found.cosine,
                        "from_one_device": Difference.of(logits, first).error,
                        "same_choice": float(np.mean(logits.argmax(-1) == first.argmax(-1))),
                        "positions": len(logits),
                        "weights_gb": round(held / 1e9, 2),
                        "exchanges": summary(compiled),
                        "compile_s": round(seconds, 1),
                    }
                )
                say(f"{kind} on {name}")
                del compiled
            del params


def _keep(results: Results, row: dict[str, Any]) -> None:
    key = {name: row[name] for name in _KEYS}
    if results.find(**key) is None:
        results.add(row)
    print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


def disagreements(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with rows, in words. NaN is wrong."""
    return [
        f"{row['kind']} on {row['mesh']}: error {row['error']:.2e}, that of one device is {row['one_device_error']:.2e}"
        for row in rows
        if not row["error"] <= FACTOR * row["one_device_error"]
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| | mesh | GB a device | ms | error | one device's |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for row in rows:
        cells = row["kind"], row["mesh"], row["weights_gb"], row["ms"], f"{row['error']:.2e}"
        lines.append("| " + " | ".join(map(str, (*cells, f"{row['one_device_error']:.2e}"))) + " |")
    return "\n".join(lines)

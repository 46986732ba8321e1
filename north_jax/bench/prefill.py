"""Speed of prefill: one prompt by its length, through the path that the server runs, and what its parts take.

    python -m north_jax.bench prefill --out result.json

Weights and tokens are random. A prompt is computed in chunks as on an idle server, to its first token on the host; the
time is the median of all runs but the first. --busy-chunk adds the totals with the chunks of a server whose other
requests decode. --parts adds what attention, experts and projections take of it by themselves.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from north_jax.config import Config
from north_jax.geometries import NORTH
from north_jax.kv_cache import PagedRows, PageTables, init_cache, pages_for, ring_entries
from north_jax.packed import PackedPrefill, Piece
from north_jax.packed.buckets import bucket_of, chunks_of
from north_jax.random_weights.weights import random_params

from . import prefill_parts
from .options import add_common
from .peers import vllm_prefill
from .record import Results

_KEYS = ("kind", "tokens", "chunk")
_CHUNK_STEP = 64


class Bench:
    """A model and a cache with room for one prompt."""

    def __init__(self, config: Config, *, context: int, chunk: int) -> None:
        """Draws the weights and allocates the cache.

        Args:
          config: the model's configuration.
          context: tokens of the longest prompt.
          chunk: tokens of the longest chunk, a multiple of 64.
        """
        self.config, self.chunk = config, chunk
        self.params = random_params(config)
        ring = ring_entries(config, context, chunk)
        pages = {"full_pages": pages_for(context), "sliding_pages": ring}
        self._rows = PagedRows(config, rows=1, max_context=context, max_chunk=chunk, **pages)
        self.cache = init_cache(config, **pages, dtype=self.params["embed"].dtype)
        entries = pages_for(context), ring
        self.prefill = PackedPrefill(config, self.params, rows=1, most=chunk, entries=entries)
        self._rng = np.random.default_rng(0)

    def compile(self, wanted: Sequence[tuple[int, int]]) -> dict[int, float]:
        """Compiles what prompts of these tokens and chunks need, side by side; gives seconds by length of a chunk."""

        def seconds(length: int) -> float:
            begun = time.perf_counter()
            self.prefill.compile(length, self.cache)
            return time.perf_counter() - begun

        pieces = [piece for tokens, chunk in wanted for _, piece in self._pieces(tokens, chunk)]
        lengths = sorted({bucket_of(self.prefill.lengths, piece) for piece in pieces})
        with ThreadPoolExecutor() as pool:
            return dict(zip(lengths, pool.map(seconds, lengths), strict=True))

    def run(self, tokens: int, chunk: int) -> float:
        """Computes a prompt; gives the seconds to its first token. Raises FloatingPointError for logits without one."""
        prompt = self._rng.integers(0, self.config.vocab_size, tokens).astype(np.int32)
        begun = time.perf_counter()
        for start, piece in self._pieces(tokens, chunk):
            self._rows.grow(0, start, start + piece)
            tables = PageTables(*map(np.asarray, self._rows.snapshot()))
            part = Piece(prompt[start : start + piece], start)
            self.cache, logits = self.prefill.run(self.cache, tables, [part])
        token, finite = jax.device_get((jnp.argmax(logits[0]), jnp.isfinite(logits[0]).all()))
        seconds = time.perf_counter() - begun
        self._rows.release(0)
        if not finite or not 0 <= token < self.config.vocab_size:
            raise FloatingPointError(f"logits are not finite after a prompt of {tokens} tokens")
        return seconds

    def measure(self, tokens: int, chunk: int, *, runs: int, parts: bool) -> dict[str, Any]:
        """One length: a run to warm up and `runs` that count."""
        before = _memory("bytes_in_use")
        first = self.run(tokens, chunk)
        seconds = [self.run(tokens, chunk) for _ in range(runs)]
        median = statistics.median(seconds)
        peer = vllm_prefill(tokens) if self.config == Config.from_json(NORTH) else None
        row = {
            "kind": "prefill",
            "backend": "packed",
            "tokens": tokens,
            "chunk": chunk,
            "ms": round(median * 1e3, 3),
            "ms_range": [round(f(seconds) * 1e3, 3) for f in (min, max)],
            "tok_s": round(tokens / median, 1),
            "vllm_ms": peer,
            "ratio": peer and round(peer / median / 1e3, 2),
            "first_run_ms": round(first * 1e3, 1),
            "gb_before": before and round(before / 1e9, 3),
            "gb_peak": before and round(_memory("peak_bytes_in_use") / 1e9, 3),
        }
        if parts:
            pieces = self._pieces(tokens, chunk)
            row |= prefill_parts.measure(self.config, self.params, self.cache, self.prefill, pieces, median)
        return row

    def _pieces(self, tokens: int, chunk: int) -> list[tuple[int, int]]:
        """Start and tokens of each chunk."""
        lengths = chunks_of(tokens, chunk)
        return [(sum(lengths[:i]), length) for i, length in enumerate(lengths)]


def _memory(name: str) -> int:
    """A figure of the device's allocator, 0 where it keeps none."""
    return (jax.devices()[0].memory_stats() or {}).get(name, 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[32768, 128, 512, 2048, 8192],
        help="lengths; the first one's peak of memory is its own (default: 32768 128 512 2048 8192)",
    )
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a call (default: %(default)s)")
    parser.add_argument("--busy-chunk", type=int, help="also with chunks of so many tokens")
    parser.add_argument("--runs", type=int, default=5, help="that count, of each length (default: %(default)s)")
    parser.add_argument("--parts", action="store_true", help="also what each part takes")


def run(options: argparse.Namespace) -> None:
    if options.chunk < _CHUNK_STEP or options.chunk % _CHUNK_STEP:
        raise SystemExit(f"--chunk must be a multiple of {_CHUNK_STEP}, got {options.chunk}")
    if options.busy_chunk is not None and not _CHUNK_STEP <= options.busy_chunk <= options.chunk:
        raise SystemExit(f"--busy-chunk must be from {_CHUNK_STEP} to {options.chunk}, got {options.busy_chunk}")
    results = Results(options.out, _KEYS)
    chunks = [options.chunk, *([options.busy_chunk] if options.busy_chunk else [])]
    wanted = [(tokens, chunk) for chunk in chunks for tokens in options.tokens if chunk == chunks[0] or tokens > chunk]
    bench = None
    for tokens, chunk in wanted:
        row = results.find(kind="prefill", tokens=tokens, chunk=chunk)
        if row is None:
            if bench is None:
                bench = Bench(Config.from_json(options.config), context=max(options.tokens), chunk=options.chunk)
                begun = time.perf_counter()
                each = bench.compile(wanted)
                print(f"compiled in {time.perf_counter() - begun:.1f} s, side by side, by length:", each, flush=True)
            row = results.add(
                bench.measure(tokens, chunk, runs=options.runs, parts=options.parts and chunk == chunks[0])
            )
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    print(table([row for row in results.of_kind("prefill") if (row["tokens"], row["chunk"]) in wanted]))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    names = ("tokens", "chunk", "ms", "vllm_ms", "ratio", *prefill_parts.MILLISECONDS)
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---:" for _ in names) + " |"]
    for row in sorted(rows, key=lambda row: (-row["chunk"], row["tokens"])):
        lines.append("| " + " | ".join("" if row.get(name) is None else str(row[name]) for name in names) + " |")
    return "\n".join(lines)

"""Time of prefill and decode in pure JAX: the baseline that compiled kernels are measured against.

    python -m north_jax.bench.pure_jax --config config.json --out result.json

Weights are random, drawn on the device; the KV cache is filled by the prefill that is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from north_jax.config import Config
from north_jax.inference import decode_step, prefill
from north_jax.kv_cache import PagedRows, init_cache, pages_for, ring_entries
from north_jax.layers import Array
from north_jax.model import init_params

from .record import write


class Rows:
    """A batch of equal rows that grows by random tokens."""

    def __init__(self, config: Config, batch: int, context: int, chunk: int) -> None:
        ring = ring_entries(config, context, chunk)
        pages = {"full_pages": batch * pages_for(context), "sliding_pages": batch * ring}
        self._config = config
        self._params = init_params(config, jax.random.key(0))
        self._rows = PagedRows(config, rows=batch, max_context=context, max_chunk=chunk, **pages)
        self._cache = init_cache(config, **pages, dtype=self._params["embed"].dtype)
        self._rng = np.random.default_rng(0)
        self._prefill = jax.jit(prefill, static_argnums=0, donate_argnums=2)
        self._decode = jax.jit(decode_step, static_argnums=0, donate_argnums=2)
        self.batch, self.position = batch, 0

    def append(self, count: int) -> None:
        """Appends `count` tokens to every row: a prefill, or for 1 a decode step. Waits for the result."""
        for row in range(self.batch):
            self._rows.grow(row, self.position, self.position + count)
        tokens = self._rng.integers(0, self._config.vocab_size, (self.batch, count)).astype(np.int32)
        start = np.full(self.batch, self.position, np.int32)
        model = (self._config, self._params, self._cache, self._rows.snapshot())
        logits: Array
        if count == 1:
            self._cache, logits = self._decode(*model, tokens[:, 0], start, np.ones(self.batch, bool))
        else:
            self._cache, logits = self._prefill(*model, tokens, start, np.full(self.batch, count, np.int32))
        if not bool(jnp.isfinite(logits).all()):
            raise FloatingPointError(f"logits are not finite at position {self.position}")
        self.position += count


def timed(action: Callable[[], None], repeats: int) -> tuple[float, float]:
    """(seconds of the first call, which compiles; median seconds of the further ones)."""
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return times[0], statistics.median(times[1:])


def measure(config: Config, batch: int, context: int, chunk: int, steps: int) -> list[dict[str, Any]]:
    """Fills `context` positions by chunks, then decodes; one row of results for each of the two."""
    if context % chunk or context < 2 * chunk:
        raise ValueError(f"context ({context}) must be at least two chunks and a multiple of chunk ({chunk})")
    rows = Rows(config, batch, context + steps + 1, chunk)
    results = []
    for kind, count, repeats in (("prefill", chunk, context // chunk - 1), ("decode", 1, steps)):
        first, median = timed(lambda count=count: rows.append(count), repeats)  # type: ignore[misc]
        result = {
            "backend": "jax",
            "kind": kind,
            "batch": batch,
            "context": context,
            "tokens_per_call": batch * count,
            "first_call_s": round(first, 2),
            "ms": round(median * 1e3, 3),
            "tok_s": round(batch * count / median, 1),
        }
        results.append(result)
        print("  ".join(f"{name} {value}" for name, value in result.items()), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="config.json of the geometry")
    parser.add_argument("--batch", type=int, default=1, help="rows (default: %(default)s)")
    parser.add_argument(
        "--context", type=int, default=1024, help="positions filled before decoding (default: %(default)s)"
    )
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a prefill call (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="decode steps (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    config = Config.from_json(options.config)
    rows = measure(config, options.batch, options.context, options.chunk, options.steps)
    if options.out is not None:
        write(options.out, rows)


if __name__ == "__main__":
    main()

"""Time of a decode step, by backend: the quanta that the server runs, on random weights and a random KV cache.

    python -m north_jax.bench.decode --config config.json --batch 1 8 --context 1024 8192 --out result.json

Steps are timed by the arrival of their tokens, so a quantum's dispatch counts once and not in every step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from north_jax.config import Config
from north_jax.decoding import Decoder, DecodeRow, TokenRecord, make_decoder
from north_jax.kv_cache import KVCache, PagedRows, PageTables, init_cache, pages_for, ring_entries
from north_jax.layers import Params
from north_jax.model import init_params
from north_jax.sampling import SamplingParams

from .record import write

_CHUNK = 256  # positions that the page tables grow by


def filled_cache(config: Config, params: Params, *, batch: int, context: int, steps: int) -> tuple[KVCache, PageTables]:
    """Normal random keys and values: every row holds `context` positions and has pages for `steps` more."""
    end = context + steps
    pages = {"full_pages": batch * pages_for(end), "sliding_pages": batch * ring_entries(config, end, _CHUNK)}
    rows = PagedRows(config, rows=batch, max_context=end, max_chunk=_CHUNK, **pages)
    for row in range(batch):
        for start in range(0, end, _CHUNK):
            rows.grow(row, start, min(start + _CHUNK, end))
    shapes = init_cache(config, **pages, dtype=params["embed"].dtype)
    keys = jax.random.split(jax.random.key(1), len(shapes))
    cache = tuple(jax.random.normal(key, pool.shape, pool.dtype) for key, pool in zip(keys, shapes, strict=True))
    return cache, rows.snapshot()


def measure(
    config: Config, params: Params, decoder: Decoder, *, batch: int, context: int, steps: int, quanta: int
) -> dict[str, Any]:
    """Median milliseconds between the tokens of consecutive steps, over `quanta` quanta of `steps` steps."""
    cache, tables = filled_cache(config, params, batch=batch, context=context, steps=steps)
    decoder.compile(cache, tables)
    rng = np.random.default_rng(0)
    gaps: list[float] = []
    totals: list[float] = []
    for quantum in range(quanta + 1):
        rows = [
            DecodeRow(slot, int(token), context, steps, frozenset(), SamplingParams(temperature=0))
            for slot, token in enumerate(rng.integers(0, config.vocab_size, batch))
        ]
        arrivals: list[float] = []

        def deliver(_: list[TokenRecord], arrivals: list[float] = arrivals) -> None:
            arrivals.append(time.perf_counter())

        begun = time.perf_counter()
        cache = decoder.decode(cache, tables, rows, steps, deliver)
        if quantum:  # the first warms up
            totals.append((time.perf_counter() - begun) / steps)
            gaps += np.diff(arrivals).tolist()
    step = statistics.median(gaps)
    return {
        "backend": decoder.backend,
        "kind": "decode",
        "batch": batch,
        "context": context,
        "steps": steps,
        "ms": round(step * 1e3, 4),
        "ms_with_dispatch": round(statistics.median(totals) * 1e3, 4),
        "tok_s": round(batch / step, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="config.json of the geometry")
    parser.add_argument("--backend", choices=("jax", "megakernel"), default="megakernel")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="rows (default: 1)")
    parser.add_argument("--context", type=int, nargs="+", default=[1024], help="positions held (default: 1024)")
    parser.add_argument("--steps", type=int, default=32, help="of a quantum (default: %(default)s)")
    parser.add_argument("--quanta", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    config = Config.from_json(options.config)
    params = jax.block_until_ready(init_params(config, jax.random.key(0), jnp.dtype(config.dtype)))
    results = []
    for batch in options.batch:
        for context in options.context:
            decoder = make_decoder(
                config, params, backend=options.backend, slots=batch, max_context=context + options.steps
            )
            sizes = {"batch": batch, "context": context, "steps": options.steps, "quanta": options.quanta}
            results.append(measure(config, params, decoder, **sizes))
            print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    if options.out is not None:
        write(options.out, results)


if __name__ == "__main__":
    main()

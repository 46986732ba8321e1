"""Speed of prefill in pure JAX: prompts that grow chunk by chunk.

    python -m north_jax.bench prefill --context 8192 --chunk 1024 --out result.json

Weights and tokens are random. The time of a chunk is the median of all but the first, which compiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from north_jax.config import Config
from north_jax.inference import prefill
from north_jax.kv_cache import PagedRows, init_cache, pages_for, ring_entries

from .options import add_common
from .record import Results
from .weights import random_params


def measure(config: Config, *, batch: int, context: int, chunk: int) -> dict[str, Any]:
    """Fills `context` positions of every row by chunks.

    Raises:
      ValueError: `context` is not a multiple of `chunk`, or less than two.
      FloatingPointError: a logit is not finite.
    """
    if context % chunk or context < 2 * chunk:
        raise ValueError(f"context ({context}) must be at least two chunks and a multiple of chunk ({chunk})")
    ring = ring_entries(config, context, chunk)
    pages = {"full_pages": batch * pages_for(context), "sliding_pages": batch * ring}
    params = random_params(config)
    rows = PagedRows(config, rows=batch, max_context=context, max_chunk=chunk, **pages)
    cache = init_cache(config, **pages, dtype=params["embed"].dtype)
    step = jax.jit(partial(prefill, config), donate_argnums=1)
    rng = np.random.default_rng(0)
    seconds = []
    for position in range(0, context, chunk):
        begun = time.perf_counter()
        for row in range(batch):
            rows.grow(row, position, position + chunk)
        tokens = rng.integers(0, config.vocab_size, (batch, chunk)).astype(np.int32)
        start, length = np.full(batch, position, np.int32), np.full(batch, chunk, np.int32)
        cache, logits = step(params, cache, rows.snapshot(), tokens, start, length)
        if not bool(jnp.isfinite(logits).all()):
            raise FloatingPointError(f"logits are not finite at position {position}")
        seconds.append(time.perf_counter() - begun)
    median = statistics.median(seconds[1:])
    return {
        "kind": "prefill",
        "backend": "jax",
        "batch": batch,
        "context": context,
        "chunk": chunk,
        "first_call_s": round(seconds[0], 2),
        "ms_chunk": round(median * 1e3, 3),
        "tok_s": round(batch * chunk / median, 1),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--batch", type=int, default=1, help="rows (default: %(default)s)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a call (default: %(default)s)")


def run(options: argparse.Namespace) -> None:
    sizes = {"batch": options.batch, "context": options.context, "chunk": options.chunk}
    results = Results(options.out, ("kind", *sizes))
    row = results.find(kind="prefill", **sizes)
    if row is None:
        row = results.add(measure(Config.from_json(options.config), **sizes))
    print("  ".join(f"{name} {value}" for name, value in row.items()))

"""From the start of a process to its first token: with an empty compilation cache, and with a filled one.

    python -m north_jax.bench cold_start --out result.json

Each start is a process of its own, with random weights drawn on the device instead of a checkpoint, which compiles the
one size of prefill that a prompt needs (a server compiles two before it is ready) and computes it. The first one also
fills the cache for the second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .options import add_common

_CHILD = "north_jax.bench.cold_start"


def start(config_path: Path, tokens: int, cache: str, begun: float) -> dict[str, Any]:
    """One start, in this process.

    Args:
      config_path: config.json of the model.
      tokens: of the prompt.
      cache: directory of the compilation cache.
      begun: when the process was started, in seconds of `time.time`.

    Returns:
      seconds of each part, and of all.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from north_jax import compilation_cache
    from north_jax.config import Config
    from north_jax.kv_cache import PagedRows, init_cache, pages_for, ring_entries
    from north_jax.packed import PackedPrefill, Piece
    from north_jax.random_weights.weights import random_params

    compilation_cache.use(cache)
    marks = [("import_s", time.time())]
    config = Config.from_json(config_path)
    params = random_params(config)
    marks.append(("weights_s", time.time()))
    chunk = -(-tokens // 64) * 64
    ring = ring_entries(config, chunk, chunk)
    pages = {"full_pages": pages_for(chunk), "sliding_pages": ring}
    pool = init_cache(config, **pages, dtype=params["embed"].dtype)
    rows = PagedRows(config, rows=1, max_context=chunk, max_chunk=chunk, **pages)
    prefill = PackedPrefill(config, params, rows=1, most=chunk, entries=(pages_for(chunk), ring))
    marks.append(("allocate_s", time.time()))
    prefill.compile(chunk, pool)
    marks.append(("compile_s", time.time()))
    rows.grow(0, 0, tokens)
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, tokens)
    _, logits = prefill.run(pool, rows.snapshot(), [Piece(prompt.astype(np.int32), 0)])
    jax.device_get(jnp.argmax(logits[0]))
    marks.append(("first_token_s", time.time()))
    ends = [begun, *(end for _, end in marks)]
    spent = {name: round(end - previous, 2) for (name, end), previous in zip(marks, ends[:-1], strict=True)}
    return {**spent, "total_s": round(marks[-1][1] - begun, 2)}


def measure(config: Path, tokens: int) -> list[dict[str, Any]]:
    """Two starts, without and with what the first one compiled."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for name in ("empty", "filled"):
            command = [sys.executable, "-m", _CHILD, str(config), str(tokens), cache, repr(time.time())]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows.append(
                {
                    "kind": "cold_start",
                    "cache": name,
                    "tokens": tokens,
                    "sizes_compiled": 1,
                    **json.loads(done.stdout.splitlines()[-1]),
                }
            )
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--tokens", type=int, default=512, help="of the prompt (default: %(default)s)")


def run(options: argparse.Namespace) -> None:
    rows = measure(options.config, options.tokens)  # before this process takes the GPU's memory
    from .record import Results

    results = Results(options.out, ("kind", "cache", "tokens"))
    for row in rows:
        results.add(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    path, count, directory, process_begun = sys.argv[1:]
    print(json.dumps(start(Path(path), int(count), directory, float(process_begun))))

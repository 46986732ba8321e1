"""Run by test_memory.py in a process of its own: loads a checkpoint, exports it, and prints what that took, as JSON.

Arguments: checkpoint, type or "-", directory to export to.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from north_jax.checkpoint import export, load


def peak() -> int:
    """Most bytes that were ever resident in this process (not in the one that started it, as getrusage may say)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


jnp.ones(8).block_until_ready()  # the backend is up
start = peak()
begin = time.perf_counter()
model = load(sys.argv[1], dtype=None if sys.argv[2] == "-" else sys.argv[2])
seconds = time.perf_counter() - begin
loaded = peak()
export(sys.argv[3], model.config, model.params)
arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
print(json.dumps({"arrays": arrays, "start": start, "loaded": loaded, "exported": peak(), "seconds": seconds}))

"""What the memory of a device gives: copies and reads of large arrays in plain JAX."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from north_jax.layers import Array

_LARGE = 4 << 30
_SMALL = 1 << 20  # where a CPU stands in
_REPEATS = 10


def measure() -> dict[str, float]:
    """Bytes per second, medians: "copy" counts what is read and what is written, "read" is a sum over an array."""
    size = _LARGE if jax.default_backend() == "gpu" else _SMALL
    values = jnp.ones(size // 4, jnp.int32)
    copied = size * 2 / _seconds(lambda: _copy(values))
    return {"copy": copied, "read": size / _seconds(lambda: jnp.sum(values))}


@jax.jit
def _copy(values: Array) -> Array:
    return values + 1  # without arithmetic XLA would hand out the same buffer


def _seconds(action: Callable[[], Array]) -> float:
    """Median time of one of several calls queued together: waiting for each would count the host's latency."""
    times = []
    jax.block_until_ready(action())
    for _ in range(3):
        begun = time.perf_counter()
        for _ in range(_REPEATS):
            result = action()
        result.block_until_ready()
        times.append((time.perf_counter() - begun) / _REPEATS)
    return statistics.median(times)

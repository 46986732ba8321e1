"""Reading golden files, and the one measure by which float32 results are compared with them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import north_jax
from north_jax.config import Config
from north_jax.layers import Params

from .variants import BY_NAME, Variant

TOLERANCE = 2e-5
# Compiler options of programs that run for milliseconds: LLVM's optimiser would double their compile time.
UNOPTIMISED = {"xla_backend_optimization_level": 0}


def error(actual: Any, expected: Any) -> float:
    """Largest absolute difference, divided by the root mean square of all of `expected`.

    Never smaller than the norm-wise relative error, and it also sees one wrong value among many. NaN is infinite.
    """
    expected = np.asarray(expected, np.float64)
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    worst = np.abs(actual - expected).max() / np.sqrt(np.mean(expected**2))
    return float(np.nan_to_num(worst, nan=np.inf))


@dataclass(frozen=True)
class Golden:
    """One variant as this project reads it, and what Transformers computed."""

    variant: Variant
    config: Config
    params: Params  # float32
    outputs: dict[str, np.ndarray]  # see make_golden.py

    @property
    def tokens(self) -> np.ndarray:  # [1, T] int32
        return self.outputs["tokens"]


@functools.cache
def golden(name: str) -> Golden:
    """Loads a variant through the public `north_jax.load`."""
    variant = BY_NAME[name]
    model = north_jax.load(variant.checkpoint, dtype="float32")
    return Golden(variant, model.config, model.params, load_file(variant.outputs))

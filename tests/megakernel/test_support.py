"""Which backend decodes is known from sizes, types and device, before there are weights."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from support import tiny_config

import ffi
from north_jax.config import Config
from north_jax.decoding import BackendError, choose_backend
from north_jax.geometries import NORTH

FULL = Config.from_json(NORTH)
compiled = pytest.mark.skipif(not ffi.available("cpu"), reason="nothing compiled")


def pretend(monkeypatch, *platforms):
    """Compiled for these platforms."""
    monkeypatch.setattr("ffi.available", lambda platform: platform in platforms)


@compiled
def test_a_gpu_that_it_is_compiled_for_decodes_by_the_megakernel(monkeypatch):
    pretend(monkeypatch, "cpu", "cuda")
    assert choose_backend(FULL, "bfloat16", backend="auto", slots=8, platform="gpu").backend == "megakernel"


@compiled
@pytest.mark.parametrize(
    ("config", "dtype", "slots", "reason"),
    [
        (FULL, "float32", 8, "weights other than bfloat16"),
        (FULL, "bfloat16", 9, "more than 8 rows"),
        (FULL, "bfloat16", 99, "at most 32 slots together, not 99"),
        (tiny_config(), "bfloat16", 2, "a head of other than 128 values"),
    ],
)
def test_what_the_pipelined_kernel_does_not_take_is_decoded_by_jax(monkeypatch, config, dtype, slots, reason):
    pretend(monkeypatch, "cpu", "cuda")
    choice = choose_backend(config, dtype, backend="auto", slots=slots, platform="gpu")
    assert choice.backend == "jax" and reason in choice.reason


def test_where_nothing_is_compiled_jax_decodes(monkeypatch):
    pretend(monkeypatch)
    choice = choose_backend(FULL, "bfloat16", backend="auto", slots=8, platform="gpu")
    assert choice.backend == "jax" and "needs compiled code for cuda" in choice.reason
    assert choose_backend(FULL, "bfloat16", backend="auto", slots=8).backend == "jax"  # a CPU


@pytest.mark.parametrize(
    ("backend", "slots", "message"),
    [("megakernel", 8, "compiled code for cuda"), ("megakernel", 33, "not 33"), ("warp", 65, "at most 64 slots")],
)
def test_what_cannot_run_is_refused_without_weights(monkeypatch, backend, slots, message):
    pretend(monkeypatch)
    with pytest.raises(BackendError, match=message):
        choose_backend(FULL, jnp.bfloat16, backend=backend, slots=slots, platform="gpu")

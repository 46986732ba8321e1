"""The experts of a chunk: sorted and multiplied by group, against the dense formula."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from support import tiny_config
from support.experts import as_format

from north_jax.kernels.tiling import Tiling
from north_jax.moe import dequantize, run_experts
from north_jax.packed.experts import (
    FEW_ROWS,
    MANY_ROWS,
    SOME_ROWS,
    ExpertTilings,
    packed_experts,
    sorted_experts,
    tilings_for,
)

TOKENS, TOP, EXPERTS, MODEL, WIDTH = 24, 2, 5, 256, 128
VALID = np.arange(TOKENS) < 21


def operands(dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(TOKENS, MODEL)), dtype)
    h = jnp.where(VALID[:, None], h, jnp.nan)  # padding must reach nothing
    gate_up = jnp.asarray(rng.normal(size=(EXPERTS, 2 * WIDTH, MODEL)) / 16, dtype)
    down = jnp.asarray(rng.normal(size=(EXPERTS, MODEL, WIDTH)) / 11, dtype)
    experts = jnp.asarray(np.argsort(rng.random((TOKENS, EXPERTS)))[:, :TOP], jnp.int32)
    return h, experts, jnp.asarray(rng.random((TOKENS, TOP)), jnp.float32), gate_up, down


def expected(h, experts, weights, gate_up, down):
    config = tiny_config(num_experts=EXPERTS, num_experts_per_tok=TOP)
    mlp = {"gate_up": gate_up.astype(jnp.float32), "down": down.astype(jnp.float32)}
    return np.asarray(run_experts(config, mlp, h.astype(jnp.float32), experts, weights, "dense"))[VALID]


@pytest.mark.parametrize(("tilings", "blocks", "added"), [(FEW_ROWS, 6, True), (MANY_ROWS, 2, False)])
def test_sorted_experts_in_the_interpreter(tilings, blocks, added):
    """Few tokens are placed by a kernel of their own; `onto` is added where a layer asks for it."""
    h, experts, weights, gate_up, down = operands()
    rng = np.random.default_rng(1)
    onto = tuple(jnp.asarray(rng.normal(size=h.shape), h.dtype) for _ in range(2)) if added else None
    if onto:
        onto = onto[0], jnp.where(VALID[:, None], onto[1], jnp.nan)
    run = {"tilings": tilings, "blocks": blocks, "interpret": plgpu.InterpretGPUParams()}
    result = np.asarray(sorted_experts(h, experts, weights, jnp.asarray(VALID), gate_up, down, onto, **run), np.float32)
    reference = expected(h, experts, weights, gate_up, down)
    if onto:
        first, second = (np.asarray(part, np.float32) for part in onto)
        reference = reference + first[VALID] + second[VALID]
        np.testing.assert_array_equal(result[~VALID], first[~VALID])
    else:
        assert not result[~VALID].any()
    assert np.abs(result[VALID] - reference).max() < 1e-2 * np.abs(reference).max()


@pytest.mark.parametrize("added", [False, True])
def test_elsewhere_the_methods_of_moe_run(added):
    h, experts, weights, gate_up, down = operands(jnp.float32)
    config = tiny_config(num_experts=EXPERTS, num_experts_per_tok=TOP)
    onto = (h + 1, h - 2) if added else None
    result = packed_experts(config, {"gate_up": gate_up, "down": down}, h, experts, weights, jnp.asarray(VALID), onto)
    reference = expected(h, experts, weights, gate_up, down)
    if onto:
        reference = reference + np.asarray(onto[0] + onto[1])[VALID]
    np.testing.assert_allclose(np.asarray(result)[VALID], reference, atol=1e-4)


def test_a_gpu_s_program_holds_few_kernels_and_a_cpu_s_none():
    """Rows are placed, multiplied twice, and summed."""
    config = tiny_config(num_experts=EXPERTS, num_experts_per_tok=TOP)
    h, experts, weights, gate_up, down = operands()
    f = jax.jit(lambda *a: packed_experts(config, {"gate_up": a[4], "down": a[5]}, *a[:4]))
    traced = f.trace(h, experts, weights, jnp.asarray(VALID), gate_up, down)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 4
    assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_experts_in_eight_bits_run_by_the_methods_of_moe():
    """On a GPU too: no kernel of packed prefill takes them."""
    config = tiny_config(num_experts=EXPERTS, num_experts_per_tok=TOP)
    h, experts, weights, gate_up, down = operands(jnp.float32)
    mlp = {"gate_up": as_format(gate_up, "mxfp8", 2), "down": as_format(down, "mxfp8", 1)}
    f = jax.jit(lambda mlp, *rows: packed_experts(config, mlp, *rows))
    result = f(mlp, h, experts, weights, jnp.asarray(VALID))
    whole = (dequantize(mlp[name], jnp.float32) for name in ("gate_up", "down"))
    np.testing.assert_allclose(np.asarray(result)[VALID], expected(h, experts, weights, *whole), atol=1e-5)
    traced = f.trace(mlp, h.astype(jnp.bfloat16), experts, weights, jnp.asarray(VALID))
    assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_tilings_differ_by_the_rows_that_experts_get():
    assert tilings_for(1024, 128) is FEW_ROWS
    assert tilings_for(16384, 128) is SOME_ROWS
    assert tilings_for(65536, 128) is MANY_ROWS
    with pytest.raises(ValueError, match="differ in their rows"):
        ExpertTilings(Tiling(), Tiling(align=8))


@pytest.fixture(scope="module")
def matrices():
    """Of North Mini Code's size."""
    keys = jax.random.split(jax.random.key(0))
    gate_up = jax.random.normal(keys[0], (128, 1536, 2048), jnp.bfloat16) * 2048**-0.5
    return gate_up, jax.random.normal(keys[1], (128, 2048, 768), jnp.bfloat16) * 768**-0.5


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 128, 640, 8192])
def test_sorted_experts_on_a_gpu(tokens, matrices):
    keys = jax.random.split(jax.random.key(tokens), 4)
    h = jax.random.normal(keys[0], (tokens, 2048), jnp.bfloat16)
    gate_up, down = matrices
    weights, experts = jax.lax.top_k(jax.random.uniform(keys[3], (tokens, 128)), 8)
    valid = jnp.arange(tokens) < tokens - 3
    run = jax.jit(sorted_experts)
    result = run(h, experts, weights, valid, gate_up, down)
    assert (run(h, experts, weights, valid, gate_up, down) == result).all(), "not the same bits twice"
    some = slice(max(tokens - 35, 0), tokens - 3)
    config = tiny_config(num_experts=128, num_experts_per_tok=8)
    reference = jax.jit(run_experts, static_argnums=(0, 5))(
        config, {"gate_up": gate_up, "down": down}, h[some], experts[some], weights[some], "dense"
    )
    difference = jnp.abs((result[some] - reference).astype(jnp.float32))
    assert float(jnp.max(difference)) < 2e-2 * float(jnp.max(jnp.abs(reference)))
    assert not result[~valid].any()

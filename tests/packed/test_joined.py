"""A layer's branches joined: the kernels in the interpreter, against the dense formulas in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from support import tiny_config

from north_jax.kernels.query_tiles import query_tiles
from north_jax.kernels.tiling import Tiling
from north_jax.kv_cache import PAGE_SIZE
from north_jax.moe import route, run_experts
from north_jax.packed.attention import packed_attention_reference
from north_jax.packed.experts import ExpertTilings
from north_jax.packed.joined import joined, joins

TOKENS, MODEL, WIDTH, HEADS, D, WINDOW = 64, 256, 128, 2, 64, 40
EXPERTS = 128  # that the selection kernels take; nearly all tokens choose among the first six
CONFIG = tiny_config(num_experts=EXPERTS, num_experts_per_tok=2)
PIECES = (np.array([0, 40], np.int32), np.array([30, 0], np.int32), np.array([35, 19], np.int32))


def operands():
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def draw(*shape, scale=1.0):
        return (jax.random.normal(next(keys), shape) * scale).astype(jnp.bfloat16)

    index = np.arange(TOKENS)
    valid = jnp.asarray((index < 35) | (index >= 40) & (index < 59))
    logits = jax.random.normal(next(keys), (TOKENS, EXPERTS)) - jnp.where(jnp.arange(EXPERTS) < 6, 0, 50)
    return {
        "q": draw(TOKENS, HEADS, D),
        "pages": draw(4, 2, 1, PAGE_SIZE, D),
        "table": jnp.asarray([[2, 0], [3, 1]], jnp.int32),
        "x": draw(TOKENS, MODEL),
        "h": draw(TOKENS, MODEL),
        "logits": logits,
        "valid": valid,
        "o": draw(MODEL, HEADS * D, scale=(HEADS * D) ** -0.5),
        "gate_up": draw(EXPERTS, 2 * WIDTH, MODEL, scale=MODEL**-0.5),
        "down": draw(EXPERTS, MODEL, WIDTH, scale=WIDTH**-0.5),
    }


def expected(a):
    a = {name: value.astype(jnp.float32) if value.dtype == jnp.bfloat16 else value for name, value in a.items()}
    mixed = packed_attention_reference(a["q"], a["pages"], a["table"], *map(jnp.asarray, PIECES), WINDOW)
    chosen, weights, _ = route(CONFIG, jnp.eye(EXPERTS), a["logits"])
    result = run_experts(CONFIG, {name: a[name] for name in ("gate_up", "down")}, a["h"], chosen, weights, "dense")
    added = mixed.reshape(TOKENS, -1) @ a["o"].T + result
    return np.asarray(a["x"] + jnp.where(a["valid"][:, None], added, 0))


def test_the_joined_kernels_in_the_interpreter():
    a = operands()
    tiles = query_tiles(*map(jnp.asarray, PIECES), tokens=TOKENS, window=WINDOW)
    tiling = Tiling(row_warpgroups=1, columns=128, stages=2, align=8)
    result = joined(
        CONFIG,
        WINDOW,
        *(a[name] for name in ("q", "pages", "table")),
        *tiles,
        *(a[name] for name in ("x", "h", "logits", "valid", "o", "gate_up", "down")),
        tilings=ExpertTilings(tiling, tiling),
        blocks=2,
        interpret=plgpu.InterpretGPUParams(out_of_bounds_reads="uninitialized"),
    )
    right = expected(a)
    valid = np.asarray(a["valid"])
    result = np.asarray(result, np.float32)
    assert np.abs(result - right)[valid].max() < 2e-2 * np.abs(right).max()
    np.testing.assert_array_equal(result[~valid], np.asarray(a["x"], np.float32)[~valid])


def test_which_sizes_are_joined():
    a = operands()

    def takes(tokens, **changed):
        sizes = a | changed
        mlp = {"router": jnp.zeros((EXPERTS, MODEL)), "gate_up": sizes["gate_up"], "down": sizes["down"]}
        mlp = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in mlp.items()}
        rows = jax.ShapeDtypeStruct((tokens, MODEL), sizes["h"].dtype)
        return joins(CONFIG, sizes["q"], sizes["pages"], rows, mlp)

    assert takes(4096)
    assert not takes(64), "few tokens have a kernel of their own"
    assert not takes(4100), "tokens come in blocks of 64"
    assert not takes(4096, h=a["h"].astype(jnp.float32))

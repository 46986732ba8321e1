"""What warp_decode does not take is named: when it is traced, and once more by the compiled call."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.experts import Shape, random_problem

import ffi
from north_jax import moe

PLATFORM = {"cpu": "cpu", "gpu": "cuda"}.get(jax.default_backend(), "")
PROBLEM = random_problem(Shape(3, 2, 5, 64, 96), "bfloat16", seed=0)
BLOCKS = random_problem(Shape(3, 2, 5, 64, 96), "fp8_block", seed=0)
OPERANDS = {"x": 0, "experts": 1, "weights": 2, "gate_up": 3, "down": 4}


def changed(**changes):
    operands = list(PROBLEM.operands())
    for name, value in changes.items():
        operands[OPERANDS[name]] = value
    return operands


def zeros(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


TRACED = {
    "float32 tokens": (changed(x=zeros(3, 64, dtype=jnp.float32)), "x is float32[3, 64], expected bfloat16[T, D]"),
    "one token": (changed(x=zeros(64)), "x is bfloat16[64], expected bfloat16[T, D]"),
    "too many tokens": (
        changed(x=zeros(65, 64), experts=zeros(65, 2, dtype=jnp.int32)),
        "tokens is 65, expected 1 to 64",
    ),
    "no tokens": (changed(x=zeros(0, 64), experts=zeros(0, 2, dtype=jnp.int32)), "tokens is 0, expected 1 to 64"),
    "too many experts a token": (changed(experts=zeros(3, 17, dtype=jnp.int32)), "top_k is 17, expected 1 to 16"),
    "odd hidden size": (changed(x=zeros(3, 48)), "hidden_size is 48, expected a multiple of 32"),
    "ids of another type": (
        changed(experts=zeros(3, 2, dtype=jnp.int16)),
        "experts is int16[3, 2], expected int32[3, k]",
    ),
    "ids of other tokens": (changed(experts=zeros(4, 2, dtype=jnp.int32)), "experts is int32[4, 2], expected int32[3"),
    "weights of another type": (changed(weights=zeros(3, 2)), "weights is bfloat16[3, 2], expected float32[3, 2]"),
    "weights of another shape": (
        changed(weights=zeros(3, 3, dtype=jnp.float32)),
        "weights is float32[3, 3], expected float32[3, 2]",
    ),
    "gate_up of another size": (
        changed(gate_up=zeros(5, 192, 32)),
        "gate_up is bfloat16[5, 192, 32], expected bfloat16[E",
    ),
    "float32 gate_up": (changed(gate_up=zeros(5, 192, 64, dtype=jnp.float32)), "gate_up is float32[5, 192, 64]"),
    "odd intermediate size": (changed(gate_up=zeros(5, 80, 64)), "intermediate_size of gate_up is 40, expected a mult"),
    "down of another size": (
        changed(down=zeros(5, 64, 64)),
        "down is bfloat16[5, 64, 64], expected bfloat16[E, 64, 96]",
    ),
    "another number of experts": (changed(down=zeros(4, 64, 96)), "down has 4 experts, gate_up 5"),
    "parts of gate_up": (
        changed(gate_up=dataclasses.replace(BLOCKS.gate_up, parts=1)),
        "gate_up is quantised as 1 projections, expected 2",
    ),
    "scales of another shape": (
        changed(gate_up=dataclasses.replace(BLOCKS.gate_up, scales=zeros(5, 2, 2, dtype=jnp.float32))),
        "the scales of gate_up are float32[5, 2, 2], expected float32[5, 2, 1]",
    ),
    "scales of another type": (
        changed(down=dataclasses.replace(BLOCKS.down, scales=zeros(5, 64))),
        "the scales of down are bfloat16[5, 64], expected float32[5, 64]",
    ),
}


@pytest.mark.parametrize(("operands", "message"), TRACED.values(), ids=TRACED.keys())
def test_operands_are_named(operands, message):
    with pytest.raises(ValueError, match="^warp_decode: .*" + re.escape(message)):
        jax.eval_shape(moe.warp_decode, *operands)


def test_the_products_name_theirs():
    x, experts, weights, gate_up, down = PROBLEM.operands()
    with pytest.raises(ValueError, match=r"^moe_gate_up: x is float32"):
        moe.moe_gate_up(x.astype(jnp.float32), experts, gate_up)
    with pytest.raises(ValueError, match=r"^moe_down: hidden is bfloat16\[3, 96\]"):
        moe.moe_down(zeros(3, 96), experts, weights, down)
    with pytest.raises(ValueError, match=r"^moe_down: intermediate_size is 40"):
        moe.moe_down(zeros(3, 2, 40), experts, weights, down)
    with pytest.raises(ValueError, match=r"^moe_down: dtype is float16, expected bfloat16 or float32"):
        moe.moe_down(zeros(3, 2, 96), experts, weights, down, dtype=jnp.float16)
    with pytest.raises(ValueError, match=r"^moe_gate_up: form is 'wide', expected one of auto, plain, shared"):
        moe.moe_gate_up(x, experts, gate_up, form="wide")


def call(target, results, *operands, form=0):
    """A compiled call past the checks of Python."""
    shapes = [jax.ShapeDtypeStruct(*result) for result in results]
    return jax.block_until_ready(jax.ffi.ffi_call(f"north_jax.{target}", shapes)(*operands, form=np.int64(form)))


NO_SCALES = zeros(0, dtype=jnp.float32)
VALUES = BLOCKS.gate_up.values
COMPILED = {
    "x": (
        (zeros(3, 64, dtype=jnp.float32), PROBLEM.experts, PROBLEM.gate_up, NO_SCALES),
        0,
        "x is F32[3, 64], expected BF16",
    ),
    "tokens": (
        (zeros(65, 64), zeros(65, 2, dtype=jnp.int32), PROBLEM.gate_up, NO_SCALES),
        0,
        "tokens is 65, expected 1 to",
    ),
    "sizes": (
        (zeros(3, 48), PROBLEM.experts, zeros(5, 192, 48), NO_SCALES),
        0,
        "hidden size is 48, expected a multiple",
    ),
    "top-k": (
        (PROBLEM.x, zeros(3, 17, dtype=jnp.int32), PROBLEM.gate_up, NO_SCALES),
        0,
        "top-k is 17, expected 1 to 16",
    ),
    "ids": ((PROBLEM.x, zeros(3, 2), PROBLEM.gate_up, NO_SCALES), 0, "experts is BF16[3, 2], expected S32[3, 2]"),
    "weights": ((PROBLEM.x, PROBLEM.experts, zeros(5, 192, 32), NO_SCALES), 0, "gate_up is BF16[5, 192, 32], expected"),
    "no scales": (
        (PROBLEM.x, PROBLEM.experts, VALUES, NO_SCALES),
        0,
        "gate_up scales is F32[0], expected F32[5, 2, 1]",
    ),
    "scales": (
        (PROBLEM.x, PROBLEM.experts, VALUES, zeros(5, 4, dtype=jnp.float32)),
        0,
        "gate_up scales is F32[5, 4], expected F32[5, 192]",
    ),
    "form": (
        (PROBLEM.x, PROBLEM.experts, PROBLEM.gate_up, NO_SCALES),
        2,
        "form is 2, expected 0 (plain) or 1 (shared)",
    ),
}


@pytest.mark.skipif(not ffi.available(PLATFORM), reason=str(ffi.build_info()))
@pytest.mark.parametrize(("operands", "form", "message"), COMPILED.values(), ids=COMPILED.keys())
def test_the_compiled_call_names_them_too(operands, form, message):
    result = ((operands[0].shape[0], operands[1].shape[1], operands[2].shape[1] // 2), jnp.bfloat16)
    with pytest.raises(Exception, match="moe_gate_up: .*" + re.escape(message)):
        call("moe_gate_up", [result], *operands, form=form)


@pytest.mark.skipif(not ffi.available(PLATFORM), reason=str(ffi.build_info()))
def test_the_compiled_call_of_both_compares_the_products():
    results = [((3, 64), jnp.bfloat16), ((3, 2, 96), jnp.bfloat16)]
    x, experts, weights, gate_up, _ = PROBLEM.operands()
    with pytest.raises(Exception, match=re.escape("down is BF16[4, 64, 96], expected BF16[5, 64, 96]")):
        call("warp_decode", results, x, experts, weights, gate_up, NO_SCALES, zeros(4, 64, 96), NO_SCALES)


@pytest.mark.parametrize("backwards", [False, True])
def test_quantised_weights_have_no_derivative(backwards):
    x, experts, weights, _, _ = PROBLEM.operands()

    def loss(scales):
        gate_up = dataclasses.replace(BLOCKS.gate_up, scales=scales)
        return moe.warp_decode(x, experts, weights, gate_up, BLOCKS.down).astype(jnp.float32).sum()

    scales = BLOCKS.gate_up.scales
    with pytest.raises(ValueError, match="warp_decode: quantised weights have no derivative"):
        jax.grad(loss)(scales) if backwards else jax.jvp(loss, (scales,), (scales,))

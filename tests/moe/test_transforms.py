"""warp_decode under JAX's transformations: jit, shape inference, vmap, derivatives, shard_map over eight devices."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.experts import FORMATS, Shape, random_problem

from north_jax import moe

SHAPE = Shape(5, 2, 6, 64, 96)


def reference(x, experts, weights, gate_up, down):
    hidden = moe.gate_up_reference(x, experts, gate_up)
    return moe.down_reference(hidden, experts, weights, down, dtype=jnp.bfloat16)


@pytest.mark.parametrize("format", FORMATS)
def test_shapes_are_inferred_without_running(format):
    problem = random_problem(SHAPE, format, seed=0)
    out = jax.eval_shape(lambda *operands: moe.warp_decode(*operands, dtype=jnp.float32), *problem.operands())
    assert (out.shape, out.dtype) == ((5, 64), jnp.float32)
    hidden = jax.eval_shape(moe.moe_gate_up, problem.x, problem.experts, problem.gate_up)
    assert (hidden.shape, hidden.dtype) == ((5, 2, 96), jnp.bfloat16)


@pytest.mark.parametrize("size", [12, 30])
def test_vmap_over_tokens(size):
    """12 × 5 tokens are one call; 30 × 5 are several."""
    problem = random_problem(dataclasses.replace(SHAPE, tokens=5 * size), "fp8_channel", seed=1, absent=0.1)
    batched = [operand.reshape(size, 5, *operand.shape[1:]) for operand in problem.operands()[:3]]
    run = jax.jit(jax.vmap(lambda *rows: moe.warp_decode(*rows, problem.gate_up, problem.down, form="shared")))
    expected = [
        moe.warp_decode(*(rows[i] for rows in batched), problem.gate_up, problem.down, form="shared")
        for i in range(size)
    ]
    np.testing.assert_array_equal(run(*batched), jnp.stack(expected))


def test_vmap_over_some_operands_and_over_weights():
    problems = [random_problem(SHAPE, "mxfp8", seed=seed) for seed in range(3)]
    first = problems[0]
    xs = jnp.stack([problem.x for problem in problems])
    some = jax.vmap(moe.warp_decode, in_axes=(0, None, None, None, None))(xs, *first.operands()[1:])
    expected = [moe.warp_decode(x, *first.operands()[1:]) for x in xs]
    np.testing.assert_array_equal(some, jnp.stack(expected))

    downs = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(problem.down for problem in problems))
    layers = jax.vmap(moe.warp_decode, in_axes=(0, None, None, None, 0))(xs, *first.operands()[1:4], downs)
    expected = [moe.warp_decode(problem.x, *first.operands()[1:4], problem.down) for problem in problems]
    np.testing.assert_array_equal(layers, jnp.stack(expected))


def test_vmap_of_vmap():
    problem = random_problem(dataclasses.replace(SHAPE, tokens=12), "bfloat16", seed=2)
    rows = [operand.reshape(2, 3, 2, *operand.shape[1:]) for operand in problem.operands()[:3]]
    twice = jax.vmap(jax.vmap(lambda *rows: moe.warp_decode(*rows, problem.gate_up, problem.down)))(*rows)
    expected = moe.warp_decode(*problem.operands(), form="shared")
    np.testing.assert_array_equal(twice.reshape(12, -1), expected)


@pytest.mark.parametrize("format", ["bfloat16", "fp8_block"])
def test_derivatives_are_those_of_the_reference(format):
    problem = random_problem(SHAPE, format, seed=3, absent=0.1)
    x, experts, weights, gate_up, down = problem.operands()
    moving = (0, 2, 3, 4) if format == "bfloat16" else (0, 2)

    def loss(run, *operands):
        return jnp.sum(jnp.sin(run(*operands).astype(jnp.float32)))

    arguments = tuple(i + 1 for i in moving)
    ours = jax.jit(jax.grad(loss, argnums=arguments), static_argnums=0)(moe.warp_decode, *problem.operands())
    theirs = jax.grad(loss, argnums=arguments)(reference, *problem.operands())
    for a, b in zip(ours, theirs, strict=True):
        assert np.asarray(b.astype(jnp.float32)).any()
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2e-2, atol=2e-3)

    slope = jax.jvp(lambda x: moe.warp_decode(x, experts, weights, gate_up, down), (x,), (x,))[1]
    expected = jax.jvp(lambda x: reference(x, experts, weights, gate_up, down), (x,), (x,))[1]
    np.testing.assert_array_equal(slope, expected)


def test_derivatives_under_vmap():
    problem = random_problem(dataclasses.replace(SHAPE, tokens=6), "bfloat16", seed=4)
    x, experts, weights, gate_up, down = problem.operands()

    def loss(x, experts, weights):
        return jnp.sum(moe.warp_decode(x, experts, weights, gate_up, down).astype(jnp.float32))

    halves = [rows.reshape(2, 3, *rows.shape[1:]) for rows in (x, experts, weights)]
    batched = jax.vmap(jax.grad(loss))(*halves)
    whole = jax.grad(loss)(x, experts, weights)
    np.testing.assert_allclose(
        batched.reshape(x.shape).astype(jnp.float32), whole.astype(jnp.float32), rtol=2e-2, atol=1e-3
    )


def test_products_differentiate_on_their_own():
    x, experts, weights, gate_up, down = random_problem(SHAPE, "bfloat16", seed=5).operands()
    slope = jax.grad(lambda x: moe.moe_gate_up(x, experts, gate_up).astype(jnp.float32).sum())(x)
    expected = jax.grad(lambda x: moe.gate_up_reference(x, experts, gate_up).astype(jnp.float32).sum())(x)
    np.testing.assert_array_equal(slope, expected)
    hidden = moe.moe_gate_up(x, experts, gate_up)
    slope = jax.grad(lambda weights: moe.moe_down(hidden, experts, weights, down).astype(jnp.float32).sum())(weights)
    expected = jax.grad(
        lambda weights: moe.down_reference(hidden, experts, weights, down, dtype=jnp.bfloat16).astype(jnp.float32).sum()
    )(weights)
    np.testing.assert_array_equal(slope, expected)


@pytest.mark.slow
def test_sharded_over_eight_devices():
    """In a process of its own, which pretends to have eight."""
    program = Path(__file__).with_name("sharded_checks.py")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    paths = os.pathsep.join([str(program.parents[2]), str(program.parents[1])])
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["ok"] * 11

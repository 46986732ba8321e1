"""warp_decode and its two products against float64, on JAX's default backend: formats, forms, other models' shapes."""

from __future__ import annotations

import secrets

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.experts import FORMATS, Shape, assert_rounded, down_oracle, hidden_oracle, random_problem

from north_jax import moe

DTYPES = [jnp.bfloat16, jnp.float32]
ON_GPU = jax.default_backend() == "gpu"
FORMS = ["plain", "shared"] if ON_GPU else ["auto"]  # elsewhere they are the same code


def reduced(shape: Shape, by: int) -> Shape:
    """What a CPU can do of it."""
    if ON_GPU:
        return shape
    return Shape(
        shape.tokens, shape.top_k, max(shape.top_k, shape.experts // by), shape.hidden // by, shape.width // by
    )


MODELS = {
    "North Mini Code, Qwen3-30B-A3B": reduced(Shape(4, 8, 128, 2048, 768), 8),
    "OLMoE-1B-7B": reduced(Shape(7, 8, 64, 2048, 1024), 8),
    "Mixtral-8x7B": reduced(Shape(3, 2, 8, 4096, 14336), 32),
}
TOKENS = [1, 2, 3, 8, 17, 32, 64] if ON_GPU else [1, 64]


def poison(*shapes_and_dtypes) -> None:
    """Fills memory that the results may get with NaN: what is not written is then seen."""
    for shape, dtype in shapes_and_dtypes:
        for _ in range(4):
            jnp.full(shape, jnp.nan, dtype).block_until_ready()


def run(problem, form):
    """The hidden vectors, the output in both types, and what the call of both products gives."""

    def all_of_them(x, experts, weights, gate_up, down):
        hidden = moe.moe_gate_up(x, experts, gate_up, form=form)
        outs = [moe.moe_down(hidden, experts, weights, down, form=form, dtype=dtype) for dtype in DTYPES]
        both = [moe.warp_decode(x, experts, weights, gate_up, down, form=form, dtype=dtype) for dtype in DTYPES]
        return hidden, outs, both

    tokens, hidden_size = problem.x.shape
    vectors = (*problem.experts.shape, problem.down.shape[2])
    poison((vectors, jnp.bfloat16), *(((tokens, hidden_size), dtype) for dtype in DTYPES))
    return jax.jit(all_of_them)(*problem.operands())


def check(problem, form) -> None:
    """Both products against float64, and the call of both against the two."""
    hidden, outs, both = run(problem, form)
    assert_rounded(hidden, hidden_oracle(problem), jnp.bfloat16)
    expected = down_oracle(problem, hidden)
    for out, dtype, again in zip(outs, DTYPES, both, strict=True):
        assert out.dtype == dtype
        assert_rounded(out, expected, dtype)
        np.testing.assert_array_equal(again, out)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS)
def test_models_equal_float64(model, form, format):
    check(random_problem(MODELS[model], format, seed=1), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_numbers_of_tokens_equal_float64(tokens, form):
    """All-new operands, ids that are no expert, and one expert that many chose."""
    shape = Shape(tokens, 8, 128, 2048, 768) if ON_GPU else Shape(tokens, 3, 12, 96, 64)
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    for format in FORMATS if ON_GPU else FORMATS[::2]:
        check(random_problem(shape, format, seed=seed, absent=0.1, hot=0.3), form)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shape", [Shape(1, 1, 1, 32, 32), Shape(3, 16, 300, 160, 96), Shape(9, 2, 5, 32, 544)], ids=str
)
def test_odd_sizes_equal_float64(shape, form, format):
    check(random_problem(shape, format, seed=2, absent=0.2), form)


@pytest.mark.parametrize("format", FORMATS)
def test_the_pure_form_equals_float64_under_the_same_name(monkeypatch, format):
    monkeypatch.setattr("ffi.available", lambda platform: False)
    check(random_problem(Shape(3, 2, 5, 160, 96), format, seed=3, absent=0.2), "auto")


@pytest.mark.parametrize("form", FORMS)
def test_nobody_chose_an_expert(form):
    problem = random_problem(Shape(3, 2, 4, 64, 32), "bfloat16", seed=3, absent=1.0)
    assert not np.asarray(moe.moe_gate_up(problem.x, problem.experts, problem.gate_up, form=form)).any()
    assert not np.asarray(moe.warp_decode(*problem.operands(), form=form)).any()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("form", FORMS)
def test_same_bits_again_and_with_other_neighbours(form, format):
    shape = Shape(24, 8, 128, 2048, 768) if ON_GPU else Shape(24, 3, 8, 96, 64)
    problem = random_problem(shape, format, seed=4, hot=0.4)
    run = jax.jit(lambda *operands: moe.warp_decode(*operands, form=form, dtype=jnp.float32))
    whole = np.asarray(run(*problem.operands()))
    for _ in range(10):
        np.testing.assert_array_equal(run(*problem.operands()), whole)
    for some in (slice(0, 1), slice(5, 12)) if ON_GPU else (slice(5, 12),):
        x, experts, weights, gate_up, down = problem.operands()
        np.testing.assert_array_equal(run(x[some], experts[some], weights[some], gate_up, down), whole[some])


def test_infinite_weights_of_other_experts_do_not_show():
    problem = random_problem(Shape(2, 2, 6, 64, 32), "bfloat16", seed=5)
    used = np.unique(problem.experts)
    unused = jnp.asarray([e for e in range(6) if e not in used])
    for form in FORMS:
        out = moe.warp_decode(
            problem.x,
            problem.experts,
            problem.weights,
            problem.gate_up.at[unused].set(jnp.inf),
            problem.down.at[unused].set(jnp.nan),
            form=form,
        )
        np.testing.assert_array_equal(out, moe.warp_decode(*problem.operands(), form=form))


@pytest.mark.gpu
def test_within_what_the_seed_of_this_work_reports():
    """Cosine above 0.999996 and differences up to 2^-9, for outputs below a half."""
    from north_jax.bench.moe_errors import measure, oracle
    from north_jax.bench.moe_layers import random_inputs, random_layers
    from north_jax.config import Config
    from north_jax.geometries import NORTH

    config = Config.from_json(NORTH)
    (layer,) = random_layers(config, "bfloat16", 1)
    inputs = random_inputs(config, 32, 1)
    expected = oracle(layer, inputs)
    for form in FORMS:
        found = measure(
            jax.jit(lambda *operands, form=form: moe.warp_decode(*operands, form=form)), layer, inputs, expected
        )
        assert found["least_cosine"] > 0.999996
        assert found["largest_difference"] <= 2**-9

"""The CUDA kernels' own code on a CPU, with fibers as threads (see tests/megakernel/warps), against float64.

Copies land when a thread waits for them and not before; what the first kernel writes is there for the second one when
it has waited. What a GPU adds is not tested here: its memory, and the time it takes.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from support.experts import FORMATS, Problem, Shape, assert_rounded, down_oracle, hidden_oracle, random_problem
from support.programs import write_arrays

from north_jax.moe import QuantizedExperts

ROOT = Path(__file__).parents[2]
FORMS = ["plain", "shared"]

# Rows that are no multiple of what a warp reads at once, rows of fewer steps than there are warps and of more, one
# token and several, more experts than a word of bits has.
SHAPES = [
    Shape(2, 2, 40, 96, 32),
    *(
        pytest.param(shape, marks=pytest.mark.slow)
        for shape in (Shape(1, 1, 1, 32, 32), Shape(2, 2, 70, 288, 96), Shape(2, 2, 4, 1312, 32))
    ),
]
CROWDED = Shape(19, 2, 3, 64, 32)  # more tokens of an expert than one segment has


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    program = tmp_path_factory.mktemp("emulation") / "warp_decode"
    here = Path(__file__).with_name("emulation")
    includes = [here, ROOT / "tests/megakernel/warps", ROOT]
    command = [compiler, "-std=c++20", "-O1", "-Wno-unknown-pragmas", *(f"-I{path}" for path in includes)]
    subprocess.run([*command, here / "main.cc", "-o", program], check=True)
    return program


def operands_of(weights) -> list[np.ndarray]:
    if isinstance(weights, QuantizedExperts):
        return [np.asarray(weights.values), np.asarray(weights.scales)]
    return [np.asarray(weights), np.zeros(0, np.float32)]


def run(program, path, problem: Problem, format, form, *, float32_out=False, blocks=3, seed=0):
    """The hidden vectors [T, k, I] and the output [T, D] of the kernels."""
    (tokens, hidden), top_k = problem.x.shape, problem.experts.shape[1]
    experts, _, width = problem.down.shape
    sizes = [tokens, top_k, experts, hidden, width, FORMATS.index(format), FORMS.index(form), float32_out, blocks, seed]
    weights = [*operands_of(problem.gate_up), *operands_of(problem.down)]
    arrays = [np.array(sizes, np.int64), *map(np.asarray, (problem.x, problem.experts, problem.weights)), *weights]
    write_arrays(path / "in", arrays)
    subprocess.run([program, path / "in", path / "out"], check=True)
    raw = (path / "out").read_bytes()
    count = int(np.frombuffer(raw, np.int64, 1)[0])
    found = np.frombuffer(raw, jnp.bfloat16, count // 2, 8).reshape(tokens, top_k, width)
    out = np.frombuffer(raw, np.float32 if float32_out else jnp.bfloat16, offset=16 + count)
    return found, out.reshape(tokens, hidden)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(program, tmp_path, shape, form, format):
    problem = random_problem(shape, format, seed=shape.tokens)
    hidden, out = run(program, tmp_path, problem, format, form)
    assert_rounded(hidden, hidden_oracle(problem), jnp.bfloat16)
    assert_rounded(out, down_oracle(problem, hidden), jnp.bfloat16)


@pytest.mark.parametrize("format", [pytest.param("bfloat16", marks=pytest.mark.slow), "mxfp8"])
def test_an_expert_of_many_tokens(program, tmp_path, format):
    """Ids that are no expert, one that a token chose twice, and segments of several passes; the output in float32."""
    problem = random_problem(CROWDED, format, seed=5, absent=0.2, hot=0.6)
    results = [run(program, tmp_path, problem, format, "shared", float32_out=True, seed=seed) for seed in (0, 1, 2)]
    hidden, out = results[0]
    assert_rounded(hidden, hidden_oracle(problem), jnp.bfloat16)
    assert_rounded(out, down_oracle(problem, hidden), jnp.float32)
    for others in results[1:]:  # other warps come first: the same bits
        assert all(np.array_equal(a, b) for a, b in zip(others, results[0], strict=True))


def test_the_grouped_product(program, tmp_path):
    """The expert-centric path's: tiles of two experts, one twice, and one without."""
    rng = np.random.default_rng(7)
    experts, columns, rows = np.array([2, 0, 2, -1], np.int32), 160, 64
    x, weights = (
        rng.standard_normal(shape, np.float32).astype(jnp.bfloat16) for shape in ((64, columns), (3, rows, columns))
    )
    write_arrays(tmp_path / "in", [np.array([4, columns, rows, 3], np.int64), x, experts, weights])
    subprocess.run([program, tmp_path / "in", tmp_path / "out"], check=True)
    found = np.frombuffer((tmp_path / "out").read_bytes(), jnp.bfloat16, offset=8).reshape(64, rows)
    for tile, expert in enumerate(experts[:3]):
        some = slice(16 * tile, 16 * tile + 16)
        expected = x[some].astype(np.float64) @ weights[expert].astype(np.float64).T
        assert_rounded(found[some], expected, jnp.bfloat16)
    assert (found[48:].view(np.uint16) == 0xFFFF).all()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_token_does_not_depend_on_its_neighbours(program, tmp_path, form):
    problem = random_problem(CROWDED, "fp8_block", seed=6, absent=0.1, hot=0.3)
    whole = run(program, tmp_path, problem, "fp8_block", form)
    for some in (slice(0, 1), slice(7, 12)):
        part = Problem(problem.x[some], problem.experts[some], problem.weights[some], problem.gate_up, problem.down)
        alone = run(program, tmp_path, part, "fp8_block", form, blocks=2)
        assert all(np.array_equal(a, b[some]) for a, b in zip(alone, whole, strict=True))

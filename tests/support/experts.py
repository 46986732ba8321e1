"""Random mixtures of experts, and what they compute in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from north_jax.moe import quantize

FORMATS = ["bfloat16", "fp8_channel", "fp8_block", "mxfp8"]


@dataclass(frozen=True)
class Shape:
    """T tokens of k out of E experts, hidden size D, intermediate size I."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    width: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.top_k}of{self.experts}-{self.hidden}x{self.width}"


@dataclass(frozen=True)
class Problem:
    """Operands of `warp_decode`."""

    x: jax.Array
    experts: jax.Array
    weights: jax.Array
    gate_up: Any
    down: Any

    def operands(self) -> tuple[Any, ...]:
        return self.x, self.experts, self.weights, self.gate_up, self.down


def as_format(weights: jax.Array, format: str, parts: int) -> Any:
    return weights if format == "bfloat16" else _quantize(weights, format, parts=parts)


_quantize = jax.jit(quantize, static_argnames=("scheme", "parts"))


def random_problem(shape: Shape, format: str, seed: int, *, absent: float = 0.0, hot: float = 0.0) -> Problem:
    """Fresh operands.

    Args:
      shape: the sizes.
      format: of the weights, one of FORMATS.
      seed: of everything.
      absent: share of the ids that are no expert.
      hot: share of the ids that are expert 1, the same one twice for a token too.
    """
    rng = np.random.default_rng(seed)

    def normal(*dims: int, scale: float = 1.0) -> jax.Array:
        values = rng.standard_normal(dims, np.float32)
        values *= scale
        return jnp.asarray(values.astype(ml_dtypes.bfloat16))

    experts = np.stack([rng.permutation(shape.experts)[: shape.top_k] for _ in range(shape.tokens)]).astype(np.int32)
    experts[rng.random(experts.shape) < hot] = min(1, shape.experts - 1)
    none = rng.random(experts.shape) < absent
    experts[none] = rng.choice([-1, shape.experts, 2**31 - 1, -(2**31)], np.count_nonzero(none))
    gate_up = normal(shape.experts, 2 * shape.width, shape.hidden, scale=shape.hidden**-0.5)
    down = normal(shape.experts, shape.hidden, shape.width, scale=shape.width**-0.5)
    return Problem(
        normal(shape.tokens, shape.hidden),
        jnp.asarray(experts),
        jnp.asarray(rng.random((shape.tokens, shape.top_k), np.float32)),
        as_format(gate_up, format, 2),
        as_format(down, format, 1),
    )


def exact(values: Any) -> np.ndarray:
    """Values of few bits in float64."""
    return np.asarray(values).astype(np.float64)


_some = jax.jit(lambda weights, index: weights[index])


def exact_expert(weights: Any, expert: int) -> np.ndarray:
    """One expert's weights [rows, columns]; float32 holds the product of a value and its scale within 2^-24."""
    return exact(_some(weights, np.asarray([expert])))[0]


def valid_experts(problem: Problem) -> list[int]:
    return [int(expert) for expert in np.unique(problem.experts) if 0 <= expert < problem.down.shape[0]]


def hidden_oracle(problem: Problem) -> np.ndarray:
    """The intermediate vectors [T, k, I], not rounded."""
    x, experts = exact(problem.x), np.asarray(problem.experts)
    hidden = np.zeros((*experts.shape, problem.gate_up.shape[1] // 2))
    for expert in valid_experts(problem):
        gate_up = exact_expert(problem.gate_up, expert)
        for token, slot in np.argwhere(experts == expert):
            gate, up = np.split(gate_up @ x[token], 2)
            hidden[token, slot] = gate / (1 + np.exp(-gate)) * up
    return hidden


def down_oracle(problem: Problem, hidden: Any) -> np.ndarray:
    """The output [T, D] for these intermediate vectors, not rounded."""
    experts, vectors = np.asarray(problem.experts), exact(hidden)
    out = np.zeros((len(vectors), problem.down.shape[1]))
    for expert in valid_experts(problem):
        down = exact_expert(problem.down, expert)
        for token, slot in np.argwhere(experts == expert):
            out[token] += float(problem.weights[token, slot]) * (down @ vectors[token, slot])
    return out


def assert_rounded(actual: Any, expected: np.ndarray, dtype: Any) -> None:
    """Whether values are those of float64, but for one rounding to `dtype` and float32 sums."""
    actual = exact(actual)
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    unit = {"bfloat16": 2**-8, "float32": 2**-20}[jnp.dtype(dtype).name]
    size = np.sqrt(np.mean(expected**2)) + 1e-30
    np.testing.assert_array_less(np.abs(actual - expected), unit * np.abs(expected) + 1e-5 * size + 1e-30)

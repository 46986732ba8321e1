"""Random mixtures of experts, and what they compute in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from north_jax.moe import QuantizedExperts, dequantize, quantize

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
    return weights if format == "bfloat16" else quantize(weights, format, parts=parts)


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
        return jnp.asarray(rng.standard_normal(dims, np.float32) * scale, jnp.bfloat16)

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


def exact(weights: Any) -> np.ndarray:
    """The weights' values in float64; float32 holds the product of a value and its scale within 2^-24."""
    whole = dequantize(weights, jnp.float32) if isinstance(weights, QuantizedExperts) else weights
    return np.asarray(whole.astype(jnp.float32)).astype(np.float64)


def hidden_oracle(problem: Problem) -> np.ndarray:
    """The intermediate vectors [T, k, I], not rounded."""
    x, gate_up = exact(problem.x), exact(problem.gate_up)
    experts = np.asarray(problem.experts)
    hidden = np.zeros((*experts.shape, gate_up.shape[1] // 2))
    for (token, slot), expert in np.ndenumerate(experts):
        if 0 <= expert < len(gate_up):
            gate, up = np.split(gate_up[expert] @ x[token], 2)
            hidden[token, slot] = gate / (1 + np.exp(-gate)) * up
    return hidden


def down_oracle(problem: Problem, hidden: np.ndarray) -> np.ndarray:
    """The output [T, D] for these intermediate vectors, not rounded."""
    down, experts = exact(problem.down), np.asarray(problem.experts)
    out = np.zeros((len(hidden), down.shape[1]))
    for (token, slot), expert in np.ndenumerate(experts):
        if 0 <= expert < len(down):
            out[token] += float(problem.weights[token, slot]) * (down[expert] @ hidden[token, slot].astype(np.float64))
    return out


def assert_rounded(actual: Any, expected: np.ndarray, dtype: Any) -> None:
    """Whether values are those of float64, but for one rounding to `dtype` and float32 sums."""
    actual = np.asarray(jnp.asarray(actual).astype(jnp.float32)).astype(np.float64)
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    unit = {"bfloat16": 2**-8, "float32": 2**-20}[jnp.dtype(dtype).name]
    size = np.sqrt(np.mean(expected**2)) + 1e-30
    np.testing.assert_array_less(np.abs(actual - expected), unit * np.abs(expected) + 3e-6 * size + 1e-30)

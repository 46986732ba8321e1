"""How far a layer of experts is from float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from north_jax.layers import Array
from north_jax.moe import QuantizedExperts

from .moe_layers import Inputs, Layer


def oracle(layer: Layer, inputs: Inputs) -> np.ndarray:
    """The first call's output [T, D] in float64, from the weights as they are stored."""
    x, weights = _wide(inputs.x), np.asarray(inputs.weights[0], np.float64)
    experts = np.asarray(inputs.experts[0])
    out = np.zeros(x.shape)
    for expert in np.unique(experts):
        index = jnp.asarray([expert])
        gate_up, down = (_wide(weights_of[index])[0] for weights_of in (layer.gate_up, layer.down))
        for token, slot in np.argwhere(experts == expert):
            gate, up = np.split(gate_up @ x[token], 2)
            out[token] += weights[token, slot] * (down @ (gate / (1 + np.exp(-gate)) * up))
    return out


def errors(actual: Array, expected: np.ndarray) -> dict[str, float]:
    """Distance of [T, D] from float64: relative error, least cosine of a token, and the largest difference."""
    found = _wide(actual)
    norms = np.linalg.norm(found, axis=-1) * np.linalg.norm(expected, axis=-1)
    return {
        "relative_error": float(np.linalg.norm(found - expected) / np.linalg.norm(expected)),
        "least_cosine": float(np.min(np.sum(found * expected, axis=-1) / norms)),
        "largest_difference": float(np.max(np.abs(found - expected))),
        "largest_value": float(np.max(np.abs(expected))),
    }


def measure(run: Callable[..., Array], layer: Layer, inputs: Inputs, expected: np.ndarray) -> dict[str, float]:
    """`errors` of one call of run(x, experts, weights, gate_up, down)."""
    return errors(run(inputs.x, inputs.experts[0], inputs.weights[0], layer.gate_up, layer.down), expected)


def _wide(values: Any) -> np.ndarray:
    assert not isinstance(values, QuantizedExperts)
    return np.asarray(jnp.asarray(values).astype(jnp.float32)).astype(np.float64)

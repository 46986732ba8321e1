"""A float64 NumPy forward pass of `cohere2_moe`, written from the formulas: slow, exact, and independent of north_jax.

It is told plain facts of each layer (`Layer`), not a configuration, so it derives nothing as the code under test does.
`test_golden.py` holds it against Transformers; other tests use it where no golden file fits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

type Array = np.ndarray
BLOCK = 256  # queries whose scores exist at once


@dataclass(frozen=True)
class Layer:
    """What one layer does."""

    heads: int
    kv_heads: int
    rope: bool
    window: int | None  # keys a query sees, its own included


@dataclass(frozen=True)
class Model:
    """What the whole model does."""

    layers: Sequence[Layer]
    centred: bool  # LayerNorm, not RMSNorm
    eps: float
    theta: float
    top_k: int
    router: str  # "sigmoid", "sigmoid, normalised" or "softmax"
    logit_scale: float


def forward(model: Model, params: dict[str, Any], tokens: Array) -> Array:
    """Logits [T, V] float64 of one sequence [T]; `params` as DESIGN.md has them, of any dtype."""
    x = _f64(params["embed"])[tokens]
    for index, layer in enumerate(model.layers):
        weights = params["layers"][index]
        h = _norm(model, x, _f64(weights["norm"]))
        mlp = {name: _f64(value) for name, value in weights["mlp"].items()}
        feed_forward = _moe(model, mlp, h) if "router" in mlp else _swiglu(mlp["gate_up"], mlp["down"], h)
        x = x + _attention(model, layer, _f64(weights["qkv"]), _f64(weights["o"]), h) + feed_forward
    return _norm(model, x, _f64(params["final_norm"])) @ _f64(params["embed"]).T * model.logit_scale


def _f64(value: Any) -> Array:
    return np.asarray(value).astype(np.float64)


def _norm(model: Model, x: Array, weight: Array) -> Array:
    if model.centred:
        x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + model.eps) * weight


def _rotate(x: Array, theta: float) -> Array:  # [T, heads, d]
    """Pairs (2i, 2i + 1) as complex numbers, turned by position · theta^(−2i/d)."""
    length, heads, d = x.shape
    angle = np.arange(length)[:, None] * theta ** (-np.arange(0, d, 2) / d)  # [T, d/2]
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)[:, None]
    return np.stack([turned.real, turned.imag], axis=-1).reshape(length, heads, d)


def _attention(model: Model, layer: Layer, qkv: Array, o: Array, h: Array) -> Array:
    length = len(h)
    d = o.shape[1] // layer.heads
    q, k, v = np.split(
        (h @ qkv.T).reshape(length, -1, d), [layer.heads, layer.heads + layer.kv_heads], axis=1
    )  # [T, heads, d]
    if layer.rope:
        q, k = _rotate(q, model.theta), _rotate(k, model.theta)
    out = np.zeros_like(q)
    for first in range(0, length, BLOCK):
        query = np.arange(first, min(first + BLOCK, length))[:, None]
        key = np.arange(length)
        hidden = key > query
        if layer.window is not None:
            hidden |= query - key >= layer.window
        for head in range(layer.heads):
            kv_head = head // (layer.heads // layer.kv_heads)
            scores = q[query[:, 0], head] @ k[:, kv_head].T / np.sqrt(d)
            out[query[:, 0], head] = _softmax(np.where(hidden, -np.inf, scores)) @ v[:, kv_head]
    return out.reshape(length, -1) @ o.T


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _swiglu(gate_up: Array, down: Array, h: Array) -> Array:
    gate, up = np.split(h @ gate_up.T, 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ down.T


def _moe(model: Model, mlp: dict[str, Array], h: Array) -> Array:
    logits = h @ mlp["router"].T
    experts = np.argsort(-logits, axis=-1, kind="stable")[:, : model.top_k]  # ties: lowest index first
    weights = _ROUTERS[model.router](np.take_along_axis(logits, experts, axis=-1))
    out = np.zeros_like(h)
    for expert, (gate_up, down) in enumerate(zip(mlp["gate_up"], mlp["down"], strict=True)):
        token, rank = np.nonzero(experts == expert)
        out[token] += weights[token, rank, None] * _swiglu(gate_up, down, h[token])
    return out


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


_ROUTERS: dict[str, Callable[[Array], Array]] = {
    "sigmoid": _sigmoid,
    "sigmoid, normalised": lambda x: _sigmoid(x) / _sigmoid(x).sum(axis=-1, keepdims=True),
    "softmax": _softmax,
}

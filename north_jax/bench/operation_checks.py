"""Every operation of a layer by itself: what it left, what is exact for the input that it had, what JAX makes of that.

An operation's input is what the kernel's operations before it have left, so that errors do not add up. Where the
normalised input of a layer is not stored, norm and product are looked at together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from north_jax.compare.measures import errors
from north_jax.config import Config
from north_jax.layers import Array, Params

from . import oracles
from .activations import Activations
from .comparison import FACTOR, FLOOR
from .jax_operations import JaxOperations
from .oracles import HostWeights, f64

_SIGMAS = 3


@dataclasses.dataclass(frozen=True)
class Check:
    """One output of one operation, of B rows.

    Attributes:
      operation: opcodes, joined by + where what lies between them is not stored.
      output: what is compared.
      found: [B, …], the kernel's.
      exact: [B, …] float64.
      theirs: [B, …], JAX's.
      noise: [B, …], standard deviation of what is inferred from rounded values, where it is not read; both sides have
        that much by chance.
    """

    operation: str
    output: str
    found: np.ndarray
    exact: np.ndarray
    theirs: np.ndarray
    noise: np.ndarray | None = None

    def judged(self) -> dict[str, Any]:
        """The row that is worst: its error, JAX's, the most allowed and what part of that it is; at most 1 is right."""
        ours, theirs = (errors(f64(side), self.exact, 0) for side in (self.found, self.theirs))
        chance = 0.0 if self.noise is None else errors(self.exact + self.noise, self.exact, 0)
        allowed = FACTOR * theirs + FLOOR + _SIGMAS * chance
        shares = ours / allowed
        row = int(np.argmax(shares))  # the first NaN, if there is one
        return {
            "operation": self.operation,
            "output": self.output,
            "error": float(ours[row]),
            "jax_error": float(theirs[row]),
            "allowed": float(allowed[row]),
            "of_allowed": float(shares[row]),
            "row": row,
        }


def rounding_step(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """From each value to the next one of `dtype`."""
    exponents = np.floor(np.log2(np.maximum(np.abs(values), np.finfo(np.float32).tiny)))
    return float(jnp.finfo(dtype).eps) * np.exp2(exponents)


def fault(judged: dict[str, Any]) -> str | None:
    """What is wrong, in words. NaN is wrong."""
    if judged["of_allowed"] <= 1:
        return None
    what = f"{judged['operation']}, {judged['output']} of row {judged['row']}"
    return f"{what}: error {judged['error']:.2e}, at most {judged['allowed']:.2e}"


class LayerChecks:
    """The checks of a model's last layer, and of its head."""

    def __init__(self, config: Config, params: Params, layer: int, slots: int) -> None:
        """Of layer `layer`, the last of `params` to run; `config` may be that of a longer model."""
        self._config, self._layer = config, layer
        self._exact = HostWeights(params, layer)
        self._jax = JaxOperations(config, params, layer, slots, self._exact.vocabulary)

    def checks(self, seen: Activations, pool: Array, table: np.ndarray) -> Iterator[Check]:
        """The checks of a step.

        Args:
          seen: what it left.
          pool: [pages, 2, K, PAGE_SIZE, d], the layer's pages after it.
          table: [B, entries] int32, the layer's.
        """
        yield from self._stream(seen)
        stored = seen.hidden is not None
        h = oracles.norm(self._config, f64(seen.residual), self._exact.of_layer("norm"))
        their_h = self._jax.norm(seen.residual)
        if seen.hidden is not None:
            yield Check("ADD_RMSNORM", "HIDDEN", seen.hidden, h, their_h)
            h = their_h = f64(seen.hidden)
        before = "" if stored else "ADD_RMSNORM + "
        yield from self._attention(seen, h, their_h, before, pool, table)
        if seen.router_logits is None:
            yield from self._dense(seen, h, their_h, before)
        else:
            yield from self._experts(seen, seen.router_logits, h, their_h, before)
        yield from self._head(seen)

    def _stream(self, seen: Activations) -> Iterator[Check]:
        """Embedding and sum."""
        operation, start = "ADD_RMSNORM", f64(seen.residual)
        embedding = self._exact.embedding(seen.tokens)
        if seen.hidden is None:
            operation, start = "EMBED + ADD_RMSNORM", embedding
        elif self._layer == 0:
            yield Check("EMBED", "RESIDUAL", seen.residual, embedding, self._jax.embed(seen.tokens))
        if seen.added is not None:
            exact = start + np.sum(seen.added, axis=0)
            # Of the SMs' copies the one that is farthest off.
            worst = np.argmax(np.abs(seen.residual_out - exact).max(axis=(1, 2)))
            yield Check(operation, "RESIDUAL", seen.residual_out[worst], exact, self._jax.add(start, seen.added))

    def _attention(
        self, seen: Activations, h: np.ndarray, their_h: np.ndarray, before: str, pool: Array, table: np.ndarray
    ) -> Iterator[Check]:
        config, jax, rows = self._config, self._jax, len(seen.tokens)
        heads, kv_heads, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        window, positions = config.window(self._layer), seen.positions.tolist()
        qkv = f64(seen.qkv).reshape(rows, -1, d)
        exact = oracles.project_qkv(config, self._layer, h, self._exact.of_layer("qkv"), seen.positions)
        theirs = jax.qkv(their_h, seen.positions)
        parts = {"queries": slice(heads), "keys": slice(heads, heads + kv_heads), "values": slice(-kv_heads, None)}
        for name, part in parts.items():
            yield Check(f"{before}QKV_PROJ", name, qkv[:, part], exact[:, part], theirs[:, part])
        new = qkv[:, heads:].reshape(rows, 2, kv_heads, d)
        yield Check("QKV_PROJ", "keys and values in pages", seen.written, new, new)

        exact = oracles.attention(config, qkv, np.asarray(pool), table, positions, window)
        folded = oracles.fold(f64(seen.partial), f64(seen.stats), positions, window, seen.base)
        yield Check("ATTN_DECODE", "PARTIAL, folded", folded, exact, jax.attention(qkv, pool, table, seen.positions))
        folded = folded.reshape(rows, -1)
        yield Check("ATTN_COMBINE", "ATTENTION", seen.attention, folded, jax.rounded(folded))
        exact = f64(seen.attention) @ self._exact.of_layer("o").T
        yield Check("O_PROJ", "ATTENTION_OUT", seen.attention_out, exact, jax.output(seen.attention))

    def _dense(self, seen: Activations, h: np.ndarray, their_h: np.ndarray, before: str) -> Iterator[Check]:
        exact = oracles.hidden_units(h, self._exact.of_layer("gate_up"))
        theirs = self._jax.hidden(their_h, None)
        yield Check(f"{before}FFN_UPGATE_ACT", "DENSE_HIDDEN", seen.mlp_hidden, exact, theirs)
        exact = f64(seen.mlp_hidden) @ self._exact.of_layer("down").T
        yield Check("FFN_DOWN", "MLP_OUT", seen.mlp_out, exact, self._jax.down(seen.mlp_hidden, None))

    def _experts(
        self, seen: Activations, logits: np.ndarray, h: np.ndarray, their_h: np.ndarray, before: str
    ) -> Iterator[Check]:
        exact = h @ self._exact.of_layer("router").T
        yield Check(f"{before}ROUTER_GEMM", "ROUTER_LOGITS", logits, exact, self._jax.router(their_h))
        # The kernel's own logits choose: they are the input of what follows.
        experts, weights = oracles.route(self._config, f64(logits))
        units = oracles.expert_units(h, experts, self._exact)
        theirs = self._jax.hidden(their_h, logits)
        operation = f"{before}MOE_UPGATE_ACT"

        def fitted(hidden: np.ndarray) -> np.ndarray:
            """[B, k], the weights that the units have in [B, k, I]."""
            return np.sum(hidden * units, axis=2) / np.sum(units * units, axis=2)

        hidden = f64(seen.mlp_hidden)
        step = rounding_step(hidden, seen.mlp_hidden.dtype) / np.sqrt(12)
        noise = np.sqrt(np.sum(np.square(units * step), axis=2)) / np.sum(units * units, axis=2)
        yield Check(operation, "router weights in EXPERT_HIDDEN", fitted(hidden), weights, fitted(theirs), noise)
        yield Check(operation, "EXPERT_HIDDEN", hidden, units * weights[:, :, None], theirs)
        exact = oracles.experts_down(hidden, experts, self._exact)
        yield Check("MOE_DOWN", "MLP_OUT", seen.mlp_out, exact, self._jax.down(hidden, logits))

    def _head(self, seen: Activations) -> Iterator[Check]:
        residual = seen.residual_out[0]
        h = oracles.norm(self._config, f64(residual), self._exact.final_norm())
        their_h, operation = self._jax.final_norm(residual), "ADD_RMSNORM + LM_HEAD"
        if seen.hidden_out is not None:
            yield Check("ADD_RMSNORM", "HIDDEN of the head", seen.hidden_out, h, their_h)
            h = their_h = f64(seen.hidden_out)
            operation = "LM_HEAD"
        exact = h @ self._exact.head().T * self._config.logit_scale
        yield Check(operation, "LOGITS", seen.logits[:, self._exact.vocabulary], exact, self._jax.logits(their_h))

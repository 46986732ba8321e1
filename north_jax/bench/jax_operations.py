"""The model's own functions, one operation at a time: what the kernel's operations are measured beside.

They round where they say that they do: XLA may otherwise leave out a rounding to bfloat16 between two functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from north_jax.attention import paged_attention
from north_jax.config import Config
from north_jax.kv_cache import NO_PAGE
from north_jax.layers import Array, Params, contract, embed, linear, norm, project_qkv, swiglu
from north_jax.moe import gathered_down, gathered_hidden, select_experts

_jit: Callable[..., Any] = partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})


class JaxOperations:
    """Operations of one layer, and of the head, on arrays of the host: B rows in, B rows of float64 out.

    Rows are filled up to `slots`, so that each operation is compiled once.
    """

    def __init__(self, config: Config, params: Params, layer: int, slots: int, vocabulary: np.ndarray) -> None:
        """Of layer `layer`; the head gives the logits of `vocabulary` alone."""
        self._config, self._number, self._slots = config, layer, slots
        self._ends = {name: params[name] for name in ("embed", "final_norm")}
        self._layer: Params = params["layers"][layer]
        self._head = params["embed"][vocabulary]
        self.dtype: np.dtype = params["embed"].dtype

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        return self._run(_embed, tokens, self._ends["embed"])

    def add(self, x: np.ndarray, branches: Sequence[np.ndarray]) -> np.ndarray:
        """x [B, D] and what is added to it, one after the other, as the stream between layers."""
        total = self._filled(x.astype(self.dtype))
        for branch in branches:
            total = _add(total, self._filled(branch.astype(self.dtype)))
        return self._taken(total, len(x))

    def norm(self, x: np.ndarray) -> np.ndarray:
        """x [B, D] of float32, rounded after it."""
        return self._run(partial(_norm, self._config), x.astype(np.float32), self._layer["norm"])

    def final_norm(self, x: np.ndarray) -> np.ndarray:
        return self._run(partial(_norm, self._config), x.astype(np.float32), self._ends["final_norm"])

    def qkv(self, h: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[B, H + 2K, d]."""
        run = partial(_qkv, self._config, self._number, self._layer["qkv"])
        return self._run(run, h.astype(self.dtype), self._filled(positions))

    def attention(self, qkv: np.ndarray, pool: Array, table: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """qkv [B, H + 2K, d], whose keys and values are in their pages already → [B, H, d]."""
        table = self._filled(table, NO_PAGE)
        live = self._filled(np.ones_like(positions))
        run = partial(_attention, self._config.window(self._number))
        queries = qkv[:, : self._config.num_attention_heads].astype(self.dtype)
        return self._run(run, queries, pool, table, self._filled(positions), live)

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """What the weights' type makes of x."""
        return x.astype(self.dtype).astype(np.float64)

    def output(self, mixed: np.ndarray) -> np.ndarray:
        return self._run(_linear, mixed.astype(self.dtype), self._layer["o"])

    def router(self, h: np.ndarray) -> np.ndarray:
        return self._run(_product, h.astype(self.dtype), self._layer["mlp"]["router"])

    def hidden(self, h: np.ndarray, router_logits: np.ndarray | None) -> np.ndarray:
        """[B, F] of a dense layer; [B, k, I] of the experts that the logits choose, times their weights."""
        h, mlp = h.astype(self.dtype), self._layer["mlp"]
        if router_logits is None:
            return self._run(_dense_hidden, h, mlp["gate_up"])
        return self._run(partial(_expert_hidden, self._config), h, mlp, self._filled(router_logits))

    def down(self, hidden: np.ndarray, router_logits: np.ndarray | None) -> np.ndarray:
        hidden, mlp = hidden.astype(self.dtype), self._layer["mlp"]
        if router_logits is None:
            return self._run(_linear, hidden, mlp["down"])
        return self._run(partial(_expert_down, self._config), hidden, mlp, self._filled(router_logits))

    def logits(self, h: np.ndarray) -> np.ndarray:
        return self._run(_product, h.astype(self.dtype), self._head) * self._config.logit_scale

    def _run(self, operation: Callable[..., Array], rows: np.ndarray, *others: Any) -> np.ndarray:
        return self._taken(operation(self._filled(rows), *others), len(rows))

    def _filled(self, rows: np.ndarray, fill: int = 0) -> np.ndarray:
        some = np.full((self._slots - len(rows), *rows.shape[1:]), fill, rows.dtype)
        return np.concatenate([rows, some])

    @staticmethod
    def _taken(rows: Any, count: int) -> np.ndarray:
        return np.asarray(rows)[:count].astype(np.float64)


_linear = _jit(linear)
_product = _jit(partial(contract, "...i,oi->...o"))


@_jit
def _embed(tokens: Array, table: Array) -> Array:
    return embed({"embed": table}, tokens)


@_jit
def _add(x: Array, branch: Array) -> Array:
    return x + branch


@partial(_jit, static_argnums=0)
def _norm(config: Config, x: Array, weight: Array) -> Array:
    return norm(config, x, weight).astype(weight.dtype)


@partial(_jit, static_argnums=(0, 1))
def _qkv(config: Config, layer: int, weight: Array, h: Array, positions: Array) -> Array:
    q, k, v = project_qkv(config, layer, h[:, None], weight, positions[:, None])
    return jnp.concatenate([q, k, v], axis=2)[:, 0]


@partial(_jit, static_argnums=0)
def _attention(window: int | None, queries: Array, pool: Array, table: Array, positions: Array, live: Array) -> Array:
    return paged_attention(queries[:, None], pool, table, positions, live, window)[:, 0]


@_jit
def _dense_hidden(h: Array, gate_up: Array) -> Array:
    return swiglu(contract("...i,oi->...o", h, gate_up)).astype(h.dtype)


@partial(_jit, static_argnums=0)
def _expert_hidden(config: Config, h: Array, mlp: Params, router_logits: Array) -> Array:
    return gathered_hidden(mlp, h, *select_experts(config, router_logits))


@partial(_jit, static_argnums=0)
def _expert_down(config: Config, hidden: Array, mlp: Params, router_logits: Array) -> Array:
    experts, _ = select_experts(config, router_logits)
    return gathered_down(mlp, hidden, experts).astype(hidden.dtype)

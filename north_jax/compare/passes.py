"""What a backend made of a text: the tensors of every layer and the logits, on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config import Config
from ..layers import Array, Params, embed, head
from ..model import block, default_positions, first_of_its_kind
from ..moe import Method

TENSORS = ("q", "k", "v", "attention", "mlp", "output", "router_logits")
"""Of a layer, in the order of their computation; as `forward_with_taps` names them."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """The last S positions of a text.

    Attributes:
      layers: of each layer, name → float32 [S, n]: those of TENSORS that the backend shows, heads side by side. None
        that a layer does not have.
      experts: of each layer, int32 [S, k], ascending; None where it has none, or they are not shown.
      logits: float32 [S, V].
    """

    layers: list[dict[str, np.ndarray]]
    experts: list[np.ndarray | None]
    logits: np.ndarray


def jax_pass(
    config: Config,
    params: Params,
    tokens: np.ndarray,
    last: int,
    dtype: Any,
    method: Method = "auto",
) -> Pass:
    """Runs JAX's whole-sequence pass layer by layer, in any precision.

    Each kind of layer is compiled once and called for all of its layers, with the weights converted inside, so that a
    model of 61 GB runs in float32 on the GPU that holds it.

    Args:
      config: the model's configuration.
      params: DESIGN.md, "Parameters".
      tokens: [T] int32.
      last: S, positions at the end to keep; 1 to T.
      dtype: of weights and activations.
      method: how the experts run; see `moe`.

    Returns:
      all of TENSORS.
    """
    shown: list[dict[str, np.ndarray]] = []
    experts: list[np.ndarray | None] = []
    for x, taps in _layers(config, params, tokens[None], dtype, method):  # noqa: B007, the last x is used
        host = {name: np.asarray(value[0, -last:]) for name, value in taps.items()}
        chosen = host.pop("experts", None)
        experts.append(None if chosen is None else np.sort(chosen, axis=-1))
        shown.append({name: flat(value) for name, value in host.items()})
    return Pass(shown, experts, np.asarray(_logits(config, params, x[0, -last:])))


def next_token_nats(
    config: Config, params: Params, tokens: np.ndarray, dtype: Any, method: Method = "auto"
) -> np.ndarray:
    """What each token costs after those before it, by the same pass.

    Args:
      config, params, dtype, method: as for `jax_pass`.
      tokens: [N, T] int32.

    Returns:
      float32 [N, T − 1].
    """
    for x, _ in _layers(config, params, tokens[:, :-1], dtype, method):  # noqa: B007
        pass
    # A text at a time: logits of all of them are large.
    nats = [_nats(_logits(config, params, one), jnp.asarray(text[1:])) for one, text in zip(x, tokens, strict=True)]
    return np.stack([np.asarray(row) for row in nats])


def flat(value: np.ndarray) -> np.ndarray:
    """[S, …] of any type → float32 [S, n]."""
    return np.asarray(value, np.float32).reshape(len(value), -1)


def _layers(
    config: Config, params: Params, tokens: np.ndarray, dtype: Any, method: Method
) -> Iterator[tuple[Array, dict[str, Array]]]:
    """tokens [N, T] → layer by layer, its output [N, T, D] and its tensors."""
    x = _embed(params["embed"], jnp.asarray(tokens), dtype=dtype)
    for number in range(config.num_hidden_layers):
        like = first_of_its_kind(config, number)
        x, taps = _layer(config, like, method, params["layers"][number], x, dtype=dtype)
        yield x, taps


def _logits(config: Config, params: Params, x: Array) -> Array:
    """x [..., D] → float32 [..., V]."""
    return _head(config, {name: params[name] for name in ("embed", "final_norm")}, x)


@partial(jax.jit, static_argnames="dtype")
def _embed(table: Array, tokens: Array, *, dtype: Any) -> Array:
    return embed({"embed": table}, tokens).astype(dtype)


@partial(jax.jit, static_argnums=(0, 1, 2), static_argnames="dtype")
def _layer(
    config: Config, number: int, method: Method, layer: Params, x: Array, *, dtype: Any
) -> tuple[Array, dict[str, Array]]:
    """x [N, T, D] → the layer's output, and its tensors."""
    taps: dict[str, Array] = {}
    layer = jax.tree.map(lambda a: a.astype(dtype), layer)
    x = block(config, number, layer, x, default_positions(x), method, taps.__setitem__)
    return x, {name: value for name, value in taps.items() if name in (*TENSORS, "experts")}


@jax.jit
def _nats(logits: Array, tokens: Array) -> Array:
    """float32 logits [T, V], tokens [T] → [T]."""
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]


@partial(jax.jit, static_argnums=0)
def _head(config: Config, ends: Params, x: Array) -> Array:
    return head(config, jax.tree.map(lambda a: a.astype(x.dtype), ends), x)

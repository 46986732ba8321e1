"""The whole-sequence forward pass as a pure function of (config, params, tokens): logits, gradients, intermediates."""

from __future__ import annotations

from functools import partial

import jax

from .config import Config
from .layers import Array, Params, embed, head
from .model import Tap, block, default_positions, ignore
from .moe import Method


def hidden_states(
    config: Config,
    params: Params,
    tokens: Array,
    *,
    method: Method = "auto",
    remat: bool = False,
    tap: Tap | None = None,
) -> Array:
    """Runs every layer; the final norm and the head are left to `layers.head`.

    Args:
      config: the model's configuration.
      params: DESIGN.md, "Parameters".
      tokens: [B, T] int32.
      method: how the experts run; see `moe`.
      remat: recompute each layer in the backward pass instead of keeping its intermediates.
      tap: is shown ("embed", x), then ("layers.<i>.<tensor>", value) for the tensors of `model.block`.

    Returns:
      [B, T, D] in the parameters' dtype.

    Raises:
      ValueError: tokens has another rank, or holds no token.
    """
    if tokens.ndim != 2 or not tokens.size:
        raise ValueError(f"tokens has shape {tokens.shape}, expected [B, T] with at least one token")
    x = embed(params, tokens)
    if tap is not None:
        tap("embed", x)
    positions = default_positions(x)
    for i in range(config.num_hidden_layers):
        run = partial(block, config, i, method=method, tap=_of_layer(tap, i))
        x = (jax.checkpoint(run) if remat else run)(params["layers"][i], x, positions)
    return x


def _of_layer(tap: Tap | None, layer: int) -> Tap:
    """A tap of one layer's tensors, which names the layer."""
    return ignore if tap is None else lambda name, value: tap(f"layers.{layer}.{name}", value)


def forward(config: Config, params: Params, tokens: Array, *, method: Method = "auto", remat: bool = False) -> Array:
    """Logits of every position; differentiable in `params`. Jit it with `config`, `method` and `remat` static.

    Args:
      config: the model's configuration.
      params: DESIGN.md, "Parameters".
      tokens: [B, T] int32; a token outside the vocabulary gives NaN.
      method: how the experts run; see `moe`.
      remat: recompute layers in the backward pass instead of keeping their intermediates.

    Returns:
      [B, T, V] float32.
    """
    return head(config, params, hidden_states(config, params, tokens, method=method, remat=remat))


def forward_with_taps(
    config: Config, params: Params, tokens: Array, *, method: Method = "auto"
) -> tuple[Array, dict[str, Array]]:
    """`forward`, and every intermediate tensor by name.

    Returns:
      logits [B, T, V] float32, and a dict of "embed" [B, T, D] and, for each layer i, "layers.<i>.<name>" with name one
      of h, attention, mlp, output [B, T, D]; q [B, T, H, d]; k, v [B, T, K, d]; router_logits [B, T, E] float32 and
      experts [B, T, k] int32 where the layer has experts.
    """
    taps: dict[str, Array] = {}
    x = hidden_states(config, params, tokens, method=method, tap=taps.__setitem__)
    return head(config, params, x), taps

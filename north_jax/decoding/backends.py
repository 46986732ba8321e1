"""Which decoder a model gets."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from ..config import SPARSE, Config
from ..layers import Params
from ..moe import MAX_TOKENS, MAX_TOP_K, SIZE_STEP, QuantizedExperts
from .jax_decoder import JaxDecoder
from .types import BackendError, Decoder

type Backend = Literal["auto", "jax", "warp", "megakernel"]


def make_decoder(config: Config, params: Params, *, backend: Backend, slots: int, max_context: int) -> Decoder:
    """Makes a decoder.

    Args:
      config: the model's configuration.
      params: DESIGN.md, "Parameters".
      backend: "jax" runs everywhere; "warp" is the same with the experts' kernels for few tokens where they are
        compiled, for up to 64 slots of a model in bfloat16; "megakernel" needs code compiled for the device of the
        weights; "auto" is "jax".
      slots: rows of the page tables, the most that decode together.
      max_context: most positions a row may hold.

    Raises:
      BackendError: there is no such backend, it is not part of this installation, or it does not support this model or
        these sizes.
    """
    match backend:
        case "auto" | "jax":
            return JaxDecoder(config, params, slots=slots)
        case "warp":
            _check_warp(config, params, slots)
            return JaxDecoder(config, params, slots=slots, method="warp", backend="warp")
        case "megakernel":
            if _quantized(params):
                raise BackendError("the megakernel does not take experts in eight bits")
            from ..megakernel.decoder import MegakernelDecoder  # it imports this package, and is needed here alone

            return MegakernelDecoder(config, params, slots=slots, max_context=max_context)
        case _:
            raise BackendError(f"backend {backend!r}: expected auto, jax, warp or megakernel")


def _check_warp(config: Config, params: Params, slots: int) -> None:
    """Raises BackendError where `moe.warp_decode` does not take this model's sizes."""
    if SPARSE not in config.mlp_layer_types:
        raise BackendError("the warp backend is for models with experts, and this one has none")
    if slots > MAX_TOKENS:
        raise BackendError(f"the warp backend decodes at most {MAX_TOKENS} slots together, not {slots}")
    if config.num_experts_per_tok > MAX_TOP_K:
        raise BackendError(
            f"the warp backend takes num_experts_per_tok up to {MAX_TOP_K}, not {config.num_experts_per_tok}"
        )
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % SIZE_STEP:
            raise BackendError(
                f"the warp backend needs {name} to be a multiple of {SIZE_STEP}, not {getattr(config, name)}"
            )
    if params["embed"].dtype != jnp.bfloat16:
        raise BackendError(f"the warp backend needs bfloat16 weights, not {params['embed'].dtype.name}")


def _quantized(params: Params) -> bool:
    nodes = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, QuantizedExperts))
    return any(isinstance(node, QuantizedExperts) for node in nodes)

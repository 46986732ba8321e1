"""Which decoder a model gets: chosen by sizes, types and device, before there are weights, and made once there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from ..config import SPARSE, Config
from ..layers import Params
from ..moe import MAX_TOKENS, MAX_TOP_K, SIZE_STEP, QuantizedExperts
from .jax_decoder import JaxDecoder
from .types import BackendError, Decoder

type Backend = Literal["auto", "jax", "warp", "megakernel"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend, and why it is that one."""

    backend: Backend  # any but "auto"
    reason: str


_EIGHT_BITS = "the megakernel does not take experts in eight bits"


def choose_backend(
    config: Config,
    dtype: jnp.dtype | str,
    *,
    backend: Backend,
    slots: int,
    platform: str | None = None,
    quantized: bool = False,
) -> Choice:
    """Names the backend that decodes, or says why the one asked for cannot.

    "auto" is the megakernel on a GPU for which it is compiled, where its pipelined kernel takes the model and so many
    slots, and "jax" everywhere else: also on a CPU, where the megakernel's lists are executed for the sake of tests.

    Args:
      config: the model's configuration.
      dtype: of the weights.
      backend: what was asked for.
      slots: rows that decode together.
      platform: of the device, as JAX calls it; by default that of the first one.
      quantized: whether experts stay in eight bits.

    Raises:
      BackendError: there is no such backend, it is not part of this installation, or it does not support this model or
        these sizes.
    """
    where = platform or jax.devices()[0].platform
    match backend:
        case "auto":
            reason = _EIGHT_BITS if quantized else _against_megakernel(config, dtype, slots, where)
            return Choice("jax", reason) if reason else Choice("megakernel", "its pipelined kernel runs on this GPU")
        case "jax":
            return Choice("jax", "asked for")
        case "warp":
            _check_warp(config, dtype, slots)
            return Choice("warp", "asked for")
        case "megakernel":
            if quantized:
                raise BackendError(_EIGHT_BITS)
            from ..megakernel import support  # it imports this package, and is needed here alone

            support.check(config, dtype, slots=slots, platform=where)
            return Choice("megakernel", "asked for")
        case _:
            raise _unknown(backend)


def make_decoder(config: Config, params: Params, *, backend: Backend, slots: int, max_context: int) -> Decoder:
    """Makes a decoder.

    Args:
      config: the model's configuration.
      params: DESIGN.md, "Parameters".
      backend: "jax" runs everywhere; "warp" is the same with the experts' kernels for few tokens where they are
        compiled, for up to 64 slots of a model in bfloat16; "megakernel" needs code compiled for the device of the
        weights; "auto" is what `choose_backend` says.
      slots: rows of the page tables, the most that decode together.
      max_context: most positions a row may hold.

    Raises:
      BackendError: there is no such backend, it is not part of this installation, or it does not support this model or
        these sizes.
    """
    dtype = params["embed"].dtype
    if backend == "auto":
        choice = choose_backend(config, dtype, backend="auto", slots=slots, quantized=_quantized(params))
        backend = choice.backend
    match backend:
        case "jax":
            return JaxDecoder(config, params, slots=slots)
        case "warp":
            _check_warp(config, dtype, slots)
            return JaxDecoder(config, params, slots=slots, method="warp", backend="warp")
        case "megakernel":
            if _quantized(params):
                raise BackendError(_EIGHT_BITS)
            from ..megakernel.decoder import MegakernelDecoder  # it imports this package, and is needed here alone

            return MegakernelDecoder(config, params, slots=slots, max_context=max_context)
        case _:
            raise _unknown(backend)


def _against_megakernel(config: Config, dtype: jnp.dtype | str, slots: int, platform: str) -> str:
    """Why a server that may choose does not take the megakernel; "" where it does."""
    if platform != "gpu":
        return f"the megakernel is for GPUs, this is a {platform}"
    from ..megakernel import support

    try:
        support.check(config, dtype, slots=slots, platform=platform)
        reason = support.not_pipelined(config, dtype, slots=slots)
    except BackendError as error:
        return str(error)
    return reason and f"the pipelined kernel does not take {reason}"


def _unknown(backend: str) -> BackendError:
    return BackendError(f"backend {backend!r}: expected auto, jax, warp or megakernel")


def _check_warp(config: Config, dtype: jnp.dtype | str, slots: int) -> None:
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
    if jnp.dtype(dtype) != jnp.bfloat16:
        raise BackendError(f"the warp backend needs bfloat16 weights, not {jnp.dtype(dtype).name}")


def _quantized(params: Params) -> bool:
    nodes = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, QuantizedExperts))
    return any(isinstance(node, QuantizedExperts) for node in nodes)

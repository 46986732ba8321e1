"""Which decoder a model gets."""

from __future__ import annotations

from typing import Literal

from ..config import Config
from ..layers import Params
from .jax_decoder import JaxDecoder
from .types import BackendError, Decoder

type Backend = Literal["auto", "jax", "megakernel"]


def make_decoder(config: Config, params: Params, *, backend: Backend, slots: int, max_context: int) -> Decoder:
    """Makes a decoder.

    Args:
      config: the model's configuration.
      params: DESIGN.md, "Parameters".
      backend: "jax" runs everywhere; "megakernel" needs code compiled for the device of the weights; "auto" is "jax".
      slots: rows of the page tables, the most that decode together.
      max_context: most positions a row may hold.

    Raises:
      BackendError: there is no such backend, it is not part of this installation, or it does not support this model or
        these sizes.
    """
    match backend:
        case "auto" | "jax":
            return JaxDecoder(config, params, slots=slots)
        case "megakernel":
            from ..megakernel.decoder import MegakernelDecoder  # it imports this package, and is needed here alone

            return MegakernelDecoder(config, params, slots=slots, max_context=max_context)
        case _:
            raise BackendError(f"backend {backend!r}: expected auto, jax or megakernel")

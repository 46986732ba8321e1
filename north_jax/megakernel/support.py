"""Whether the megakernel decodes a model, asked before there are weights: by sizes and types alone."""

from __future__ import annotations

import jax.numpy as jnp

import ffi

from ..config import Config
from ..decoding import BackendError
from ..model import param_shapes
from .abi import MAX_ROWS
from .binding import add_schedule, make_shape_engine
from .build import BATCHES, build, most_sms
from .selection import choices

GPU_SMS = 128  # lists of a schedule
CPU_SMS = 8


def lists_for(config: Config, platform: str) -> int:
    """Lists of a schedule on a device: one a block on a GPU, few for the threads of a CPU."""
    return min(CPU_SMS if platform == "cpu" else GPU_SMS, most_sms(config))


def check(config: Config, dtype: jnp.dtype | str, *, slots: int, platform: str) -> None:
    """Refuses what the decoder would refuse once it has the weights.

    Args:
      config: the model's configuration.
      dtype: of the weights.
      slots: rows that decode together.
      platform: of the device, as JAX calls it ("cpu", "gpu").

    Raises:
      BackendError: it cannot decode this model, or so many slots, on such a device.
    """
    if slots > MAX_ROWS:
        raise BackendError(f"the megakernel decodes at most {MAX_ROWS} slots together, not {slots}")
    name = {"gpu": "cuda"}.get(platform, platform)
    if not ffi.available(name):
        raise BackendError(f"the megakernel needs compiled code for {name}; this installation: {ffi.build_info()}")
    try:
        build(config, batch=1, sms=lists_for(config, platform), dtype=jnp.dtype(dtype))
    except ValueError as error:
        raise BackendError(str(error)) from error


def not_pipelined(config: Config, dtype: jnp.dtype | str, *, slots: int) -> str:
    """Why a GPU would run one row, or all slots, by the plain kernel instead of the pipelined one; "" if it would not.

    Any installation with a compiled module can tell, also without a GPU. Raises BackendError where none decodes them.
    """
    engine = make_shape_engine(config, param_shapes(config, dtype))
    largest = next(batch for batch in BATCHES if batch >= slots)
    for batch in sorted({1, largest}):
        for _, order in choices(batch):
            schedule = build(config, batch=batch, sms=lists_for(config, "gpu"), dtype=jnp.dtype(dtype), order=order)
            if reason := engine.not_pipelined(add_schedule(engine, schedule)):
                return reason
    return ""

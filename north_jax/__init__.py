"""North Mini Code (`cohere2_moe`) in JAX: load a checkpoint, run it, serve it, study its numerics.

>>> import north_jax
>>> model = north_jax.load("north-nano")
>>> logits = north_jax.forward(model.config, model.params, tokens)  # [B, T] -> [B, T, V]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the private module that defines it; imported on first use, so that `import north_jax` stays quick.
_PUBLIC = {
    "Config": "config",
    "ConfigError": "config",
    "North": "model",
    "param_axes": "model",
    "param_shapes": "model",
    "forward": "forward_pass",
    "forward_with_taps": "forward_pass",
    "PageTables": "kv_cache",
    "PagedRows": "kv_cache",
    "init_cache": "kv_cache",
    "prefill": "inference",
    "decode_step": "inference",
    "SamplingParams": "sampling",
    "generate": "generation",
    "load": "checkpoint",
    "export": "checkpoint",
    "save": "checkpoint",
    "restore": "checkpoint",
}
__all__ = ["__version__", *sorted(_PUBLIC)]

if TYPE_CHECKING:  # what a type checker sees in place of __getattr__
    from .checkpoint import export as export
    from .checkpoint import load as load
    from .checkpoint import restore as restore
    from .checkpoint import save as save
    from .config import Config as Config
    from .config import ConfigError as ConfigError
    from .forward_pass import forward as forward
    from .forward_pass import forward_with_taps as forward_with_taps
    from .generation import generate as generate
    from .inference import decode_step as decode_step
    from .inference import prefill as prefill
    from .kv_cache import PagedRows as PagedRows
    from .kv_cache import PageTables as PageTables
    from .kv_cache import init_cache as init_cache
    from .model import North as North
    from .model import param_axes as param_axes
    from .model import param_shapes as param_shapes
    from .sampling import SamplingParams as SamplingParams


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

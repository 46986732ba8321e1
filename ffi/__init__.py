"""The compiled operations as XLA FFI targets.

The compiled module, `ffi._native`, may be absent, or present without CUDA kernels: `available` says what a platform
has, and a caller without a target uses the operation's pure-JAX form.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

__all__ = ["BuildInfo", "available", "build_info"]


@dataclasses.dataclass(frozen=True)
class BuildInfo:
    """What was compiled when the package was installed."""

    cpu: bool  # C++ operations
    cuda_architectures: tuple[str, ...]  # of the CUDA kernels, such as "sm_90a"; empty without them
    left_out: str  # what was not built, and why; "" for nothing

    def __str__(self) -> str:
        parts = [*(["C++"] if self.cpu else []), *(f"CUDA {name}" for name in self.cuda_architectures)]
        built = f"compiled operations: {', '.join(parts) or 'none, all run as pure JAX'}"
        return f"{built} (without {self.left_out})" if self.left_out else built


def _import_optional(name: str) -> Any:
    """The module, or None if it was not built. A module that was built and does not load is an error."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


@functools.cache
def build_info() -> BuildInfo:
    """What was compiled into this installation."""
    native, build = _import_optional("ffi._native"), _import_optional("ffi._build")
    return BuildInfo(
        cpu=native is not None,
        cuda_architectures=tuple(native.cuda_architectures.split()) if native else (),
        left_out=build.LEFT_OUT if build else "anything compiled: the package runs from source and was not installed",
    )


@functools.cache
def available(platform: str) -> bool:
    """Whether the operations are compiled for `platform` ("cpu" or "cuda"), and registered as FFI targets.

    CUDA kernels that do not fit the GPUs of this process count as absent.
    """
    info = build_info()
    if platform == "cpu":
        return info.cpu and _register("cpu")
    if platform == "cuda":
        return bool(info.cuda_architectures) and _gpus_fit(info.cuda_architectures) and _register("CUDA")
    return False


def _register(platform: str) -> bool:
    """Registers every target of a platform, as JAX spells it; once, since its caller is cached."""
    import jax

    for target, handler in importlib.import_module("ffi._native").handlers()[platform].items():
        jax.ffi.register_ffi_target(target, handler, platform=platform)
    return True


def _gpus_fit(architectures: tuple[str, ...]) -> bool:
    """Whether each GPU of this process runs code for one of `architectures`; true without GPUs, for cross-lowering."""
    import jax

    try:
        gpus = jax.devices("cuda")
    except RuntimeError:  # no CUDA backend in this process
        return True
    capabilities = {name.removeprefix("sm_").rstrip("a") for name in architectures}  # "sm_90a" -> "90"
    return all(gpu.compute_capability.replace(".", "") in capabilities for gpu in gpus)

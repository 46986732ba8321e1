"""What the kernels need to know of the GPU that a computation is lowered for."""

from __future__ import annotations

import jax

_HOPPER = "9.0"
_MULTIPROCESSORS = 132  # of an H100 SXM and an H200, where there is none to ask


def _cuda_device() -> jax.Device | None:
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:  # no such platform here
        return None


def has_cuda() -> bool:
    """Whether this process has a CUDA GPU."""
    return _cuda_device() is not None


def runs_kernels() -> bool:
    """Whether code lowered for CUDA may hold Hopper kernels: not where this process has another kind of CUDA GPU.

    Without a GPU it may: such code is lowered to be looked at, or to run elsewhere.
    """
    device = _cuda_device()
    return device is None or getattr(device, "compute_capability", _HOPPER) == _HOPPER


def multiprocessors() -> int:
    """Multiprocessors of this process' GPU, else those of an H200."""
    return getattr(_cuda_device(), "core_count", None) or _MULTIPROCESSORS

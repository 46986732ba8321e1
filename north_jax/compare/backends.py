"""The ways to compute that are compared: which of them work here, and how each is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np

import ffi

from ..config import Config
from ..decoding import Backend, BackendError, make_decoder
from ..generation import generate
from ..layers import Params
from ..moe import Method
from .compiled_pass import compiled_pass
from .passes import Pass, jax_pass

LABELS = {
    "jax": "JAX, the weights' type",
    "warp": "warp decode",
    "cpu": "CPU executor",
    "cuda": "megakernel",
}
"""Name of a backend → what it is called in results. Each is compared with JAX in float32."""

_SMALL = 2**30  # bytes of weights that are copied to the host without being asked for


@dataclasses.dataclass(frozen=True)
class Subject:
    """One backend and the model as it lies where that runs.

    Attributes:
      name: one of LABELS.
      config: the model's configuration.
      params: DESIGN.md, "Parameters".
    """

    name: str
    config: Config
    params: Params = dataclasses.field(repr=False)

    @property
    def _decoder(self) -> Backend:
        return "jax" if self.name == "jax" else "warp" if self.name == "warp" else "megakernel"

    def run(self, tokens: np.ndarray, last: int) -> Pass:
        """The tensors of the last positions of a text: tokens [T] int32. Raises BackendError."""
        with jax.default_device(_device(self.params)):
            if self._decoder == "megakernel":
                return compiled_pass(self.config, self.params, tokens, last)
            method: Method = "warp" if self.name == "warp" else "auto"
            return jax_pass(self.config, self.params, tokens, last, self.params["embed"].dtype, method)

    def text(self, prompt: Sequence[int], length: int) -> list[int]:
        """The greedy continuation, of exactly so many tokens. Raises BackendError."""
        with jax.default_device(_device(self.params)):
            tokens = generate(self.config, self.params, prompt, length, None, (), backend=self._decoder)
            return list(islice(tokens, length))


def subjects(config: Config, params: Params, names: Sequence[str] | None) -> tuple[list[Subject], dict[str, str]]:
    """What can be compared on this machine.

    Args:
      config: the model's configuration.
      params: DESIGN.md, "Parameters"; all on one device.
      names: of LABELS; None for all that apply where the weights lie (the CPU executor beside a GPU only for a small
        model, since it takes a copy of the weights).

    Returns:
      the subjects, "jax" first, and name → why it was left out.

    Raises:
      BackendError: one that was named does not work here, or there is no backend of that name.
    """
    unknown = [name for name in names or () if name not in LABELS]
    if unknown:
        raise BackendError(f"backend {unknown[0]!r}: expected {', '.join(LABELS)}")
    taken, left_out = [], {}
    for name in LABELS:
        if names is not None and name not in names and name != "jax":
            continue
        reason = _unsuited(params, name, asked=names is not None)
        if reason is None:
            subject = Subject(name, config, _placed(params, name))
            try:
                _try(subject)
                taken.append(subject)
            except BackendError as error:
                reason = str(error)
        if reason is not None:
            if names is not None and name in names:
                raise BackendError(f"{name}: {reason}")
            left_out[name] = reason
    return taken, left_out


def _device(params: Params) -> jax.Device:
    return next(iter(params["embed"].devices()))


def _unsuited(params: Params, name: str, *, asked: bool) -> str | None:
    platform = _device(params).platform
    if name == "cuda" and platform != "gpu":
        return "the weights are not on a GPU"
    if name in ("cpu", "cuda") and not ffi.available(name):
        return f"nothing is compiled for it ({ffi.build_info()})"
    if name == "cpu" and platform == "gpu" and not asked and _bytes(params) > _SMALL:
        return "it would take a copy of the weights; name it in --backends to have it"
    return None


def _bytes(params: Params) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def _placed(params: Params, name: str) -> Params:
    if name != "cpu" or _device(params).platform == "cpu":
        return params
    return jax.device_put(params, jax.devices("cpu")[0])


def _try(subject: Subject) -> None:
    """Raises BackendError where the backend does not take the model."""
    make_decoder(subject.config, subject.params, backend=subject._decoder, slots=1, max_context=64)


def exact_pass(config: Config, params: Params, tokens: np.ndarray, last: int) -> Pass:
    """JAX in float32 on the same, rounded, weights."""
    with jax.default_device(_device(params)):
        return jax_pass(config, params, tokens, last, jnp.float32)

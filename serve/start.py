"""What a start tells: how long its parts took, how far loading is, what runs where, how to try it."""

from __future__ import annotations

import logging
import time

import jax

from north_jax.checkpoint import Checkpoint
from north_jax.decoding import Choice

from .engine.memory import CachePlan
from .options import Options

_LOG = logging.getLogger("serve")


class Start:
    """How long each part of a start took."""

    def __init__(self, begun: float) -> None:
        """Begins the first part, at `begun` on `time.monotonic`'s clock."""
        self._begun = self._last = begun
        self._parts: dict[str, float] = {}

    def done(self, part: str) -> None:
        """Ends a part; the next one begins."""
        now = time.monotonic()
        self._parts[part], self._last = now - self._last, now

    def summary(self, compiled: int, shapes: int) -> str:
        """One line: the parts, and how many sizes of prefill are compiled of how many there will be."""
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._parts.items())
        rest = f"; {shapes - compiled} of {shapes} prefill sizes follow in the background" if compiled < shapes else ""
        return f"ready after {self._last - self._begun:.1f} s: {parts}{rest}"


class LoggedProgress:
    """Progress of loading where there is no terminal to draw a bar on: a line for each tenth."""

    def __init__(self) -> None:
        self._tenths = 0

    def __call__(self, done: int, total: int, name: str, /) -> None:
        tenths = done * 10 // max(total, 1)
        if tenths > self._tenths:
            self._tenths = tenths
            _LOG.info("loading: %d%% of %.2f GB", tenths * 10, total / 1e9)


def device_name() -> str:
    """Platform and kind of the default device."""
    device = jax.devices()[0]
    return device.platform if device.device_kind == device.platform else f"{device.platform} ({device.device_kind})"


def backend_line(choice: Choice) -> str:
    """Which backend decodes, where, and why."""
    return f"backend {choice.backend} on {device_name()}: {choice.reason}"


def summary(options: Options, checkpoint: Checkpoint, plan: CachePlan, backend: str) -> str:
    """Model, device, what decodes, context and slots in one line."""
    weights = jax.tree.leaves(checkpoint.params)
    drawn = "random " if options.random_weights else ""
    return (
        f"model {options.served_model_name}, {drawn}{weights[0].dtype} on {device_name()}, decoding by {backend},"
        f" context {plan.max_context} tokens, {plan.slots} slot{'s' if plan.slots > 1 else ''}"
    )


def curl(model: str, host: str) -> str:
    """A command that streams a chat completion."""
    body = (
        f'{{"model": "{model}", "stream": true, "max_tokens": 200,'
        ' "messages": [{"role": "user", "content": "Write a Python function that reverses a list."}]}'
    )
    return f"curl -N http://{host}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"

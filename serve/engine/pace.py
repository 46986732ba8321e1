"""How prefill and decode share the time while there is both: chunk by chunk, from what they took of late.

Requests that decode wait for a chunk of somebody's prompt between two of their tokens. Two things are kept: that they
never wait longer than a bound (chunks get shorter, as attention to a growing context takes longer), and that decoding
keeps its share of the time (so many steps follow a chunk).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from north_jax.packed.buckets import LEAST, buckets

_NEWEST = 0.5  # weight of the newest step in the mean
_GROWTH = 1.25  # of a chunk over the one before it, at most
_SHRINKAGE = 0.5  # the same, at least: a single long wait may have had another cause
_MOST_STEPS = 32  # after a chunk


class Pace:
    """Sizes of chunks and quanta while prompts are computed beside requests that decode."""

    def __init__(self, *, share: float = 0.2, latency_s: float | None = None) -> None:
        """Nothing is known yet: chunks are as long as they may be, and one step follows each.

        Args:
          share: of the time, that decoding keeps, below 1; a step at least follows every chunk.
          latency_s: seconds between two tokens of a request that decodes, a chunk between them; None for no bound.
        """
        self._share = share
        self._latency = latency_s
        self._step: float | None = None  # seconds, a running mean
        self._gap: float | None = None  # seconds, the last
        self._tokens = math.inf  # of a chunk that the bound allows

    def stepped(self, seconds: float) -> None:
        """A decode step without a chunk before it took so long."""
        self._step = seconds if self._step is None else self._step + _NEWEST * (seconds - self._step)

    def waited(self, tokens: int, seconds: float) -> None:
        """Requests that decode waited so long for a token, for a chunk of so many tokens and the step after it."""
        self._gap = seconds
        if self._latency is None:
            return
        allowed = tokens * self._latency / max(seconds, 1e-9)
        if seconds > self._latency:
            self._tokens = min(self._tokens, max(allowed, tokens * _SHRINKAGE))
        elif allowed > self._tokens:  # a short chunk within the bound says nothing of longer ones
            self._tokens = min(allowed, self._tokens * _GROWTH)

    def room(self, most: int) -> int:
        """Tokens of the next chunk: at most `most`, and else a length that chunks are compiled for."""
        if self._latency is None or self._tokens >= most:
            return most
        return max((length for length in buckets(most) if length <= self._tokens), default=LEAST)

    @property
    def steps(self) -> int:
        """Decode steps until the next chunk."""
        if self._step is None or self._gap is None:
            return 1
        chunk = max(self._gap - self._step, 0.0)
        wanted = math.ceil(self._share / (1 - self._share) * chunk / max(self._step, 1e-9))
        return min(max(wanted, 1), _MOST_STEPS)


class Stopwatch:
    """Tells a pace what chunks and steps take; the engine's thread says when they begin and end.

    A chunk runs on the device while the host goes on, so its time is known when the step after it has come.
    """

    def __init__(self, pace: Pace, clock: Callable[[], float] = time.monotonic) -> None:
        self._pace = pace
        self._clock = clock
        self._chunk: tuple[float, int] | None = None  # when the chunk before the next step began, and its tokens
        self._last: float | None = None  # when the last step of this quantum came

    def prefills(self, tokens: int, *, others: bool) -> None:
        """A chunk begins; `others`: whether requests that decode wait for it."""
        self._chunk = (self._clock(), tokens) if others else None
        self._last = None

    def decodes(self) -> None:
        """A quantum begins."""
        self._last = None

    def step(self) -> None:
        """A step of the quantum has come."""
        now = self._clock()
        if self._chunk is not None:
            begun, tokens = self._chunk
            self._pace.waited(tokens, now - begun)
            self._chunk = None
        elif self._last is not None:
            self._pace.stepped(now - self._last)
        self._last = now

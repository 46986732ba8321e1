"""What chunks and steps take, told to a pace, and where the engine's time goes, for whoever reads the metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from .pace import Pace

PARTS = ("prefill", "decode", "host", "idle")


class Stopwatch:
    """The engine's thread says when something begins and ends.

    A chunk that draws nothing runs on the device while the host goes on: its time is known when the step after it has
    come. Host time is what lies between the end of one device call and the beginning of the next.
    """

    def __init__(self, pace: Pace, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins in idleness.

        Args:
          pace: learns from it.
          clock: gives seconds.
        """
        self._pace = pace
        self._clock = clock
        self._mark = clock()  # up to when all time is accounted for
        self._chunk: tuple[float, int, int] | None = None  # when it began, its size and pairs: before the next step
        self._others = False  # whether requests that decode wait for it
        self._behind = 0  # chunks begun since the device was last known to have nothing to do
        self._stepping = False  # whether a step of this quantum has come
        self._step = 0.0  # seconds, the last one without a chunk before it
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.chunks: Counter[int] = Counter()  # by size

    def _passed(self, part: str) -> float:
        """Accounts for the time until now; gives now."""
        now = self._clock()
        self.seconds[part] += now - self._mark
        self._mark = now
        return now

    def works(self) -> None:
        """There is work again, after the engine waited for some."""
        self._passed("idle")

    def prefills(self, size: int, pairs: int, *, others: bool) -> None:
        """A chunk begins (see `Pace.ran`); `others`: whether requests that decode wait for it."""
        now = self._passed("host")
        self.chunks[size] += 1
        self._behind += 1
        self._chunk = (now, size, pairs) if others or self._behind == 1 else None
        self._others = others

    def prefilled(self, *, drawn: bool) -> None:
        """The call of that chunk is over; `drawn`: and so is the chunk, as what it drew is there."""
        now = self._passed("prefill")
        if not drawn:
            return
        self._behind = 0
        if self._chunk is not None and not self._others:
            begun, size, pairs = self._chunk
            self._chunk = None
            self._pace.ran(size, pairs, now - begun)

    def decodes(self) -> None:
        """A quantum begins."""
        self._passed("host")
        self._stepping = False

    def step(self) -> None:
        """A step of the quantum has come."""
        before, now = self._mark, self._clock()
        seconds, self._mark = now - before, now
        chunk = 0.0
        if self._behind:  # the device began this quantum when it was done with them
            chunk = max(seconds - self._step, 0.0)
        elif self._stepping:
            self._step = seconds
            self._pace.stepped(seconds)
        self.seconds["prefill"] += chunk
        self.seconds["decode"] += seconds - chunk
        if self._chunk is not None and self._others:
            begun, size, pairs = self._chunk
            self._pace.waited(size, pairs, now - begun)
        self._chunk = None
        self._behind = 0
        self._stepping = True

    def decoded(self) -> None:
        """The quantum is over."""
        self._passed("decode")

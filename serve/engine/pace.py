"""How prefill and decode share the time while there is both: chunk by chunk, from what they took of late.

Requests that decode wait for a chunk of somebody's prompt between two of their tokens. Two things are kept: that they
wait no longer than a bound (a chunk has the largest size that fits, step included), and that decoding keeps its share
of the time (so many steps follow a chunk). Within these prompts come first: on a GPU a chunk of 1024 tokens takes
little longer than one of 128, as both read all weights, and a slot that decodes makes every step worth more.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from .chunk_times import ChunkTimes

_STEPS = 5  # the newest ones, whose median counts: where the host was late, some come together
_MOST_STEPS = 32  # after a chunk
_HARDLY = 1.25  # where no size fits: so much longer than the shortest chunk takes


class Pace:
    """Sizes of chunks and quanta while prompts are computed beside requests that decode."""

    def __init__(self, *, share: float = 0.3, latency_s: float | None = None) -> None:
        """Nothing is known yet: chunks are as long as they may be, and two steps follow each.

        Args:
          share: of the time, that decoding keeps, below 1; a step at least follows every chunk.
          latency_s: seconds between two tokens of a request that decodes, a chunk between them; None for no bound.
        """
        self._share = share
        self._latency = latency_s
        self._times = ChunkTimes()
        self._newest: deque[float] = deque(maxlen=_STEPS)  # seconds of steps
        self._step: float | None = None  # their median
        self._chunk: float | None = None  # seconds, the last one that somebody waited for

    def stepped(self, seconds: float) -> None:
        """A decode step without a chunk before it took so long."""
        self._newest.append(seconds)
        self._step = statistics.median(self._newest)

    def waited(self, size: int, pairs: int, seconds: float) -> None:
        """Requests that decode waited so long for a token: for a chunk (see `ran`) and the step after it."""
        self._chunk = max(seconds - (self._step or 0.0), 0.0)
        self._times.ran(size, pairs, self._chunk)

    def ran(self, size: int, pairs: int, seconds: float) -> None:
        """A chunk that nobody waited for took so long.

        Args:
          size: tokens that it was compiled for.
          pairs: of a query and a key that it sees, where no window ends what it sees.
          seconds: until what it drew was known.
        """
        self._times.ran(size, pairs, seconds)

    def room(self, sizes: Sequence[int], most: int, context: int) -> int:
        """Tokens of the next chunk, while others decode.

        Args:
          sizes: that chunks are compiled for.
          most: tokens.
          context: positions before the chunk's first token.

        Returns:
          the largest size that keeps the bound; where none does, the largest that is hardly slower than the least.
        """
        fitting = sorted((size for size in sizes if size <= most), reverse=True)
        if self._latency is None or not fitting:
            return most
        left = self._latency - (self._step or 0.0)
        least = self._expected(fitting[-1], context)
        for size in fitting:
            if self._expected(size, context) <= max(left, _HARDLY * least if least > left else 0.0):
                return size
            self._times.refuse(size)
        return fitting[-1]

    def _expected(self, size: int, context: int) -> float:
        """Seconds of a chunk of one prompt, 0 as long as nothing is known: it is tried."""
        return self._times.expected(size, pairs_of(size, context)) or 0.0

    @property
    def steps(self) -> int:
        """Decode steps until the next chunk."""
        if self._step is None or self._chunk is None:
            return 2  # the second one's time will be known
        wanted = math.ceil(self._share / (1 - self._share) * self._chunk / max(self._step, 1e-9))
        return min(max(wanted, 1), _MOST_STEPS)


def pairs_of(tokens: int, context: int) -> int:
    """Pairs of a query and a key that it sees, of so many tokens behind `context` others."""
    return tokens * context + tokens * (tokens + 1) // 2

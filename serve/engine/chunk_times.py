"""What chunks of prefill take: learned from those that have run, by the size that each was compiled for.

A chunk takes a time that its size decides (weights are read and multiplied, whatever the tokens are) and, where prompts
are long, a time that grows with the pairs of query and key that its full layers attend to. So the model is

    seconds(size, pairs) = base[size] + slope · pairs

with one slope for all sizes: the median of the slopes between any two observations of one size (Theil and Sen's
estimate). A base is the median of a size's newest observations. So a chunk that was slow for another reason (a
compilation beside it, another process) changes nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict, deque

_REMEMBERED = 8  # observations of a size
_NEWEST = 5  # of which a base is the median
_PATIENCE, _SHORT_PATIENCE = 128, 4  # refusals of a size, until it is tried again; where only its first run is known
_UNIT = 1 << 24  # pairs: 1024 tokens at a context of 16K
_APART = 0.05  # units between two observations, for what lies between them to be a slope and not noise


class ChunkTimes:
    """Seconds of a chunk, by size and attention."""

    def __init__(self) -> None:
        self._seen: defaultdict[int, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._begun: dict[int, bool] = {}  # sizes that have run → whether more than once
        self._refused: Counter[int] = Counter()
        self._slope = 0.0  # seconds a _UNIT of pairs

    def ran(self, size: int, pairs: int, seconds: float) -> None:
        """A chunk of that size took so long. What its first run says, which loads its code, the second one replaces."""
        self._refused[size] = 0
        if self._begun.get(size) is False:
            self._seen.pop(size, None)
        self._begun[size] = size in self._begun
        self._seen[size].append((pairs / _UNIT, seconds))
        slopes = [
            (two[1] - one[1]) / (two[0] - one[0])
            for seen in self._seen.values()
            for one, two in itertools.combinations(seen, 2)
            if abs(two[0] - one[0]) > _APART
        ]
        if slopes:
            self._slope = max(statistics.median(slopes), 0.0)

    def expected(self, size: int, pairs: int) -> float | None:
        """Seconds that such a chunk will take; None as long as nothing is known of any."""
        base = self._base(size)
        return None if base is None else base + self._slope * pairs / _UNIT

    def refuse(self, size: int) -> None:
        """Notes that a size was too slow to be used. Now and then that is forgotten: it may have become faster."""
        self._refused[size] += 1
        if self._refused[size] >= (_PATIENCE if self._begun.get(size) else _SHORT_PATIENCE):
            self._refused[size] = 0
            self._seen.pop(size, None)

    def _base(self, size: int) -> float | None:
        """Of a size that has not run: on the line between its neighbours; beyond the last, half in proportion."""
        if size in self._seen:
            return self._own(size)
        below, above = [other for other in self._seen if other < size], [other for other in self._seen if other > size]
        if below and above:
            low, high = max(below), min(above)
            part = (size - low) / (high - low)
            return (1 - part) * self._own(low) + part * self._own(high)
        if not self._seen:
            return None
        nearest = max(below) if below else min(above)
        return self._own(nearest) * (1 + size / nearest) / 2

    def _own(self, size: int) -> float:
        newest = list(self._seen[size])[-_NEWEST:]
        return max(statistics.median_low(seconds - self._slope * units for units, seconds in newest), 0.0)

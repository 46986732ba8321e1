"""Which of the possible sizes of a chunk a server compiles, and in which order.

On a GPU a chunk reads all weights, so that few tokens take as long as several hundred: on an H200 128 tokens of North
Mini Code take 19.3 ms, 512 take 23.8, 1024 28, 2048 38 and 4096 70. Sizes close to each other cost a start seconds each
and save next to nothing below 2048 tokens. Powers of two are enough there, and from 512 on the sizes half-way between
them: up to 4096 tokens a prompt then takes less than 15% longer than in a size of its own length, on average over an
octave. On a CPU time grows with the tokens, and all sizes are worth it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_CLOSE = 2048  # from here on every size is worth it
_HALVES = 512  # from here on sizes half-way between powers of two
_USUAL = 1024  # tokens of a chunk that is likely: sizes near it come first


def chosen(lengths: Sequence[int], platform: str) -> tuple[int, ...]:
    """Sizes to compile, in order of need.

    Args:
      lengths: possible sizes, ascending.
      platform: "gpu", or another where time grows with the tokens.

    Returns:
      Some of them: the best one to run every short chunk in and the longest, without which nothing runs; then powers
      of two and then the others, each by their distance from a usual chunk.
    """
    if platform == "gpu":
        lengths = [length for length in lengths if length >= _CLOSE or _is_worth(length) or length == lengths[-1]]
        short = next((length for length in lengths if length >= _USUAL), lengths[-1])
    else:
        short = lengths[0]
    first = dict.fromkeys((short, lengths[-1]))

    def need(length: int) -> tuple[bool, float, int]:
        return not _is_power(length), abs(math.log2(length / _USUAL)), -length

    return (*first, *sorted((length for length in lengths if length not in first), key=need))


def _is_power(length: int) -> bool:
    return length & (length - 1) == 0


def _is_worth(length: int) -> bool:
    return _is_power(length) or (length > _HALVES and length % 3 == 0 and _is_power(length // 3))

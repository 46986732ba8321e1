"""The lengths that chunks are compiled for: few, and close enough to each other that padding stays cheap."""

from __future__ import annotations

from collections.abc import Sequence

LEAST = 64  # tokens of the smallest chunk


def buckets(most: int) -> tuple[int, ...]:
    """Lengths from LEAST to `most` tokens, ascending.

    Up to 4096 tokens four to an octave, at eighths of a power of two: a length there is padded by a ninth on average,
    by a quarter at most. Above it two to an octave: such a chunk is mostly the last of a longer prompt. What is shorter
    than LEAST takes as long as LEAST: the weights have to be read.

    Args:
      most: the longest, a multiple of LEAST.

    Raises:
      ValueError: `most` is no multiple of LEAST.
    """
    if most < LEAST or most % LEAST:
        raise ValueError(f"the longest chunk must be a multiple of {LEAST} tokens, got {most}")
    lengths = []
    octave = LEAST
    while octave < most:
        parts = (8, 10, 12, 14) if octave < 4096 else (8, 12)
        lengths += [octave * part // 8 for part in parts if octave * part // 8 % LEAST == 0]
        octave *= 2
    return (*(length for length in lengths if length < most), most)


def bucket_of(lengths: Sequence[int], tokens: int) -> int:
    """The shortest of the ascending `lengths` that holds so many tokens. Raises ValueError where none does."""
    for length in lengths:
        if length >= tokens:
            return length
    raise ValueError(f"{tokens} tokens exceed the longest chunk of {lengths[-1]}")


def chunks_of(tokens: int, most: int) -> list[int]:
    """Tokens of each chunk of a prompt: as long as they may be, and the rest."""
    full, rest = divmod(tokens, most)
    return [most] * full + ([rest] if rest else [])

"""Several pieces of prompts behind each other in one row of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..kernels.query_tiles import TOKEN_ALIGN


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that are appended to one prompt.

    Attributes:
      tokens: at least one.
      start: positions the prompt holds already.
    """

    tokens: Sequence[int] | np.ndarray
    start: int


class Packed(NamedTuple):
    """A chunk of T tokens and up to N pieces, host arrays of int32."""

    tokens: np.ndarray  # [T]
    offset: np.ndarray  # [N], where each piece begins in `tokens`, a multiple of TOKEN_ALIGN
    start: np.ndarray  # [N], the position of its first token
    length: np.ndarray  # [N], its tokens, 0 for no piece


def packed_length(lengths: Sequence[int], *, following: bool = False) -> int:
    """Tokens that pieces of these lengths take in a chunk; `following`: up to where another piece may begin."""
    aligned = sum(map(_aligned, lengths))
    return aligned if following or not lengths else aligned - _aligned(lengths[-1]) + lengths[-1]


def pack(pieces: Sequence[Piece], *, tokens: int, rows: int) -> Packed:
    """Puts pieces into a chunk.

    Args:
      pieces: in the order of the rows.
      tokens: T.
      rows: N.

    Raises:
      ValueError: there are more pieces than rows, a piece is empty, or they do not fit.
    """
    if len(pieces) > rows:
        raise ValueError(f"{len(pieces)} pieces in a chunk of {rows} rows")
    packed = Packed(np.zeros(tokens, np.int32), *np.zeros((3, rows), np.int32))
    at = 0
    for row, piece in enumerate(pieces):
        length = len(piece.tokens)
        if not length:
            raise ValueError(f"piece {row} has no tokens")
        if at + length > tokens:
            needed = packed_length([len(piece.tokens) for piece in pieces])
            raise ValueError(f"the pieces need {needed} tokens, the chunk has {tokens}")
        packed.tokens[at : at + length] = piece.tokens
        packed.offset[row], packed.start[row], packed.length[row] = at, piece.start, length
        at += _aligned(length)
    return packed


def _aligned(length: int) -> int:
    return -(-length // TOKEN_ALIGN) * TOKEN_ALIGN

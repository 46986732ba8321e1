"""Pieces of prompts behind each other in one chunk."""

from __future__ import annotations

import numpy as np
import pytest

from north_jax.packed import Piece, pack, packed_length


def test_pieces_lie_behind_each_other_at_aligned_places():
    packed = pack([Piece([1, 2, 3], 40), Piece(range(10, 18), 0), Piece([7], 9)], tokens=64, rows=4)
    assert packed.offset.tolist() == [0, 8, 16, 0]
    assert packed.start.tolist() == [40, 0, 9, 0]
    assert packed.length.tolist() == [3, 8, 1, 0]
    assert packed.tokens[:17].tolist() == [1, 2, 3, 0, 0, 0, 0, 0, *range(10, 18), 7]
    assert not packed.tokens[17:].any() and packed.tokens.dtype == np.int32


def test_length():
    assert packed_length([]) == packed_length([], following=True) == 0
    assert packed_length([3, 8, 1]) == 17
    assert packed_length([3, 8, 1], following=True) == 24


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([Piece([1], 0)] * 3, "3 pieces in a chunk of 2 rows"),
        ([Piece([], 0)], "piece 0 has no tokens"),
        ([Piece([1] * 60, 0), Piece([1], 0)], "need 65 tokens, the chunk has 64"),
    ],
)
def test_what_does_not_fit_is_refused(pieces, message):
    with pytest.raises(ValueError, match=message):
        pack(pieces, tokens=64, rows=2)

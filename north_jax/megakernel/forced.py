"""The compiled decode along given texts: each step is told its tokens, and leaves what it computed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..decoding import DecodeRow
from ..prompt_rows import PromptRows
from ..sampling import SamplingParams
from .decoder import MegakernelDecoder

_GREEDY = SamplingParams(temperature=0)


def forced(decoder: MegakernelDecoder, rows: PromptRows, tokens: np.ndarray, first: int) -> Iterator[int]:
    """Decodes N texts of one length a step at a time; JAX computes their beginnings.

    Args:
      decoder: compiled for `rows`.
      rows: at least N; what they held is lost.
      tokens: [N, T] int32.
      first: position of the first token that is decoded; 0 for all of them.

    Yields:
      the position of the tokens that a step was fed, while `decoder.logits` and `decoder.activations` show what it made
      of them.
    """
    count, length = tokens.shape
    rows.prefill([text[:first].tolist() for text in tokens] + [[]] * (rows.count - count))
    for position in range(first, length):
        fed = []
        for row, token in enumerate(tokens[:, position].tolist()):
            rows.grow(row, position, position + 1)
            fed.append(DecodeRow(row, token, position, 1, frozenset(), _GREEDY))
        rows.cache = decoder.decode(rows.cache, rows.tables(), fed, 1, lambda records: None)
        yield position

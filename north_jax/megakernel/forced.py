"""The compiled decode along given texts: each step is told its tokens, and leaves what it computed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..config import Config
from ..decoding import DecodeRow
from ..layers import Params
from ..prompt_rows import PromptRows
from ..sampling import SamplingParams
from .decoder import MegakernelDecoder

_GREEDY = SamplingParams(temperature=0)


class ForcedDecode:
    """N texts of one length, of which JAX computes the beginnings and the compiled decode the rest."""

    def __init__(self, config: Config, params: Params, tokens: np.ndarray, first: int, *, planes: int = 2) -> None:
        """Computes the beginnings and compiles the decode.

        Args:
          config: the model's configuration.
          params: DESIGN.md, "Parameters".
          tokens: [N, T] int32.
          first: position of the first token that is decoded; 0 for all of them.
          planes: as for `MegakernelDecoder`.

        Raises:
          BackendError: the megakernel does not take this model or so many rows, or is not compiled.
        """
        rows, length = tokens.shape
        self._tokens, self._first = tokens, first
        self.decoder = MegakernelDecoder(config, params, slots=rows, max_context=length, planes=planes)
        self.rows = PromptRows(config, params, rows=rows, max_context=length)
        if first:
            self.rows.prefill([text[:first].tolist() for text in tokens])
        self.decoder.compile(self.rows.cache, self.rows.tables())

    def __iter__(self) -> Iterator[int]:
        """Runs a step at a time; yields the position of its tokens, while `decoder` shows what it computed."""
        for position in range(self._first, self._tokens.shape[1]):
            fed = []
            for row, token in enumerate(self._tokens[:, position].tolist()):
                self.rows.grow(row, position, position + 1)
                fed.append(DecodeRow(row, token, position, 1, frozenset(), _GREEDY))
            self.rows.cache = self.decoder.decode(self.rows.cache, self.rows.tables(), fed, 1, lambda records: None)
            yield position

"""Token ids to text while they are being generated."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from .tokenizer import Tokenizer


class Detokenizer:
    """Turns one sequence of ids into text, piece by piece, at constant cost per token.

    What `push` and `flush` return, joined, is `Tokenizer.decode` of all ids. A character whose bytes are not complete
    is held back; text once given is never changed. Special tokens are spelled.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strips_first_space

    def push(self, id: int) -> str:
        """The text that `id` completes, often "" in the middle of a character."""
        data = self._tokenizer.token_bytes(id)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def push_many(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete, in order."""
        return "".join([self.push(id) for id in ids])

    def flush(self) -> str:
        """What was held back, as U+FFFD: call it once no id follows."""
        return self._decoder.decode(b"", final=True)

"""From demands to grammars that follow an answer token by token, by llguidance."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask

from north_jax.adjust import mask_words
from north_jax.text import Marker, Tokenizer

from .demand import Demand, Described
from .gate import Gate, Masks


class DemandError(ValueError):
    """A demand that cannot be enforced; `field` names the part of the request that it comes from."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class GrammarCompiler:
    """Compiles demands for one checkpoint. One thread at a time uses it; what it gives may go to any."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Collection[int]) -> None:
        """Remembers the tokens.

        Args:
          tokenizer: of the checkpoint.
          vocab_size: rows of the embedding, which may be more than the tokenizer's tokens.
          stop_token_ids: those that end an answer.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_token_ids = stop_token_ids

    def gates(self, demand: Demand, count: int, *, thinking: bool) -> list[Gate]:
        """A gate for each of `count` choices, whose answers begin inside thinking or after it. Raises DemandError."""
        text, action = (None if part is None else self._matcher(part) for part in (demand.text, demand.action))
        return [
            Gate(
                self._masks,
                demand,
                text=text and text.deep_copy(),
                action=action and action.deep_copy(),
                thinking=thinking,
            )
            for _ in range(count)
        ]

    def _matcher(self, described: Described) -> LLMatcher:
        matcher = LLMatcher(self._llguidance, LLMatcher.grammar_from_lark(described.lark), log_level=0)
        if matcher.is_error():
            # Its first line says what is wrong, after the place in a grammar that the client has not written.
            reason = matcher.get_error().partition("\n   1 |")[0].rpartition("failed to compile JSON schema: ")[2]
            raise DemandError(f"the schema cannot be enforced: {' '.join(reason.split())[:200]}", described.field)
        if not self._begins(matcher.deep_copy()):
            raise DemandError("the schema cannot be enforced: nothing can begin an answer to it", described.field)
        return matcher

    def _begins(self, matcher: LLMatcher) -> bool:
        """Whether any answer is allowed: a schema that is nothing but a reference to itself compiles, and allows none."""
        bits = np.zeros((1, mask_words(self._vocab_size)), np.int32)
        fill_next_token_bitmask(matcher, bits, 0)
        return not matcher.is_error() and (bool(bits.any()) or matcher.is_accepting())

    @cached_property
    def _llguidance(self) -> LLTokenizer:  # made when it is first needed: it reads the whole vocabulary
        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size)), n_vocab=self._vocab_size)

    @cached_property
    def _masks(self) -> Masks:
        markers = self._tokenizer.marker_ids
        spoken = (id for id in range(self._tokenizer.vocab_size) if self._tokenizer.token_bytes(id))
        return Masks(
            ordinary=self._mask(id for id in spoken if id not in self._tokenizer.control),
            markers={marker: self._mask([id]) for marker, id in markers.items()},
            ids={id: marker for marker, id in markers.items()},
            stop=self._mask([*self._stop_token_ids, markers[Marker.END_OF_TURN]]),
        )

    def _mask(self, ids: Iterable[int]) -> np.ndarray:
        bits = np.zeros(mask_words(self._vocab_size) * 32, bool)
        bits[list(ids)] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)


class _Vocabulary:
    """The tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        self.eos_token_id = tokenizer.marker_ids[Marker.END_OF_TURN]
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.control)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode_text(text.decode("utf-8", "replace"))

"""The interface of a decoder: what a quantum is given, what comes out of it at each step, who may end it early."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np

from ..kv_cache import KVCache, PageTables
from ..logprobs import Logprobs
from ..sampling import SamplingParams


class BackendError(ValueError):
    """A backend cannot decode here: it is not compiled, or does not support the model's geometry or the slots."""


class Finish(IntEnum):
    """Why a row ended at a step."""

    NONE = 0  # it goes on
    STOP = 1  # a stop token was drawn
    LENGTH = 2  # `remaining` tokens were drawn
    CANCELLED = 3
    ERROR = 4  # the logits were not finite


class TokenRecord(NamedTuple):
    """One step of one row."""

    slot: int
    token: int  # the one drawn, also a stop token; -1 for CANCELLED and ERROR
    finish: Finish
    logprobs: Logprobs | None = None  # where the row asked for them and drew a token


class TokenHistory:
    """What one request has said: the tokens that penalties look at. Made once a request, and the same object after."""

    def __init__(self, prompt: Sequence[int], generated: Iterable[int] = ()) -> None:
        """Begins a history.

        Args:
          prompt: token ids.
          generated: those drawn so far, in order. Whoever draws a token for a row with a history appends it: a decoder
            does so before it delivers the token's record, also to a row without penalties.
        """
        self.prompt: Sequence[int] = prompt
        self.generated: list[int] = list(generated)


class Grammar(Protocol):
    """Which tokens one row may draw next. Called in the thread that decodes; what it raises ends the quantum."""

    def mask(self) -> np.ndarray:
        """The tokens allowed now: [mask_words(V)] uint32, bit i % 32 of word i // 32 for token i.

        At least one must be allowed: a row without any ends with ERROR. Stop tokens have to be allowed to be drawn.
        """

    def accept(self, token: int) -> None:
        """Takes the token that the row drew, also one that ended it. Called once for each, before its record is out."""


type Deliver = Callable[[list[TokenRecord]], None]


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A row at the start of a quantum."""

    slot: int  # its row of the page tables
    token: int  # its newest token, not yet in the cache
    position: int  # positions the slot holds already
    remaining: int  # tokens it may still generate, >= 1
    stop_token_ids: frozenset[int]  # none of them for a row that ignores the end of the text
    sampling: SamplingParams
    history: TokenHistory | None = None  # needed where `sampling.penalises`; ends with `token`
    grammar: Grammar | None = None  # has accepted `token`; a quantum waits for its mask before each step


class Decoder(Protocol):
    """Runs decode steps. One thread calls `compile` and `decode`; `stop` and `cancel` may come from any.

    `stop` and `cancel` concern the running quantum alone: `decode` forgets, as it begins, every call that came before.
    So none is carried into a later quantum, where the slot may be another request's, and one that comes between the
    decision to decode and `decode` itself has no effect. The caller of `decode` therefore keeps its own note of what
    it wants and repeats it from `deliver`, during which a quantum certainly runs: then nothing is lost, and nothing is
    late by more than a step.
    """

    backend: str  # the name `make_decoder` knows it by
    max_rows: int  # slots it was made for
    sizes: tuple[int, ...]  # ascending: a quantum that begins with n rows takes the time of the least of them >= n

    def compile(self, cache: KVCache, tables: PageTables) -> None:
        """Compiles for this cache and tables of these shapes; neither is changed. Must come before `decode`."""

    def decode(
        self, cache: KVCache, tables: PageTables, rows: Sequence[DecodeRow], steps: int, deliver: Deliver
    ) -> KVCache:
        """Runs a quantum: up to `steps` steps, fewer when every row has ended or `stop` is called. Blocks until then.

        A step appends each live row's newest token to the cache and draws the next one: `adjust.adjust` with the row's
        penalties, bias and grammar, then `sampling.sample` for the position it will take. A row that ended is idle for
        the rest of the quantum.

        Args:
          cache: donated: the caller uses the one returned instead.
          tables: page numbers of all slots, [max_rows, entries] int32. A row's must hold pages for its positions up to
            position + min(steps, remaining).
          rows: the live rows, each of a slot of its own; every other slot is idle.
          steps: at least 1.
          deliver: called in the calling thread, once a step, in order, with a record of every row that was live when
            the step began.

        Returns:
          the updated cache.

        Raises:
          ValueError: the rows are not those of different slots below max_rows, a row that penalises has no history, or
            a bias names a token outside the vocabulary.
          Exception: of the device or of `deliver`; it ends the quantum, and the cache is lost.
        """

    def stop(self) -> None:
        """Ends the running quantum after its current step. Thread-safe; never blocks."""

    def cancel(self, slot: int) -> None:
        """Ends a row of the running quantum with CANCELLED at its next step; the others go on as if it had not.

        Thread-safe; never blocks. A slot without a live row is ignored. A quantum that ends before that step leaves
        the row as it is.
        """


def finish_of(token: int, remaining: int, stop_token_ids: frozenset[int]) -> Finish:
    """What a drawn token means for its row.

    Args:
      token: as `sampling.sample` gives it, -1 where the logits were not finite.
      remaining: tokens the row may still generate, this one included.
      stop_token_ids: the row's.
    """
    if token < 0:
        return Finish.ERROR
    if token in stop_token_ids:
        return Finish.STOP
    return Finish.LENGTH if remaining <= 1 else Finish.NONE

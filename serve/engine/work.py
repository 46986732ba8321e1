"""What the scheduler asks of the device: chunks of prompts, or a quantum of decode steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from north_jax.decoding import DecodeRow, Draw, Drawn
from north_jax.logprobs import Logprobs

from .pace import pairs_of


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A chunk of one prompt."""

    slot: int
    tokens: tuple[int, ...]
    start: int  # positions the slot holds already
    draw: Draw | None  # after the chunk that ends the prompt
    following: tuple[int, ...] | None = None  # the tokens after each of `tokens`, to be reported; such a row runs alone
    alternatives: int = 0  # with so many others


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Chunks of several prompts, run together."""

    rows: tuple[PrefillRow, ...]

    @property
    def pairs(self) -> int:
        """Of a query and a key that it sees, where no window ends what it sees."""
        return sum(pairs_of(len(row.tokens), row.start) for row in self.rows)

    @property
    def draws(self) -> bool:
        """Whether one of the prompts ends here."""
        return any(row.draw is not None for row in self.rows)


class Prefilled(NamedTuple):
    """The results of a prefill, by slot."""

    drawn: Mapping[int, Drawn]  # for every row with a `draw`
    reported: Mapping[int, Sequence[Logprobs]]  # for every row with `following`, one each


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """A quantum of decode steps over the slots whose prompts are in the cache; their pages have room for it."""

    rows: tuple[DecodeRow, ...]
    steps: int


type Work = PrefillWork | DecodeWork

"""What the scheduler asks of the device: chunks of prompts, or a quantum of decode steps."""

from __future__ import annotations

from dataclasses import dataclass

from north_jax.decoding import DecodeRow, Draw


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A chunk of one prompt."""

    slot: int
    tokens: tuple[int, ...]
    start: int  # positions the slot holds already
    draw: Draw | None  # after the chunk that ends the prompt


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Chunks of several prompts, run together."""

    rows: tuple[PrefillRow, ...]


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """A quantum of decode steps over the slots whose prompts are in the cache; their pages have room for it."""

    rows: tuple[DecodeRow, ...]
    steps: int


type Work = PrefillWork | DecodeWork

"""How dynamic work is divided: pure functions of lengths and routing that every SM evaluates alike.

The C++ and CUDA form is csrc/megakernel/division.h; tests/megakernel/test_division.py compares the two. Attention is
split at multiples of pages that depend on the row's own length alone, so a row's result does not depend on its
neighbours. Experts are walked in ascending id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..kv_cache import PAGE_SIZE, pages_for
from .abi import MAX_SPLITS


class Splits(NamedTuple):
    """How the keys that one query sees are split."""

    number: int
    first_page: int
    pages: int  # of each split,
    extra: int  # and one more of so many first ones
    begin: int  # first visible position
    end: int  # one past the last, the query's own

    def positions(self, split: int) -> range:
        """Positions of one split, never none."""
        page = self.first_page + split * self.pages + min(split, self.extra)
        after = page + self.pages + (split < self.extra)
        return range(max(self.begin, page * PAGE_SIZE), min(self.end, after * PAGE_SIZE))


def attention_splits(position: int, window: int) -> Splits:
    """Splits of a query at `position` that sees `window` keys, 0 for all.

    At most MAX_SPLITS, of whole pages, as even as that allows, so that no SM has more to read than another.
    """
    begin = max(position + 1 - window, 0) if window else 0
    first_page = begin // PAGE_SIZE
    total = pages_for(position + 1) - first_page
    number = min(total, MAX_SPLITS)
    return Splits(number, first_page, total // number, total % number, begin, position + 1)


class AttentionItem(NamedTuple):
    """One split of one KV head of one row."""

    row: int
    head: int
    split: int


def attention_items(positions: Sequence[int], live: Sequence[bool], kv_heads: int, window: int) -> list[AttentionItem]:
    """The items of one layer's attention in their order: by row, then KV head, then split. Idle rows have none."""
    return [
        AttentionItem(row, head, split)
        for row, position in enumerate(positions)
        if live[row]
        for head in range(kv_heads)
        for split in range(attention_splits(position, window).number)
    ]


class Routes(NamedTuple):
    """A batch's assignments of rows to experts, sorted by expert and then by number (row · k + j)."""

    experts: np.ndarray  # [active] int32, ascending
    first: np.ndarray  # [active + 1] int32: sorted assignments first[r] … first[r + 1] − 1 go to experts[r]
    assignments: np.ndarray  # [assignments] int32


def routes(experts: np.ndarray, live: Sequence[bool]) -> Routes:
    """Sorts the choices experts [B, k] int32 of the live rows."""
    k = experts.shape[1]
    numbers = np.arange(experts.size, dtype=np.int32)
    numbers = numbers[np.repeat(np.asarray(live, bool), k)]
    chosen = experts.reshape(-1)[numbers]
    order = np.argsort(chosen, kind="stable")
    active, first = np.unique(chosen[order], return_index=True)
    return Routes(active.astype(np.int32), np.append(first, len(order)).astype(np.int32), numbers[order])


def routes_size(experts: int, assignments: int) -> int:
    """int32 of the ROUTES buffer.

    The number of active experts; `experts` entries of Routes.experts; `experts` + 1 of Routes.first; the assignments.
    """
    return 1 + experts + experts + 1 + assignments


class ExpertItem(NamedTuple):
    """One tile of one active expert."""

    rank: int
    tile: int


def expert_items(active: int, tiles: int) -> list[ExpertItem]:
    """The items of `active` experts of `tiles` tiles each, in their order."""
    return [ExpertItem(rank, tile) for rank in range(active) for tile in range(tiles)]


def dealt(items: int, dealer: int, dealers: int, rounds: tuple[int, int]) -> range:
    """Numbers of the items that go to one dealer in the rounds [first, end)."""
    first, end = rounds
    return range(min(dealer + first * dealers, items), min(items, dealer + end * dealers), dealers)

"""How often each slot's row has said each token, on the device, for penalties."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp

from ..adjust import count
from ..layers import Array
from .types import TokenHistory


class HistoryCounts:
    """A table [slots, V] int32 of `adjust.count`, made when it is first taken. One thread uses it.

    A row is counted on the host, and sent, only when its history is another object than before or has grown by tokens
    that were not drawn through the table.
    """

    def __init__(self, slots: int, vocabulary: int, device: jax.Device | None = None) -> None:
        self._shape = slots, vocabulary
        self._device = device
        self._table: Array | None = None
        self._counted: dict[int, tuple[TokenHistory, int]] = {}  # by slot: of which history, and of how many tokens

    def take(self, histories: Mapping[int, TokenHistory]) -> Array:
        """The table, in which the rows of these slots are up to date. `put` gives it back, after it may be donated."""
        table, self._table = self._table, None
        if table is None:
            table = jnp.zeros(self._shape, jnp.int32, device=self._device)
            self._counted.clear()
        for slot, history in histories.items():
            known, length = self._counted.get(slot, (None, 0))
            if known is not history or length != len(history.generated):
                table = _set_row(table, slot, count(history.prompt, history.generated, self._shape[1]))
                self._counted[slot] = history, len(history.generated)
        return table

    def put(self, table: Array) -> None:
        """The table after a use, in which what was drawn is counted: `drew` tells of it."""
        self._table = table

    def drew(self, slot: int, history: TokenHistory, token: int, *, counted: bool) -> None:
        """Appends a token to a history; `counted` says whether the table has it already."""
        history.generated.append(token)
        if counted:
            self._counted[slot] = history, len(history.generated)

    def forget(self) -> None:
        """Drops what rows hold: a table was lost, or counts what no history tells."""
        self._counted.clear()


@partial(jax.jit, donate_argnums=0)
def _set_row(counts: Array, slot: int, values: Array) -> Array:
    return counts.at[slot].set(values)

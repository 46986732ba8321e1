"""Draws tokens for slots from logits on the device, with all that their requests ask for.

What a call costs depends on its rows: without penalties, biases, grammars and log-probabilities it is `sampling.sample`
alone. Each combination of those four is a compiled shape of its own, made when it is first asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..adjust import Bias, Penalties, adjust, mask_words
from ..layers import Array
from ..logprobs import Logprobs, TopLogprobs, top_logprobs
from ..sampling import SamplingBatch, SamplingParams, sample
from .history_counts import HistoryCounts
from .types import DecodeRow, Grammar, TokenHistory

_GREEDY = SamplingParams(temperature=0)  # of an idle slot: the cheapest draw


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """One row's request for a token. Fields as in `types.DecodeRow`."""

    position: int  # that the token will take
    sampling: SamplingParams
    history: TokenHistory | None = None
    grammar: Grammar | None = None


def draw_of(row: DecodeRow) -> Draw:
    """What a decode step asks for its row."""
    return Draw(row.position + 1, row.sampling, row.history, row.grammar)


def check_draws(draws: Mapping[int, Draw], vocabulary: int) -> None:
    """Raises ValueError for a slot that penalises without a history, or has a bias outside the vocabulary."""
    for slot, row in draws.items():
        if row.sampling.penalises and row.history is None:
            raise ValueError(f"slot {slot} has penalties and no history")
        outside = [token for token, _ in row.sampling.logit_bias if token >= vocabulary]
        if outside:
            raise ValueError(f"slot {slot} biases token {outside[0]}, the vocabulary has {vocabulary}")


class Drawn(NamedTuple):
    """A drawn token."""

    token: int  # -1 where the logits were not finite
    logprobs: Logprobs | None


class SlotSampler:
    """See the module. One thread uses it."""

    def __init__(self, slots: int, vocabulary: int) -> None:
        self._slots = slots
        self._vocabulary = vocabulary
        self._counts = HistoryCounts(slots, vocabulary)
        self._prepared: tuple[list[SamplingParams], SamplingBatch, Bias | None] | None = None  # the last call's rows

    def compile(self) -> None:
        """Compiles the plain draw ahead; other combinations compile when they are first used."""
        logits = jnp.zeros((self._slots, self._vocabulary), jnp.float32)
        self.draw(logits, {0: Draw(0, _GREEDY)})

    def draw(self, logits: Array, draws: Mapping[int, Draw]) -> dict[int, Drawn]:
        """Draws a token for each of `draws`, and tells its history and grammar.

        Args:
          logits: [slots, V] float32 on the device.
          draws: slot → row.

        Returns:
          slot → what was drawn.

        Raises:
          ValueError: as `check_draws`.
        """
        check_draws(draws, self._vocabulary)
        params = [draws[slot].sampling if slot in draws else _GREEDY for slot in range(self._slots)]
        batch, bias = self._prepare(params)
        positions = np.zeros(self._slots, np.int32)
        for slot, row in draws.items():
            positions[slot] = row.position
        histories = {
            slot: row.history for slot, row in draws.items() if row.sampling.penalises and row.history is not None
        }
        penalties = Penalties.of(params, self._counts.take(histories)) if histories else None
        reports = any(one.logprobs is not None for one in params)
        tokens, top = _sample(logits, batch, positions, penalties, bias, self._mask(draws), reports=reports)
        if penalties is not None:
            counted = np.array([slot in histories for slot in range(self._slots)])
            self._counts.put(_count_drawn(penalties.counts, tokens, counted))
        return self._results(draws, np.asarray(tokens), None if top is None else tuple(map(np.asarray, top)))

    def _prepare(self, params: list[SamplingParams]) -> tuple[SamplingBatch, Bias | None]:
        """The parameters as arrays: made anew only when the rows change."""
        if self._prepared is None or self._prepared[0] != params:
            self._prepared = params, SamplingBatch.of(params), Bias.of(params, self._vocabulary)
        return self._prepared[1:]

    def _mask(self, draws: Mapping[int, Draw]) -> np.ndarray | None:
        if all(row.grammar is None for row in draws.values()):
            return None
        mask = np.full((self._slots, mask_words(self._vocabulary)), 0xFFFFFFFF, np.uint32)
        for slot, row in draws.items():
            if row.grammar is not None:
                mask[slot] = row.grammar.mask()
        return mask

    def _results(
        self, draws: Mapping[int, Draw], tokens: np.ndarray, top: tuple[np.ndarray, ...] | None
    ) -> dict[int, Drawn]:
        results = {}
        for slot, row in draws.items():
            token, logprobs = int(tokens[slot]), None
            wanted = row.sampling.logprobs
            if token >= 0:
                if top is not None and wanted is not None:
                    chosen, likeliest, values = (of_slots[slot] for of_slots in top)
                    logprobs = Logprobs.of(chosen, likeliest[:wanted], values[:wanted])
                self._tell(slot, row, token)
            results[slot] = Drawn(token, logprobs)
        return results

    def _tell(self, slot: int, row: Draw, token: int) -> None:
        if row.history is not None:
            self._counts.drew(slot, row.history, token, counted=row.sampling.penalises)
        if row.grammar is not None:
            row.grammar.accept(token)


@partial(jax.jit, static_argnames="reports")  # of the module, so that samplers of one shape compile it once
def _sample(
    logits: Array,
    batch: SamplingBatch,
    positions: Array,
    penalties: Penalties | None,
    bias: Bias | None,
    mask: Array | None,
    *,
    reports: bool,
) -> tuple[Array, TopLogprobs | None]:
    logits = adjust(logits, penalties=penalties, bias=bias, mask=mask)
    tokens = sample(logits, batch, positions)
    return tokens, top_logprobs(logits, tokens) if reports else None


@partial(jax.jit, donate_argnums=0)
def _count_drawn(counts: Array, tokens: Array, counted: Array) -> Array:
    """Counts the tokens [S] in their rows of counts [S, V] where `counted` [S] says so; −1 is nothing."""
    nowhere = counts.shape[1]
    columns = jnp.where(counted & (tokens >= 0), tokens, nowhere)
    return counts.at[jnp.arange(len(tokens)), columns].add(1, mode="drop")

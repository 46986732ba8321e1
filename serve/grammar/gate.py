"""One answer's grammar: thinking stays free, then only what the demand allows may be drawn."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from north_jax.text import Marker

from .demand import Demand

_LOG = logging.getLogger("serve")


@dataclass(frozen=True, slots=True)
class Masks:
    """Sets of tokens as masks, [mask_words(V)] uint32 each (`north_jax.adjust`)."""

    ordinary: np.ndarray  # tokens that are text
    markers: Mapping[Marker, np.ndarray]
    ids: Mapping[int, Marker]
    stop: np.ndarray  # tokens that end an answer


class _At(Enum):
    THINKING = auto()
    BETWEEN = auto()  # thinking has ended: what comes next?
    TEXT = auto()
    ACTION = auto()
    END = auto()


_OPENS = {Marker.START_TEXT: _At.TEXT, Marker.START_ACTION: _At.ACTION}
_CLOSES = {_At.TEXT: Marker.END_TEXT, _At.ACTION: Marker.END_ACTION}


class Gate:
    """A `north_jax.decoding.Grammar`. Markers are drawn where the format has them, and nowhere else.

    After thinking come a text or an action, as the demand allows, and the end of the answer; a free text may be
    followed by an action. Where a grammar fails (limits of the parser) no token is allowed, which ends the request
    with an error.
    """

    def __init__(
        self, masks: Masks, demand: Demand, *, text: LLMatcher | None, action: LLMatcher | None, thinking: bool
    ) -> None:
        """Begins an answer; the matchers are for its text and its action, where the demand describes them."""
        self._masks = masks
        self._demand = demand
        self._matchers = {_At.TEXT: text, _At.ACTION: action}
        self._at = _At.THINKING if thinking else _At.BETWEEN
        self._spoken = False  # a free text has ended
        self._nothing = np.zeros_like(masks.ordinary)

    def mask(self) -> np.ndarray:
        markers = self._masks.markers
        match self._at:
            case _At.THINKING:
                return self._masks.ordinary | markers[Marker.END_THINKING]
            case _At.BETWEEN:
                allowed = self._nothing
                if self._demand.may_speak and not self._spoken:
                    allowed = allowed | markers[Marker.START_TEXT]
                if self._demand.may_call:
                    allowed = allowed | markers[Marker.START_ACTION]
                return allowed | self._masks.stop if self._spoken or self._demand.may_be_silent else allowed
            case _At.END:
                return self._masks.stop
        end = markers[_CLOSES[self._at]]
        matcher = self._matchers[self._at]
        return self._masks.ordinary | end if matcher is None else self._described(matcher, end)

    def accept(self, token: int) -> None:
        marker = self._masks.ids.get(token)
        if self._at is _At.THINKING and marker is Marker.END_THINKING:
            self._at = _At.BETWEEN
        elif self._at is _At.BETWEEN and marker is not None:
            self._at = _OPENS.get(marker, _At.END)
        elif self._at in _CLOSES and marker is _CLOSES[self._at]:
            self._spoken = self._at is _At.TEXT and self._matchers[self._at] is None
            self._at = _At.BETWEEN if self._spoken else _At.END
        elif (matcher := self._matchers.get(self._at)) is not None:
            matcher.consume_token(token)  # a failure shows in the next mask

    def _described(self, matcher: LLMatcher, end: np.ndarray) -> np.ndarray:
        if not matcher.is_stopped():
            bits = np.zeros((1, len(self._nothing)), np.int32)
            fill_next_token_bitmask(matcher, bits, 0)
            allowed = bits[0].view(np.uint32) & self._masks.ordinary
        else:
            allowed = self._nothing
        if matcher.is_error():
            _LOG.error("a grammar failed: %s", matcher.get_error())
            return self._nothing
        return allowed | end if matcher.is_accepting() else allowed

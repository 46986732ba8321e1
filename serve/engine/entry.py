"""What the scheduler keeps of a request, and how it counts pages."""

from __future__ import annotations

from dataclasses import dataclass, field

from north_jax.decoding import DecodeRow, Draw, Finish, TokenHistory, TokenRecord
from north_jax.logprobs import Logprobs

from .types import EngineRequest, FinishReason, TokenEvent


@dataclass(slots=True, eq=False)
class Entry:
    """A request that waits or runs."""

    request: EngineRequest
    number: int  # counts arrivals
    tokens: list[int]  # the prompt and what was generated
    history: TokenHistory | None  # where penalties look at it
    remaining: int  # tokens it may still generate
    slot: int = -1  # none
    position: int = 0  # tokens in the cache
    prefilling: bool = True  # else only the newest token is not yet in the cache
    cached: int = 0  # tokens of its prompt that were found in the cache
    reported: list[Logprobs] = field(default_factory=list)  # of its prompt, where the request asks for it

    @property
    def begun(self) -> bool:
        """Whether it has generated anything."""
        return len(self.tokens) > len(self.request.prompt)

    @property
    def reports(self) -> bool:
        """Whether what it prefills is to be reported."""
        return self.request.prompt_logprobs and not self.begun

    def draw(self) -> Draw:
        """The draw after the last of its tokens, once they are in the cache."""
        return Draw(len(self.tokens), self.request.sampling, self.history, self.request.grammar)

    def decode_row(self) -> DecodeRow:
        """The entry as a row of a quantum: all but its newest token are in the cache."""
        return DecodeRow(
            slot=self.slot,
            token=self.tokens[-1],
            position=self.position,
            remaining=self.remaining,
            stop_token_ids=self.request.stop_token_ids,
            sampling=self.request.sampling,
            history=self.history,
            grammar=self.request.grammar,
        )


@dataclass(slots=True)
class Pages:
    """Pages of both groups."""

    full: int = 0
    sliding: int = 0

    def __iadd__(self, other: tuple[int, int]) -> Pages:
        self.full += other[0]
        self.sliding += other[1]
        return self

    def within(self, available: tuple[int, int]) -> bool:
        return self.full <= available[0] and self.sliding <= available[1]


def event_of(record: TokenRecord) -> TokenEvent:
    """The record as its request sees it: without a token that only ends it."""
    match record.finish:
        case Finish.NONE:
            return TokenEvent(record.token, None, logprobs=record.logprobs)
        case Finish.LENGTH:
            return TokenEvent(record.token, FinishReason.LENGTH, logprobs=record.logprobs)
        case Finish.STOP:
            return TokenEvent(None, FinishReason.STOP)
        case Finish.CANCELLED:
            return TokenEvent(None, FinishReason.CANCELLED)
        case Finish.ERROR:
            return TokenEvent(None, FinishReason.ERROR, "the logits are not finite, or its grammar allows no token")

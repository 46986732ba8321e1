"""The boundary between protocol layer and engine: what is asked, what comes back, and nothing about either side.

The protocol layer turns HTTP requests into `EngineRequest`s and `TokenEvent`s into text; an engine sees token ids only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from north_jax.decoding import Grammar
    from north_jax.logprobs import Logprobs
    from north_jax.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate. `request_id` is unique among the requests that the engine holds."""

    request_id: str
    prompt: tuple[int, ...]  # token ids, at least one
    max_tokens: int  # >= 1; len(prompt) + max_tokens <= engine.max_context
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    grammar: Grammar | None = None  # of this request alone; it has accepted nothing yet
    prompt_logprobs: bool = False  # whether the prompt's tokens are reported too, as `sampling.logprobs` says
    cache_salt: str = ""  # it shares cached prefixes with requests of the same one alone


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token was drawn
    LENGTH = "length"  # max_tokens were generated
    CANCELLED = "cancelled"
    ERROR = "error"


class TokenEvent(NamedTuple):
    """One step of one request. The last event of a request, and only that one, has a `finish_reason`.

    The stop token itself is not delivered: its event has `token` None and the reason STOP.
    """

    token: int | None  # None when the event only ends the request
    finish_reason: FinishReason | None
    error: str | None = None
    logprobs: Logprobs | None = None  # of the token, where `sampling.logprobs` asks for them
    cached_tokens: int = 0  # in a request's first event: how many of its prompt were found in the KV cache
    prompt_logprobs: tuple[Logprobs, ...] | None = None  # there too: of each token of the prompt but the first


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot, for health and metrics. Pages are those of both groups of the KV cache, tokens since the start."""

    queued: int
    running: int
    pages_used: int
    pages_total: int
    pages_cached: int = 0  # besides those in use: kept for requests that begin alike, given up when room is needed
    prompt_tokens: int = 0  # prefilled
    cached_tokens: int = 0  # found in the KV cache instead
    generated_tokens: int = 0
    preemptions: int = 0  # a running request went back to the queue for want of pages
    failure: str | None = None  # why the engine stopped for good
    prefill_compiled: int = 0  # sizes of prefill that are compiled
    prefill_shapes: int = 0  # that will be
    warm: bool = False  # whether everything is compiled that is compiled ahead
    chunks: Mapping[int, int] = field(default_factory=dict)  # of prefill, by the size they ran in
    seconds: Mapping[str, float] = field(default_factory=dict)  # of the engine, by what it did: `stopwatch.PARTS`
    device_bytes: tuple[int, int, int] | None = None  # limit, in use, most that was; None where nobody says


class QueueFull(Exception):
    """The engine holds as many waiting requests as it may; try again after `retry_after_s` seconds."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"the request queue is full; retry after {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class EngineUnavailable(Exception):
    """The engine takes no request any more: it is shutting down, or it has failed."""


class RequestTooLong(Exception):
    """Prompt and max_tokens together exceed what the engine can ever hold."""


class Engine(Protocol):
    max_context: int
    max_requests: int  # that it can hold at once, running and waiting

    def submit(self, request: EngineRequest, deliver: Callable[[TokenEvent], None]) -> None:
        """Queues a request; thread-safe. `deliver` is called from the engine's thread and must not block.

        Raises QueueFull, RequestTooLong, EngineUnavailable, or ValueError for a request id that is in use.
        """

    def cancel(self, request_id: str) -> None:
        """Ends a request early; thread-safe, idempotent, unknown ids are ignored. A CANCELLED event follows."""

    def stats(self) -> EngineStats: ...

    def start(self) -> None: ...

    def shutdown(self, deadline_s: float) -> None:
        """Takes no new request, lets the running ones finish for `deadline_s` seconds, then cancels what is left."""

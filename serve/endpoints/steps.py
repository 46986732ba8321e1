"""Running the choices of one answer: tokens from the engine in, deltas of each choice out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

from north_jax.logprobs import Logprobs

from ..engine.types import EngineRequest, EngineUnavailable, FinishReason, QueueFull, RequestTooLong
from ..generation import EngineBridge, Generation
from ..protocol.errors import ApiError, invalid_value, queue_full, server_error


class Choice[D](Protocol):
    """One of the answer's alternatives, as it grows."""

    tokens: int  # received so far
    cached_tokens: int  # of the prompt, which the engine did not have to compute

    @property
    def stopped(self) -> bool:
        """A stop string has appeared: no further token is wanted."""

    def begin(self, prompt: Sequence[Logprobs]) -> list[D]:
        """The log-probabilities of the prompt's tokens but the first, where the request asks for them."""

    def push(self, token: int, logprobs: Logprobs | None) -> list[D]: ...

    def end(self, finish: FinishReason) -> list[D]:
        """What was held back, now that the engine has ended for this reason."""


class Step[D](NamedTuple):
    """What happened to one choice: deltas, and with the last of them why it ended (STOP or LENGTH)."""

    choice: int
    deltas: list[D]
    finish: FinishReason | None


def submit(bridge: EngineBridge, requests: Sequence[EngineRequest], field: str) -> Generation:
    """Hands requests to the engine; `field` is what made them so many. Raises ApiError."""
    most = bridge.engine.max_requests
    if len(requests) > most:  # no use in trying again later
        raise invalid_value(field, f"this server holds at most {most} choices at once, not {len(requests)}")
    try:
        return bridge.generate(requests)
    except QueueFull as error:
        raise queue_full(error.retry_after_s) from None
    except EngineUnavailable as error:
        raise server_error(str(error), status=503, code="unavailable") from None
    except RequestTooLong as error:
        raise ApiError(str(error), code="context_length_exceeded") from None


async def steps[D](generation: Generation, choices: Sequence[Choice[D]]) -> AsyncIterator[list[Step[D]]]:
    """Gives, at each waking, the steps of all tokens that have come, until every choice has ended.

    Raises ApiError when the engine fails or is shut down under a request.
    """
    while arrived := await generation.events():
        made: list[Step[D]] = []
        failure: ApiError | None = None
        for index, event in arrived:
            choice = choices[index]
            choice.cached_tokens += event.cached_tokens
            token, reason = event.token, event.finish_reason
            if choice.stopped:
                continue  # tokens that came before the cancellation reached the engine
            deltas = [] if event.prompt_logprobs is None else choice.begin(event.prompt_logprobs)
            deltas += [] if token is None else choice.push(token, event.logprobs)
            finish = None
            if choice.stopped:
                generation.cancel(index)
                finish = FinishReason.STOP
            elif reason in (FinishReason.STOP, FinishReason.LENGTH):
                deltas += choice.end(reason)
                finish = FinishReason.STOP if choice.stopped else reason  # a stop string in what was held back
            elif reason is not None:
                failure = _failure(reason, event.error)
            if deltas or finish is not None:
                made.append(Step(index, deltas, finish))
        if made:
            yield made
        if failure is not None:
            raise failure


def _failure(reason: FinishReason, error: str | None) -> ApiError:
    if reason is FinishReason.CANCELLED:  # nobody here did: cancelled requests are no longer listened to
        return server_error("The server is shutting down", status=503, code="shutting_down")
    return server_error(f"The model failed: {error or 'unknown error'}")

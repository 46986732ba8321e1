"""An engine that plays given token streams: everything of a server but the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from north_jax.logprobs import Logprobs
from serve.engine.types import (
    EngineRequest,
    EngineStats,
    FinishReason,
    QueueFull,
    RequestTooLong,
    TokenEvent,
)

type Script = Callable[[EngineRequest], Iterable[int | Exception]]


def logprobs_of(token: int, count: int) -> Logprobs:
    """What the engine says of each token that it plays: itself, and the tokens 10, 11, … as alternatives."""
    others = ((10 + number, -1.0 - number) for number in range(count))
    return Logprobs(-0.5 - token % 8, tuple(others))


def prompt_logprobs_of(request: EngineRequest) -> tuple[Logprobs, ...] | None:
    if not request.prompt_logprobs:
        return None
    return tuple(logprobs_of(token, request.sampling.logprobs or 0) for token in request.prompt[1:])


@dataclass
class _Row:
    request: EngineRequest
    deliver: Callable[[TokenEvent], None]
    script: Iterator[int | Exception]
    produced: int = 0


class ScriptedEngine:
    """Delivers one token per running request and step, from a thread of its own, like a real engine.

    A script gives a request's tokens: one of its stop tokens, or the script's end, ends it with STOP, reaching
    max_tokens with LENGTH, an exception among the tokens with ERROR. With `gated` a step happens only for each call of
    `step`; otherwise steps follow each other at once, or `step_seconds` apart.
    """

    def __init__(
        self,
        script: Script | Sequence[int],
        *,
        max_context: int = 4096,
        max_queue: int = 1000,
        gated: bool = False,
        step_seconds: float = 0.0,
        cached_tokens: int = 0,
        remember: bool = True,
    ) -> None:
        self.max_context = max_context
        self.max_requests = max_queue
        self.requests: list[EngineRequest] = []  # all that were ever submitted, unless `remember` is false
        self.cancelled: list[str] = []  # ids, in the order in which cancellations took effect
        self.produced: dict[str, int] = {}  # tokens delivered by request id
        self.steps = 0
        self._script: Script = script if callable(script) else lambda request: script
        self._max_queue = max_queue
        self._gated = gated
        self._step_seconds = step_seconds
        self._remember = remember
        self._cached_tokens = cached_tokens  # what each request is told
        self._rows: dict[str, _Row] = {}
        self._to_cancel: list[str] = []
        self._allowed = 0
        self._draining = self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="scripted engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: EngineRequest, deliver: Callable[[TokenEvent], None]) -> None:
        assert request.prompt
        assert request.max_tokens >= 1
        with self._changed:
            if len(request.prompt) + request.max_tokens > self.max_context:
                raise RequestTooLong(f"{len(request.prompt)} + {request.max_tokens} > {self.max_context}")
            if self._draining or len(self._rows) >= self._max_queue:
                raise QueueFull(2.0)
            assert request.request_id not in self._rows
            if self._remember:
                self.requests.append(request)
                self.produced[request.request_id] = 0
            self._rows[request.request_id] = _Row(request, deliver, iter(self._script(request)))
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        with self._changed:
            self._to_cancel.append(request_id)
            self._changed.notify_all()

    def stats(self) -> EngineStats:
        with self._changed:
            return EngineStats(queued=0, running=len(self._rows), pages_used=0, pages_total=0, warm=True)

    def shutdown(self, deadline_s: float) -> None:
        with self._changed:
            self._draining = True
            self._changed.wait_for(lambda: not self._rows, timeout=deadline_s)
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(timeout=10)

    # For tests.

    def step(self, count: int = 1) -> None:
        """Allows `count` steps of a gated engine and waits until they are done (a step needs a running request)."""
        with self._changed:
            target = self.steps + count
            self._allowed += count
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.steps >= target, timeout=10), "the engine took no step"

    def wait_for_requests(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.requests) >= count, timeout=10), "no request came"

    def wait_for_cancelled(self, count: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.cancelled) >= count, timeout=10), "nothing was cancelled"

    def wait_until_idle(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: not self._rows, timeout=10), "requests are left"

    # The engine's thread.

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._to_cancel or self._may_step())
                for request_id in self._to_cancel if not self._stopped else list(self._rows):
                    if row := self._rows.pop(request_id, None):
                        if self._remember:
                            self.cancelled.append(request_id)
                        row.deliver(TokenEvent(None, FinishReason.CANCELLED))
                self._to_cancel = []
                self._changed.notify_all()
                if self._stopped:
                    return
                if not self._may_step():
                    continue
                for row in list(self._rows.values()):
                    self._advance(row)
                self.steps += 1
                self._allowed -= self._gated
                self._changed.notify_all()
                if self._step_seconds:
                    self._changed.wait_for(lambda: self._stopped or self._to_cancel, timeout=self._step_seconds)

    def _may_step(self) -> bool:
        return bool(self._rows) and (not self._gated or self._allowed > 0)

    def _advance(self, row: _Row) -> None:
        token = next(row.script, None)
        if isinstance(token, Exception):
            self._end(row, TokenEvent(None, FinishReason.ERROR, str(token)))
            return
        if token is not None and (grammar := row.request.grammar) is not None:
            if not grammar.mask()[token // 32] >> np.uint32(token % 32) & np.uint32(1):
                self._end(row, TokenEvent(None, FinishReason.ERROR, f"the grammar forbids {token}"))
                return
            grammar.accept(token)
        if token is None or token in row.request.stop_token_ids:
            self._end(row, TokenEvent(None, FinishReason.STOP))
        else:
            logprobs = None if (count := row.request.sampling.logprobs) is None else logprobs_of(token, count)
            row.produced += 1
            if self._remember:
                self.produced[row.request.request_id] = row.produced
            event = TokenEvent(token, None, logprobs=logprobs)
            if row.produced == 1:
                event = event._replace(
                    cached_tokens=self._cached_tokens, prompt_logprobs=prompt_logprobs_of(row.request)
                )
            if row.produced == row.request.max_tokens:
                self._end(row, event._replace(finish_reason=FinishReason.LENGTH))
            else:
                row.deliver(event)

    def _end(self, row: _Row, event: TokenEvent) -> None:
        del self._rows[row.request.request_id]
        row.deliver(event)

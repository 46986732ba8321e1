"""Which rows run next: admission, slots, pages and the alternation of prefill and decode. Pure host code, no device.

The engine calls `next_work` and runs it on the device. What a prefill drew goes to `complete`, what a decode quantum
draws goes to `take` step by step; both tell what each request receives. Requests are admitted in order of arrival, when
a slot is free and the pages of their whole length can be reserved, so a running request never runs out of pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter

from north_jax.config import Config
from north_jax.decoding import DecodeRow, Finish, TokenRecord, finish_of
from north_jax.kv_cache import PagedRows, pages_for, ring_entries
from north_jax.sampling import SamplingParams

from .memory import CachePlan
from .types import EngineRequest, EngineStats, FinishReason, QueueFull, RequestTooLong, TokenEvent

QUANTUM = 32  # decode steps: what a quantum's start costs does not show beyond, and what cannot wait ends it early


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A chunk of one prompt."""

    slot: int
    tokens: tuple[int, ...]
    start: int  # positions the slot holds already
    last: bool  # the chunk ends the prompt, so a token is drawn after it
    sampling: SamplingParams


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
type Delivery = tuple[EngineRequest, TokenEvent]


@dataclass(slots=True)
class _Running:
    """A request that owns a slot."""

    request: EngineRequest
    number: int  # counts admissions
    reserved: tuple[int, int]  # pages of the full and of the sliding group
    remaining: int  # tokens it may still generate
    position: int = 0  # tokens in the cache
    newest: int = -1  # the token drawn last, not yet in the cache

    @property
    def prefilling(self) -> bool:
        return self.position < len(self.request.prompt)


class Scheduler:
    """Slots, pages and queue of one engine. Not thread-safe: the engine's thread owns it."""

    def __init__(self, config: Config, plan: CachePlan, *, max_queue: int) -> None:
        """Sizes the scheduler.

        Args:
          config: the model's configuration.
          plan: slots, context, pages and the sizes of a prefill.
          max_queue: requests that may wait for a slot.
        """
        self._ring = ring_entries(config, plan.max_context, plan.chunk)
        self._pages = (plan.full_pages, plan.sliding_pages)
        self._max_context = plan.max_context
        self._chunk = plan.chunk
        self._prefill_rows = plan.prefill_rows
        self._quantum = min(QUANTUM, plan.chunk)  # a sliding row has room for a chunk of new positions
        self._max_queue = max_queue
        self._reserved = [0, 0]
        self._waiting: deque[EngineRequest] = deque()
        self._slots: list[_Running | None] = [None] * plan.slots
        self._prefilled_last = False
        self._admitted = 0
        self.rows = PagedRows(
            config,
            rows=plan.slots,
            max_context=plan.max_context,
            max_chunk=plan.chunk,
            full_pages=plan.full_pages,
            sliding_pages=plan.sliding_pages,
        )

    def check(self, request: EngineRequest) -> None:
        """Raises RequestTooLong where the request could never run."""
        total = len(request.prompt) + request.max_tokens
        if not request.prompt or request.max_tokens < 1:
            raise RequestTooLong(f"prompt ({len(request.prompt)}) and max_tokens ({request.max_tokens}) must be >= 1")
        if total > self._max_context:
            raise RequestTooLong(
                f"prompt ({len(request.prompt)} tokens) and max_tokens ({request.max_tokens}) exceed the context of "
                f"{self._max_context}"
            )
        for name, need, have in zip(("full", "sliding"), self._need(request), self._pages, strict=True):
            if need > have:
                raise RequestTooLong(f"{total} tokens need {need} {name} pages, the KV cache has {have}")

    def add(self, request: EngineRequest) -> None:
        """Queues a request that `check` accepts. Raises QueueFull."""
        free_slots = self._slots.count(None)
        if len(self._waiting) >= self._max_queue + free_slots:
            raise QueueFull(retry_after_s=1.0)
        self._waiting.append(request)

    def cancel(self, request_id: str) -> list[Delivery]:
        """Ends a waiting or running request; nothing happens for an unknown id."""
        event = TokenEvent(None, FinishReason.CANCELLED)
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return [(request, event)]
        for slot, running in enumerate(self._slots):
            if running is not None and running.request.request_id == request_id:
                self._free(slot)
                return [(running.request, event)]
        return []

    def fail_running(self, message: str) -> list[Delivery]:
        """Ends every request that owns a slot, after the device lost its state."""
        failed = [(slot, running) for slot, running in enumerate(self._slots) if running is not None]
        for slot, _ in failed:
            self._free(slot)
        return [(running.request, TokenEvent(None, FinishReason.ERROR, message)) for _, running in failed]

    def cancel_all(self) -> list[Delivery]:
        """Ends every request, waiting or running."""
        ids = [request.request_id for request in self._waiting]
        ids += [running.request.request_id for running in self._slots if running is not None]
        return [delivery for request_id in ids for delivery in self.cancel(request_id)]

    def next_work(self) -> Work | None:
        """Admits what fits, makes room in the pages, and names the next device call; None when there is nothing to do.

        Where some slots prefill and others decode, a prefill and one decode step alternate.
        """
        self._admit()
        live = [(running.number, slot, running) for slot, running in enumerate(self._slots) if running is not None]
        prefilling = [slot for _, slot, running in sorted(live, key=itemgetter(0)) if running.prefilling]
        decoding = [slot for _, slot, running in live if not running.prefilling]
        if prefilling and not (decoding and self._prefilled_last):
            self._prefilled_last = True
            return PrefillWork(tuple(self._prefill_row(slot) for slot in prefilling[: self._prefill_rows]))
        self._prefilled_last = False
        if decoding:
            longest = max(running.remaining for _, _, running in live if not running.prefilling)
            steps = 1 if prefilling else min(self._quantum, longest)
            return DecodeWork(tuple(self._decode_row(slot, steps) for slot in decoding), steps)
        return None

    def can_admit(self) -> bool:
        """Whether the first request that waits could be admitted: a reason to end a decode quantum early."""
        return bool(self._waiting) and None in self._slots and self._has_pages(self._need(self._waiting[0]))

    def complete(self, work: PrefillWork, drawn: Mapping[int, int]) -> list[Delivery]:
        """Takes the results of a prefill.

        Args:
          work: what `next_work` returned.
          drawn: slot → token, for every row that ends its prompt; −1 where the logits were not finite, which ends the
            request with an error.

        Returns:
          what each request receives.
        """
        deliveries: list[Delivery] = []
        for row in work.rows:
            running = self._running(row.slot)
            running.position = row.start + len(row.tokens)
            if row.last:
                token = drawn[row.slot]
                finish = finish_of(token, running.remaining, running.request.stop_token_ids)
                deliveries.append(self._drawn(TokenRecord(row.slot, token, finish)))
        return deliveries

    def take(self, records: Iterable[TokenRecord]) -> list[Delivery]:
        """Takes the records of one decode step while the quantum runs; gives what each request receives."""
        deliveries: list[Delivery] = []
        for record in records:
            self._running(record.slot).position += 1
            deliveries.append(self._drawn(record))
        return deliveries

    def request_of(self, slot: int) -> EngineRequest:
        """The request that owns a slot, which is not empty."""
        return self._running(slot).request

    def stats(self) -> EngineStats:
        """Counts for health and metrics."""
        return EngineStats(
            queued=len(self._waiting),
            running=sum(running is not None for running in self._slots),
            pages_used=sum(self._pages) - sum(self.rows.free),
            pages_total=sum(self._pages),
        )

    def _need(self, request: EngineRequest) -> tuple[int, int]:
        total = pages_for(len(request.prompt) + request.max_tokens)
        return total, min(total, self._ring)

    def _admit(self) -> None:
        for slot, running in enumerate(self._slots):
            if running is not None or not self._waiting:
                continue
            need = self._need(self._waiting[0])
            if not self._has_pages(need):
                return  # in order of arrival: nobody overtakes the first that waits for pages
            self._reserved = [r + n for r, n in zip(self._reserved, need, strict=True)]
            request = self._waiting.popleft()
            self._slots[slot] = _Running(request, self._admitted, need, request.max_tokens)
            self._admitted += 1

    def _has_pages(self, need: tuple[int, int]) -> bool:
        return all(r + n <= have for r, n, have in zip(self._reserved, need, self._pages, strict=True))

    def _running(self, slot: int) -> _Running:
        running = self._slots[slot]
        assert running is not None, f"nobody owns slot {slot}"
        return running

    def _prefill_row(self, slot: int) -> PrefillRow:
        running = self._running(slot)
        start = running.position
        tokens = running.request.prompt[start : start + self._chunk]
        self.rows.grow(slot, start, start + len(tokens))
        last = start + len(tokens) == len(running.request.prompt)
        return PrefillRow(slot, tokens, start, last, running.request.sampling)

    def _decode_row(self, slot: int, steps: int) -> DecodeRow:
        running = self._running(slot)
        # Never beyond the request's length, which is what was reserved.
        self.rows.grow(slot, running.position, running.position + min(steps, running.remaining))
        return DecodeRow(
            slot=slot,
            token=running.newest,
            position=running.position,
            remaining=running.remaining,
            stop_token_ids=running.request.stop_token_ids,
            sampling=running.request.sampling,
        )

    def _drawn(self, record: TokenRecord) -> Delivery:
        """Notes what a step drew for a slot, or frees it; gives the event of its request."""
        running = self._running(record.slot)
        running.newest = record.token
        running.remaining -= 1
        if record.finish is not Finish.NONE:
            self._free(record.slot)
        return running.request, _event(record)

    def _free(self, slot: int) -> None:
        running = self._running(slot)
        self.rows.release(slot)
        self._reserved = [r - n for r, n in zip(self._reserved, running.reserved, strict=True)]
        self._slots[slot] = None


def _event(record: TokenRecord) -> TokenEvent:
    """The record as its request sees it: without a token that only ends it."""
    match record.finish:
        case Finish.NONE:
            return TokenEvent(record.token, None)
        case Finish.LENGTH:
            return TokenEvent(record.token, FinishReason.LENGTH)
        case Finish.STOP:
            return TokenEvent(None, FinishReason.STOP)
        case Finish.CANCELLED:
            return TokenEvent(None, FinishReason.CANCELLED)
        case Finish.ERROR:
            return TokenEvent(None, FinishReason.ERROR, "the logits are not finite")

"""Which rows run next: admission, slots, pages and the alternation of prefill and decode. Pure host code, no device.

The engine calls `next_work`, runs it on the device, and hands the drawn tokens to `complete`, which tells what each
request receives. Requests are admitted in order of arrival, when a slot is free and the pages of their whole length can
be reserved, so a running request never runs out of pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from north_jax.config import Config
from north_jax.kv_cache import PagedRows, pages_for, ring_entries

from .memory import CachePlan
from .types import EngineRequest, EngineStats, FinishReason, QueueFull, RequestTooLong, TokenEvent


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A chunk of one prompt."""

    slot: int
    tokens: tuple[int, ...]
    start: int  # positions the slot holds already
    last: bool  # the chunk ends the prompt, so a token is drawn after it


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Chunks of several prompts, run together."""

    rows: tuple[PrefillRow, ...]


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """The newest token of one slot, not yet in the cache."""

    slot: int
    token: int
    start: int


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """One decode step over the slots whose prompts are in the cache."""

    rows: tuple[DecodeRow, ...]


type Work = PrefillWork | DecodeWork
type Delivery = tuple[EngineRequest, TokenEvent]


@dataclass(slots=True)
class _Running:
    """A request that owns a slot."""

    request: EngineRequest
    number: int  # counts admissions
    reserved: tuple[int, int]  # pages of the full and of the sliding group
    position: int = 0  # tokens in the cache
    generated: list[int] = field(default_factory=list)

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

        Where some slots prefill and others decode, the two alternate.
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
            return DecodeWork(tuple(self._decode_row(slot) for slot in decoding))
        return None

    def complete(self, work: Work, drawn: Mapping[int, int]) -> list[Delivery]:
        """Takes the results of a device call.

        Args:
          work: what `next_work` returned.
          drawn: slot → token, for every decode row and every prefill row that ends its prompt; −1 where the logits
            were not finite, which ends the request with an error.

        Returns:
          what each request receives.
        """
        deliveries: list[Delivery] = []
        for row in work.rows:
            running = self._slots[row.slot]
            assert running is not None, f"slot {row.slot} was freed while its work ran"
            running.position = row.start + (len(row.tokens) if isinstance(row, PrefillRow) else 1)
            if isinstance(row, DecodeRow) or row.last:
                deliveries.append((running.request, self._draw(row.slot, running, drawn[row.slot])))
        return deliveries

    def request_of(self, slot: int) -> EngineRequest | None:
        """The request that owns a slot."""
        running = self._slots[slot]
        return None if running is None else running.request

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
            if any(r + n > have for r, n, have in zip(self._reserved, need, self._pages, strict=True)):
                return  # in order of arrival: nobody overtakes the first that waits for pages
            self._reserved = [r + n for r, n in zip(self._reserved, need, strict=True)]
            self._slots[slot] = _Running(self._waiting.popleft(), self._admitted, need)
            self._admitted += 1

    def _prefill_row(self, slot: int) -> PrefillRow:
        running = self._slots[slot]
        assert running is not None
        start = running.position
        tokens = running.request.prompt[start : start + self._chunk]
        self.rows.grow(slot, start, start + len(tokens))
        return PrefillRow(slot, tokens, start, start + len(tokens) == len(running.request.prompt))

    def _decode_row(self, slot: int) -> DecodeRow:
        running = self._slots[slot]
        assert running is not None
        self.rows.grow(slot, running.position, running.position + 1)
        return DecodeRow(slot, running.generated[-1], running.position)

    def _draw(self, slot: int, running: _Running, token: int) -> TokenEvent:
        if token < 0:
            self._free(slot)
            return TokenEvent(None, FinishReason.ERROR, "the logits are not finite")
        if token in running.request.stop_token_ids:
            self._free(slot)
            return TokenEvent(None, FinishReason.STOP)
        running.generated.append(token)
        if len(running.generated) < running.request.max_tokens:
            return TokenEvent(token, None)
        self._free(slot)
        return TokenEvent(token, FinishReason.LENGTH)

    def _free(self, slot: int) -> None:
        running = self._slots[slot]
        assert running is not None
        self.rows.release(slot)
        self._reserved = [r - n for r, n in zip(self._reserved, running.reserved, strict=True)]
        self._slots[slot] = None

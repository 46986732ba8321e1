"""Which rows run next: admission, slots, pages and the alternation of prefill and decode. Pure host code, no device.

The engine calls `next_work` and runs it on the device. What a prefill drew goes to `complete`, what a decode quantum
draws goes to `take` step by step; both tell what each request receives.

Requests are admitted in order of arrival, when a slot is free and there are pages for their prompt. What they generate
takes pages as it grows; where these run out, the request that arrived last gives up its slot and goes back to the head
of the queue. It loses nothing but time: what it has generated is prefilled with its prompt, and it goes on from there.
The one that arrived first is never interrupted for others, so there is always progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter

from north_jax.config import Config
from north_jax.decoding import Finish, TokenHistory, TokenRecord, finish_of
from north_jax.kv_cache import PAGE_SIZE, PageTables, pages_for, ring_entries
from north_jax.packed import packed_length

from .cached_rows import CachedRows
from .entry import Entry, Pages, event_of
from .memory import CachePlan
from .pace import Pace
from .types import EngineRequest, EngineStats, FinishReason, QueueFull, RequestTooLong, TokenEvent
from .work import DecodeWork, Prefilled, PrefillRow, PrefillWork, Work

# Decode steps. What cannot wait ends a quantum early, at its next step, so a long one delays nobody: its start, a
# fraction of a step's time, is then one in more steps. Pages for all its steps are taken as it begins: where requests
# wait, perhaps for pages, it is shorter.
QUANTUM, SHORT_QUANTUM = 128, 32

type Delivery = tuple[EngineRequest, TokenEvent]


@dataclass(slots=True)
class _Counts:
    """Since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Slots, pages and queue of one engine. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        config: Config,
        plan: CachePlan,
        *,
        max_queue: int,
        prefix_cache: bool = True,
        pace: Pace | None = None,
        sizes: Callable[[], Iterable[int]] | None = None,
    ) -> None:
        """Sizes the scheduler.

        Args:
          config: the model's configuration.
          plan: slots, context, pages and the sizes of a prefill.
          max_queue: requests that may wait for a slot.
          prefix_cache: whether requests use what earlier ones with the same beginning left in the KV cache.
          pace: sizes chunks and quanta while there are both; by default one step follows each chunk, and no wait is
            bounded.
          sizes: gives those that chunks are compiled for now; by default the longest chunk's alone.
        """
        self._plan = plan
        self._pace = pace or Pace()
        self._sizes = sizes or (lambda: (plan.chunk,))
        self._ring = ring_entries(config, plan.max_context, plan.chunk)
        self._max_requests = plan.slots + max_queue
        self._waiting: deque[Entry] = deque()
        self._slots: list[Entry | None] = [None] * plan.slots
        self._rows = CachedRows(config, plan, reuse=prefix_cache)
        self._prefilled_last = False
        self._arrivals = 0
        self._counts = _Counts()

    def check(self, request: EngineRequest) -> None:
        """Raises RequestTooLong where the request could never run."""
        total = len(request.prompt) + request.max_tokens
        if not request.prompt or request.max_tokens < 1:
            raise RequestTooLong(f"prompt ({len(request.prompt)}) and max_tokens ({request.max_tokens}) must be >= 1")
        if total > self._plan.max_context:
            raise RequestTooLong(
                f"prompt ({len(request.prompt)} tokens) and max_tokens ({request.max_tokens}) exceed the context of "
                f"{self._plan.max_context}"
            )
        pages = (self._plan.full_pages, self._plan.sliding_pages)
        for name, need, have in zip(("full", "sliding"), self._most_pages(total), pages, strict=True):
            if need > have:
                raise RequestTooLong(f"{total} tokens need {need} {name} pages, the KV cache has {have}")

    def add(self, request: EngineRequest) -> None:
        """Queues a request that `check` accepts. Raises QueueFull."""
        if len(self._waiting) + len(self._running) >= self._max_requests:
            raise QueueFull(retry_after_s=1.0)  # the engine, which has a clock, knows better
        history = TokenHistory(request.prompt) if request.sampling.penalises else None
        self._waiting.append(Entry(request, self._arrivals, list(request.prompt), history, request.max_tokens))
        self._arrivals += 1

    def cancel(self, request_id: str) -> list[Delivery]:
        """Ends a waiting or running request; nothing happens for an unknown id."""
        for entry in (*self._waiting, *self._running):
            if entry.request.request_id == request_id:
                if entry.slot < 0:
                    self._waiting.remove(entry)
                else:
                    self._vacate(entry)
                return [(entry.request, TokenEvent(None, FinishReason.CANCELLED))]
        return []

    def fail_running(self, message: str) -> list[Delivery]:
        """Ends every request that owns a slot, after the device lost its state."""
        failed = self._running
        for entry in failed:
            self._vacate(entry)
        self._rows.forget()
        return [(entry.request, TokenEvent(None, FinishReason.ERROR, message)) for entry in failed]

    def cancel_all(self) -> list[Delivery]:
        """Ends every request, waiting or running."""
        ids = [entry.request.request_id for entry in (*self._waiting, *self._running)]
        return [delivery for request_id in ids for delivery in self.cancel(request_id)]

    def next_work(self) -> Work | None:
        """Admits what fits, makes room in the pages, and names the next device call; None when there is nothing to do.

        Where some slots prefill and others decode, a prefill and as many decode steps as keep the pace alternate.
        """
        self._admit()
        running = self._running
        prefilling = [entry for entry in running if entry.prefilling]
        turn = prefilling and not (self._prefilled_last and len(prefilling) < len(running))
        if turn and (rows := self._prefill(prefilling)):
            self._prefilled_last = True
            return PrefillWork(rows)
        self._prefilled_last = False
        if not self._running:
            return None
        return self._decode() or self.next_work()  # again where everybody who decodes was interrupted

    def can_admit(self) -> bool:
        """Whether the first request that waits could be admitted: a reason to end a decode quantum early."""
        return bool(self._waiting) and None in self._slots and self._has_room(self._waiting[0])

    @property
    def decodes(self) -> bool:
        """Whether a running request is past its prompt."""
        return any(entry is not None and not entry.prefilling for entry in self._slots)

    def complete(self, work: PrefillWork, results: Prefilled) -> list[Delivery]:
        """Takes the results of a prefill.

        Args:
          work: what `next_work` returned.
          results: of the call.

        Returns:
          what each request receives.
        """
        deliveries: list[Delivery] = []
        for row in work.rows:
            entry = self._owner(row.slot)
            entry.position = row.start + len(row.tokens)
            entry.reported += results.reported.get(row.slot, ())
            if row.draw is None:
                self._rows.remember(row.slot, entry.tokens, entry.position)
                continue
            entry.prefilling = False
            token, logprobs = results.drawn[row.slot]
            finish = finish_of(token, entry.remaining, entry.request.stop_token_ids)
            deliveries.append(self._drawn(entry, TokenRecord(row.slot, token, finish, logprobs)))
        return deliveries

    def take(self, records: Iterable[TokenRecord]) -> list[Delivery]:
        """Takes the records of one decode step while the quantum runs; gives what each request receives."""
        deliveries: list[Delivery] = []
        for record in records:
            entry = self._owner(record.slot)
            if record.finish is not Finish.CANCELLED:  # which ends a row before its step
                entry.position += 1
            deliveries.append(self._drawn(entry, record))
        return deliveries

    def request_of(self, slot: int) -> EngineRequest:
        """The request that owns a slot, which is not empty."""
        return self._owner(slot).request

    def tables(self) -> PageTables:
        """A copy of the page tables of all slots, as they stand."""
        return self._rows.snapshot()

    def stats(self) -> EngineStats:
        """Counts for health and metrics."""
        total = self._plan.full_pages + self._plan.sliding_pages
        return EngineStats(
            queued=len(self._waiting),
            running=len(self._running),
            pages_used=total - sum(self._rows.available),
            pages_cached=sum(self._rows.idle),
            pages_total=total,
            prompt_tokens=self._counts.prompt_tokens,
            cached_tokens=self._counts.cached_tokens,
            generated_tokens=self._counts.generated_tokens,
            preemptions=self._counts.preemptions,
        )

    @property
    def _running(self) -> list[Entry]:
        """In order of arrival."""
        return sorted((entry for entry in self._slots if entry is not None), key=attrgetter("number"))

    def _owner(self, slot: int) -> Entry:
        entry = self._slots[slot]
        assert entry is not None, f"nobody owns slot {slot}"
        return entry

    def _most_pages(self, total: int) -> tuple[int, int]:
        """Pages that a row of `total` positions ever holds at once."""
        pages = pages_for(total)
        return pages, min(pages, self._ring)

    # Admission.

    def _admit(self) -> None:
        """In order of arrival: nobody overtakes the first that waits for pages."""
        while self._waiting and None in self._slots and self._has_room(self._waiting[0]):
            entry = self._waiting.popleft()
            entry.slot, entry.prefilling = self._slots.index(None), True
            self._slots[entry.slot] = entry
            self._rows.begin(entry.slot, entry.request.cache_salt)

    def _has_room(self, entry: Entry) -> bool:
        """Whether there are pages for an entry's tokens, besides what the running ones are about to take.

        Those are what is missing of the prompts in the course of being prefilled, and a page for each that decodes:
        else an admission would be followed by an interruption.
        """
        need = Pages()
        need += self._most_pages(len(entry.tokens) + 1)
        for other in self._running:
            if other.prefilling:
                have = self._most_pages(other.position)
                full, sliding = self._most_pages(len(other.tokens) + 1)
                need += (full - have[0], sliding - have[1])
            else:
                need += (1, 1)
        return not self._running or need.within(self._rows.available)

    def _interrupt(self) -> Entry:
        """Sends the running request that arrived last back to the head of the queue."""
        entry = self._running[-1]
        self._vacate(entry)
        self._waiting.appendleft(entry)
        self._counts.preemptions += 1
        return entry

    def _vacate(self, entry: Entry) -> None:
        self._rows.release(entry.slot)
        self._slots[entry.slot] = None
        entry.slot, entry.position, entry.reported = -1, 0, []

    # Prefill.

    def _prefill(self, entries: list[Entry]) -> tuple[PrefillRow, ...]:
        """The next chunk: tokens of the first entries, as many as a call takes; none where all pages went to others.

        While others decode, they wait for it, and it is shorter. Of several entries that are about to compute the same
        block only the first does so: the others find it done then.
        """
        room = self._plan.chunk
        if self.decodes:
            if not entries[0].reports:
                self._take_known(entries[0])
            room = self._pace.room([*self._sizes()], self._plan.busy_chunk, entries[0].position)
        rows: list[PrefillRow] = []
        begun: set[object] = set()
        for entry in entries:
            left = room - packed_length([len(row.tokens) for row in rows], following=True)
            if left <= 0 or len(rows) == self._plan.prefill_rows:
                break
            if entry.slot < 0:
                continue
            if entry.reports:  # every position of it must be computed, in a call of its own
                if not rows and (row := self._piece(entry, left)) is not None:
                    return (row,)
                continue
            self._take_known(entry)
            block = tuple(entry.tokens[entry.position : entry.position + PAGE_SIZE])
            place = (self._rows.place(entry.slot), entry.position, block)
            if len(block) == PAGE_SIZE and place in begun:
                continue
            if (row := self._piece(entry, left)) is not None:
                begun.add(place)
                rows.append(row)
        return tuple(rows)

    def _take_known(self, entry: Entry) -> None:
        known = self._rows.take_known(entry.slot, entry.tokens, entry.position) - entry.position
        entry.position += known
        entry.cached += 0 if entry.begun else known
        self._counts.cached_tokens += known

    def _piece(self, entry: Entry, most: int) -> PrefillRow | None:
        """The next tokens of an entry, at most so many; None when others needed its pages more."""
        tokens = entry.tokens[entry.position : entry.position + most]
        end = entry.position + len(tokens)
        while not self._has_pages(entry, end):
            if self._interrupt() is entry:
                return None
        self._rows.grow(entry.slot, entry.position, end)
        self._counts.prompt_tokens += len(tokens)
        draw = entry.draw() if end == len(entry.tokens) else None
        following = tuple(entry.tokens[entry.position + 1 : end + 1]) if entry.reports else None
        alternatives = entry.request.sampling.logprobs or 0
        return PrefillRow(entry.slot, tuple(tokens), entry.position, draw, following, alternatives)

    def _has_pages(self, entry: Entry, end: int) -> bool:
        need = Pages()
        need += self._rows.missing(entry.slot, entry.position, end)
        return need.within(self._rows.available)

    # Decode.

    def _decode(self) -> DecodeWork | None:
        """As many steps as there are pages for; those that keep the pace where a prompt waits for its next chunk."""
        while entries := [entry for entry in self._running if not entry.prefilling]:
            most = SHORT_QUANTUM if self._waiting else QUANTUM
            if any(entry.prefilling for entry in self._running):
                most = self._pace.steps
            # A sliding row has room for a chunk of new positions.
            steps = min(most, self._plan.chunk, max(entry.remaining for entry in entries))
            while steps and not self._grow_all(entries, steps):
                steps //= 2
            if steps:
                return DecodeWork(tuple(entry.decode_row() for entry in entries), steps)
            self._interrupt()
        return None

    def _grow_all(self, entries: list[Entry], steps: int) -> bool:
        """Makes room for `steps` more tokens of each, or changes nothing. Never beyond a request's own length."""
        ends = [entry.position + min(steps, entry.remaining) for entry in entries]
        need = Pages()
        for entry, end in zip(entries, ends, strict=True):
            need += self._rows.missing(entry.slot, entry.position, end)
        if not need.within(self._rows.available):
            return False
        for entry, end in zip(entries, ends, strict=True):
            self._rows.grow(entry.slot, entry.position, end)
        return True

    def _drawn(self, entry: Entry, record: TokenRecord) -> Delivery:
        """Notes what was drawn for an entry, or ends it; gives the event of its request."""
        if record.finish is not Finish.ERROR:  # else what was computed is not worth keeping
            self._rows.remember(entry.slot, entry.tokens, entry.position)
        self._counts.generated_tokens += record.token >= 0
        event = event_of(record)
        if not entry.begun:
            reported = tuple(entry.reported) if entry.request.prompt_logprobs else None
            event = event._replace(cached_tokens=entry.cached, prompt_logprobs=reported)
        entry.tokens.append(record.token)
        entry.remaining -= 1
        if record.finish is not Finish.NONE:
            self._vacate(entry)
        return entry.request, event

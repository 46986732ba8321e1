"""An imaginary device for tests of the scheduler: it keeps what each page would hold and checks every piece of work."""

from __future__ import annotations

from collections import defaultdict

from support import tiny_config

from north_jax.decoding import Drawn, Finish, TokenRecord, finish_of
from north_jax.kv_cache import NO_PAGE, PAGE_SIZE
from north_jax.sampling import SamplingParams
from serve.engine.memory import CachePlan
from serve.engine.scheduler import QUANTUM, Scheduler
from serve.engine.types import EngineRequest
from serve.engine.work import DecodeWork, Prefilled, PrefillWork

CONFIG = tiny_config()  # a window of 70
STOP = 3
CHUNK = 50  # unless told otherwise


def scheduler(
    slots=3,
    full_pages=9,
    sliding_pages=6,
    max_queue=100,
    max_context=400,
    chunk=CHUNK,
    prefix_cache=True,
    rows=2,
    pace=None,
    sizes=None,
):
    plan = CachePlan(
        slots=slots,
        max_context=max_context,
        chunk=chunk,
        busy_chunk=chunk,
        prefill_rows=rows,
        full_pages=full_pages,
        sliding_pages=sliding_pages,
        bytes=0,
    )
    return Scheduler(CONFIG, plan, max_queue=max_queue, prefix_cache=prefix_cache, pace=pace, sizes=sizes)


def request(name, prompt, max_tokens, family=0, reports=False):
    """A prompt of so many tokens; those of one family begin alike."""
    tokens = (
        tuple((family * 7 + i * (family + 1)) % 97 + 1 for i in range(prompt)) if isinstance(prompt, int) else prompt
    )
    return EngineRequest(name, tuple(tokens), max_tokens, SamplingParams(), frozenset({STOP}), None, reports)


def answer(name, count):
    """The token an imaginary model gives `name` as its count-th: any but STOP."""
    return 4 + (sum(name.encode()) * 31 + count * 7) % 90


class Model:
    """Stands for the device: checks the work it is given and draws tokens."""

    def __init__(self, scheduler, stops=None):
        self.scheduler = scheduler
        self.stops = stops or {}  # request id → how many tokens before STOP
        self.received = defaultdict(list)
        self.events = defaultdict(list)
        self.ended = {}
        self.to_cancel = set()  # request ids whose rows end at their next decode step
        self.computed = 0  # tokens that prefills were given
        self._full = defaultdict(lambda: [None] * PAGE_SIZE)  # page → for each position, a hash of the tokens up to it
        self._sliding = defaultdict(lambda: [None] * PAGE_SIZE)
        self._prefixes = defaultdict(list)  # request id → those hashes

    def run(self, most=QUANTUM):
        """Until there is nothing to do."""
        for _ in range(20_000):
            if not self.step(most):
                return
        raise AssertionError("the scheduler goes round in circles")

    def step(self, most=QUANTUM):
        """One device call; a decode quantum ends after `most` steps at the latest."""
        work = self.scheduler.next_work()
        if work is None:
            return False
        assert work.rows
        if isinstance(work, DecodeWork):
            self.decode(work, most)
        else:
            self.prefill(work)
        return True

    def prefill(self, work: PrefillWork):
        drawn, reported = {}, {}
        for row in work.rows:
            if row.following is not None:
                assert len(work.rows) == 1
                everything = self.tokens(self.scheduler.request_of(row.slot))
                assert list(row.following) == everything[row.start + 1 : row.start + len(row.tokens) + 1]
                reported[row.slot] = list(row.following)  # for log-probabilities: whose they are
            owner = self.scheduler.request_of(row.slot)
            self.computed += len(row.tokens)
            self.append(row.slot, owner, row.tokens, row.start, row.start + len(row.tokens))
            assert (row.draw is not None) == (row.start + len(row.tokens) == len(self.tokens(owner)))
            if row.draw is not None:
                assert row.draw.sampling is owner.sampling
                assert row.draw.position == row.start + len(row.tokens)
                drawn[row.slot] = Drawn(self.draw(owner), None)
        self.take(self.scheduler.complete(work, Prefilled(drawn, reported)))

    def decode(self, work: DecodeWork, most):
        """A quantum: a record of each live row a step."""
        live = {row.slot: (row, self.scheduler.request_of(row.slot)) for row in work.rows}
        for row, owner in live.values():
            assert row.remaining == owner.max_tokens - len(self.received[owner.request_id]) >= 1
            assert (row.stop_token_ids, row.sampling) == (owner.stop_token_ids, owner.sampling)
            assert row.position + min(work.steps, row.remaining) < len(owner.prompt) + owner.max_tokens
        for step in range(min(work.steps, most)):
            records = []
            for slot, (row, owner) in list(live.items()):
                if owner.request_id in self.to_cancel:
                    records.append(TokenRecord(slot, -1, Finish.CANCELLED))
                    del live[slot]
                    continue
                newest = row.token if step == 0 else self.received[owner.request_id][-1]
                end = row.position + min(work.steps, row.remaining)
                self.append(slot, owner, (newest,), row.position + step, end)
                token = self.draw(owner)
                finish = finish_of(token, row.remaining - step, row.stop_token_ids)
                records.append(TokenRecord(slot, token, finish))
                if finish is not Finish.NONE:
                    del live[slot]
            self.take(self.scheduler.take(records))
            if not live:
                break

    def tokens(self, owner):
        return [*owner.prompt, *self.received.get(owner.request_id, ())]

    def append(self, slot, owner, tokens, start, end):
        """Tokens enter the cache: what the row sees must be its own, and there is room up to `end`."""
        everything = self.tokens(owner)
        chunk = self.scheduler._plan.chunk
        assert 0 < len(tokens) <= chunk and end - start <= chunk
        stop = start + len(tokens)
        assert everything[start:stop] == list(tokens)
        known = self._prefixes[owner.request_id]
        for token in everything[len(known) : stop]:
            known.append(hash((known[-1] if known else 0, token)))
        tables = self.scheduler.tables()
        window = max(start - CONFIG.sliding_window + 1, 0)
        for table, contents, first in ((tables.full, self._full, 0), (tables.sliding, self._sliding, window)):
            for block in range(first // PAGE_SIZE, (end - 1) // PAGE_SIZE + 1):
                page = int(table[slot, block % table.shape[1]])
                assert page != NO_PAGE
                begin = block * PAGE_SIZE
                for position in range(max(start, begin), min(stop, begin + PAGE_SIZE)):
                    contents[page][position - begin] = known[position]
                seen = slice(max(first, begin), min(stop, begin + PAGE_SIZE))
                assert contents[page][seen.start - begin : max(seen.stop - begin, 0)] == known[seen]

    def draw(self, owner):
        count = len(self.received.get(owner.request_id, ()))
        return STOP if self.stops.get(owner.request_id) == count else answer(owner.request_id, count)

    def take(self, deliveries):
        for owner, event in deliveries:
            assert owner.request_id not in self.ended, "an event after the last one"
            self.events[owner.request_id].append(event)
            if event.token is not None:
                self.received[owner.request_id].append(event.token)
            if event.finish_reason is not None:
                self.ended[owner.request_id] = event.finish_reason


def pages_are_all_free(scheduler):
    """Nothing leaked: no row uses a page, and once the remembered ones are forgotten every page is free."""
    stats = scheduler.stats()
    assert (stats.queued, stats.running, stats.pages_used) == (0, 0, 0)
    assert sum(scheduler._rows.available) == stats.pages_total
    scheduler._rows.forget()
    return scheduler._rows.idle == (0, 0) and sum(scheduler._rows.available) == stats.pages_total

"""The engine on an imaginary H200 with a clock of its own: what it makes of the device, without one.

Everything of the engine runs but its thread: scheduler, pace, stopwatch, the hand-over between chunks and quanta. The
device is a table of times, measured on an H200 with North Mini Code in bfloat16 (`north_jax/bench/results`); the host
takes time too. So a scenario of minutes is a matter of seconds, gives the same figures every time, and a change of
policy shows before it meets a GPU.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
from support import tiny_config

from north_jax.decoding import Drawn, Finish, TokenRecord, finish_of
from north_jax.kv_cache import pages_for, ring_entries
from north_jax.packed import packed_length
from north_jax.packed.buckets import buckets
from north_jax.sampling import SamplingParams
from serve.engine.chunk_sizes import chosen
from serve.engine.engine import JaxEngine
from serve.engine.memory import CachePlan
from serve.engine.pace import Pace
from serve.engine.stopwatch import Stopwatch
from serve.engine.types import EngineRequest, TokenEvent
from serve.engine.work import DecodeWork, Prefilled, PrefillWork

CONFIG = tiny_config()
SLOTS, CONTEXT, CHUNK, BUSY_CHUNK = 8, 65536, 8192, 2048
TOKEN = 5

# Milliseconds of a chunk at a prompt's beginning, by tokens.
_CHUNKS = {64: 19.0, 128: 19.3, 512: 23.8, 1024: 28.0, 2048: 38.0, 4096: 70.0, 8192: 137.0}
_PAIR = 0.5e-6  # more for each pair of a query and a key before the chunk
_STEPS = {1: 2.21, 2: 3.3, 4: 5.2, 8: 8.3}  # of a step, by the batch's size; at a context of 1K
_POSITION = 1.6e-5  # more for each position of a row beyond that


def chunk_ms(size: int, before: int = 0) -> float:
    """Of a chunk, `before` pairs of a query and a key before the chunk."""
    return float(np.interp(size, [*_CHUNKS], [*_CHUNKS.values()])) + _PAIR * before


def step_ms(rows: int, positions: float) -> float:
    """Of a decode step of rows that hold so many positions together."""
    return _STEPS[min(size for size in _STEPS if size >= rows)] + _POSITION * max(positions - 1024 * rows, 0)


@dataclass(frozen=True)
class Host:
    """Milliseconds that the host takes: from a chunk's or quantum's call until the device begins; for a draw; after the
    last step of a quantum."""

    call: float = 0.7
    draw: float = 1.5
    end: float = 0.7


@dataclass
class Stream:
    """What became of a request: seconds on the simulation's clock."""

    sent: float
    times: list[float] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        """Milliseconds between its tokens."""
        return [(b - a) * 1e3 for a, b in itertools.pairwise(self.times)]


class Simulation:
    """An engine and its device."""

    def __init__(
        self,
        *,
        pace: Pace | None = None,
        sizes: Sequence[int] | None = None,
        host: Host | None = None,
        slower: Callable[[float], float] = lambda now: 1.0,
    ) -> None:
        """Nothing has arrived.

        Args:
          pace: by default that of a server on a GPU.
          sizes: of prefill that are compiled; by default all that a GPU's server compiles.
          host: how slow it is.
          slower: by what factor chunks take longer at some time, for another reason.
        """
        self.now = 0.0
        self.chunks: list[tuple[int, int, int]] = []  # size, tokens and pieces of each
        self.streams: dict[str, Stream] = {}
        self.host, self._slower = host or Host(), slower
        self._free = 0.0  # when the device has done all it was given
        self._arrivals: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.decoder = _Decoder()
        runner = _Runner(self, sizes or chosen(buckets(CHUNK), "gpu"))
        pace = pace or Pace(latency_s=0.052)
        with mock.patch("serve.engine.engine.Runner", lambda *arguments: runner):
            ring = ring_entries(CONFIG, CONTEXT, CHUNK)
            plan = CachePlan(
                SLOTS, CONTEXT, CHUNK, BUSY_CHUNK, SLOTS, SLOTS * pages_for(CONTEXT), 2 * SLOTS * ring, bytes=0
            )
            self.engine = JaxEngine(CONFIG, {}, plan, self.decoder, max_queue=1000, pace=pace)  # type: ignore[arg-type]
        self.engine._stopwatch = Stopwatch(pace, lambda: self.now)

    # As a client.

    def send(self, name: str, prompt: int, output: int, at: float = 0.0) -> None:
        """A request arrives at some time. All prompts are different."""

        def submit() -> None:
            self.streams[name] = stream = Stream(self.now)

            def deliver(event: TokenEvent) -> None:
                stream.times.append(self.now)

            tokens = np.random.default_rng([len(self.streams), 3]).integers(10, 90, prompt)
            request = EngineRequest(name, tuple(map(int, tokens)), output, SamplingParams(temperature=0), frozenset())
            self.engine.submit(request, deliver)

        heapq.heappush(self._arrivals, (at, next(self._numbers), submit))

    def run(self) -> None:
        """Until nothing is left to do."""
        while True:
            self._arrive()
            work = self.engine._scheduler.next_work()
            if work is not None:
                self.engine._run(work)
            elif self._arrivals:
                self._pass(self._arrivals[0][0])
                self.engine._stopwatch.works()
            else:
                return

    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now:
            heapq.heappop(self._arrivals)[2]()

    # As a device.

    def compute(self, milliseconds: float, *, called: bool = True) -> None:
        """The device has so much more to do; `called`: by a call, after which it begins at the earliest."""
        if called:
            self._pass(self.now + self.host.call / 1e3)
        begin = max(self.now, self._free) if called else self._free
        self._free = begin + milliseconds * self._slower(begin) / 1e3

    def wait(self, milliseconds: float = 0.0) -> None:
        """Until the device has done all, and so long for the host."""
        self._pass(max(self._free, self.now) + milliseconds / 1e3)

    def _pass(self, time: float) -> None:
        """Time passes, and what happens meanwhile happens when it does."""
        while self._arrivals and self._arrivals[0][0] <= time:
            self.now = max(self.now, self._arrivals[0][0])
            self._arrive()
        self.now = max(self.now, time)


class _Runner:
    """Stands for `runner.Runner`."""

    def __init__(self, simulation: Simulation, sizes: Sequence[int]) -> None:
        self.sizes = frozenset(sizes)
        self.all_sizes = len(sizes)
        self._of = simulation

    def size_of(self, work: PrefillWork) -> int:
        tokens = packed_length([len(row.tokens) for row in work.rows])
        return min(size for size in self.sizes if size >= tokens)

    def device_memory(self) -> None:
        return None

    def prefill(self, work: PrefillWork, tables: object) -> Prefilled:
        of, size = self._of, self.size_of(work)
        of.chunks.append((size, sum(len(row.tokens) for row in work.rows), len(work.rows)))
        before = sum(len(row.tokens) * row.start for row in work.rows)
        of.compute(chunk_ms(size, before))
        if work.draws:
            of.wait(of.host.draw)
        return Prefilled({row.slot: Drawn(TOKEN, None) for row in work.rows if row.draw is not None}, {})

    def decode(self, work: DecodeWork, tables: object, deliver: Callable[[list[TokenRecord]], None]) -> None:
        of, live = self._of, {row.slot: row.remaining for row in work.rows}
        of.decoder.stopping = False
        positions = sum(row.position for row in work.rows)
        of.compute(0.0)
        for step in range(work.steps):
            stopping = of.decoder.stopping
            of.compute(step_ms(len(work.rows), positions + step * len(live)), called=False)
            of.wait()
            records = [TokenRecord(slot, TOKEN, finish_of(TOKEN, left, frozenset())) for slot, left in live.items()]
            live = {record.slot: live[record.slot] - 1 for record in records if record.finish is Finish.NONE}
            deliver(records)
            if not live or stopping or of.decoder.stopping:
                break
        of.wait(of.host.end)


class _Decoder:
    """Stands for the decoder, as far as the engine itself looks at it."""

    sizes = tuple(_STEPS)
    stopping = False

    def stop(self) -> None:
        self.stopping = True

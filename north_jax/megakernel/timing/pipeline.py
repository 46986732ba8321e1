"""Producer and consumers of one SM."""

from __future__ import annotations

from collections import deque

from .events import Clock, Counters, Memory
from .lane import NEVER, Lane
from .machine import Kernel, Machine
from .program import Entry, Item, Phase, Program
from .timeline import Tally, Timeline

# A page on its way or in the ring: when it lands, the stage that must be ready (-1: none), µs of the consumers, what
# they are booked on, the item that ends with it, its step. A plain tuple: one is made for every page.
type _Landing = tuple[float, int, float, Tally, Item | None, int]


class Pipeline:
    """Streams the SM's items into its ring and consumes them."""

    def __init__(
        self,
        sm: int,
        program: Program,
        steps: int,
        machine: Machine,
        kernel: Kernel,
        shared: tuple[Clock, Memory, Counters, Timeline],
        claims: list[list[int]],
    ) -> None:
        """claims[step][queue] counts the items taken, by all SMs."""
        self._sm, self._program, self._steps, self._machine, self._kernel = sm, program, steps, machine, kernel
        self._clock, self._memory, self._counters, self._timeline = shared
        self._claims, self._stream, self._stages = claims, program.stream[sm], len(program.loader[sm])
        self.loader = Lane(program.loader[sm], steps, machine, kernel, shared, self.consume)
        # producer
        self._step = self._entry = self._page = self._base = 0
        self._item: Item | None = None
        self._tally = Tally()
        self._known: set[tuple[int, ...]] = set()  # gates passed in this step
        self._slots = kernel.ring_pages  # never used so far
        self._blocked = NEVER  # since when it waits for a free slot
        self._landed = deque([0.0] * kernel.window)  # of the last pages asked for
        self._port = 0.0
        self._prefetched: dict[int, int] = {}  # layer → bytes that memory had served before
        # ring and consumers
        self._freed: deque[float] = deque()  # slots
        self._pending: deque[_Landing] = deque()
        self._time = 0.0

    @property
    def finished(self) -> bool:
        """Whether everything was streamed and consumed."""
        return self._step == self._steps and not self._pending and self.loader.finished

    def start(self) -> None:
        """Begins the first step."""
        self.loader.start()
        self._plan(0.0)

    def _plan(self, time: float) -> None:
        """Finds the next page and when it can be asked for; `time` is when the producer looks for it."""
        if self._item is None and not self._next_item(time):
            return
        if self._slots:
            self._slots -= 1
        elif self._freed:
            time = max(time, self._freed.popleft())
        else:
            self._blocked = time
            return
        self._clock.at(max(time, self._landed[0]), self._issue, None)

    def _next_item(self, time: float) -> bool:
        """Takes the next item. False: the lists have ended, or the experts are not known yet."""
        while self._step < self._steps:
            if self._entry == len(self._stream):
                self._entry = 0
                self._step += 1
                self._known.clear()
                continue
            entry = self._stream[self._entry]
            if entry.gate and entry.gate not in self._known:
                self._wait_for_experts(entry, time)
                return False
            item = entry.item
            if item is None:
                queue, taken = self._program.queues[entry.queue], self._claims[self._step]
                if taken[entry.queue] == len(queue):
                    self._entry += 1
                    continue
                item = queue[taken[entry.queue]]
                taken[entry.queue] += 1
            else:
                self._entry += 1
            self._item, self._page = item, 0
            self._base = entry.base + self._step * self._stages
            self._tally = self._timeline.tally(self._step, self._sm, item.layer, item.phase)
            return True
        return False

    def _wait_for_experts(self, entry: Entry, time: float) -> None:
        if self._kernel.prefetch_o:
            self._prefetch(time, entry.layer)

        def seen(visible: float) -> None:
            self._clock.at(max(visible, time), known, visible)

        def known(now: float, visible: float) -> None:
            self._known.add(entry.gate)
            chosen = self._memory.seen(now, visible, time) + entry.gate_time
            self._timeline.known[self._step, entry.layer].append(chosen)
            self._plan(chosen)

        self._counters.when_complete(self._step, entry.gate, seen)

    def _prefetch(self, time: float, layer: int) -> None:
        """Asks for the layer's O-proj rows, to be found in L2 later."""
        self._prefetched[layer] = self._memory.served
        for entry in self._stream:
            if entry.item and entry.item.phase == Phase.OUT and entry.item.layer == layer:
                for page in entry.item.pages:
                    self._memory.serve(time, page.bytes, page.service)

    def _in_l2(self, item: Item) -> bool:
        since = self._prefetched.get(item.layer) if item.phase == Phase.OUT else None
        return since is not None and self._memory.served - since < self._machine.l2_bytes

    def _issue(self, time: float, _: None) -> None:
        """Asks for a page."""
        item, tally, landed = self._item, self._tally, time
        assert item is not None
        size, service, port, work, stage = item.pages[self._page]
        if size:
            if self._prefetched and self._in_l2(item):
                service = 0.0
            tally.idle += self._memory.serve(time, size, service)
            tally.bytes += size
            self._port = landed = max(self._memory.free + self._machine.page_latency, self._port) + port
        self._landed.append(landed)
        self._landed.popleft()
        if landed < tally.landed:
            tally.landed = landed
        self._page += 1
        last = self._page == len(item.pages)
        number = stage + self._base if stage >= 0 else -1
        self._pending.append((landed, number, work, tally, item if last else None, self._step))
        if last:
            self._item = None
        if len(self._pending) == 1:
            self.consume()
        self._plan(time)

    def consume(self) -> None:
        """Consumes all pages whose activations are staged; what is computed here may lie in the future."""
        pending, ready, now = self._pending, self.loader.ready, self._time
        while pending:
            landed, stage, work, tally, item, step = pending[0]
            if stage >= 0:
                staged = ready[stage]
                if staged > now:
                    if staged == NEVER:
                        self._time = now
                        self.loader.request(stage, now)
                        break
                    tally.waiting += staged - now
                    now = staged
            pending.popleft()
            if landed > now:
                tally.starving += landed - now
                now = landed
            tally.working += work
            now += work
            self._freed.append(now)
            if item is not None:
                tally.working += self._machine.consume_tile
                now += self._machine.consume_tile
                if item.arrivals:
                    self._counters.send(now + self._machine.epilogue, step, item.arrivals)
            tally.done = self._time = now
        if self._blocked < NEVER and self._freed:
            time, self._blocked = self._blocked, NEVER
            self._plan(time)

"""The engine: one thread that runs the scheduler's work on the device and delivers tokens.

A decode quantum takes many steps, so what changes meanwhile has to reach it: an arrival that could be admitted and the
engine's end stop it, a cancellation ends its row. `_steer` tells the decoder so, at once from the thread that brings
the change, and after every step again, because the decoder forgets what it was told before the quantum began.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from north_jax.config import Config
from north_jax.decoding import Decoder, Finish, TokenRecord
from north_jax.layers import Params

from .memory import CachePlan
from .pace import Pace
from .runner import Runner
from .scheduler import Delivery, Scheduler
from .stopwatch import Stopwatch
from .types import EngineRequest, EngineStats, EngineUnavailable, FinishReason, QueueFull, TokenEvent
from .work import PrefillWork, Work

_log = logging.getLogger(__name__)

_LONGEST_RETRY_SECONDS = 60.0
_LAST_CALL_SECONDS = 30.0  # for the device call that runs when the engine stops
_PATIENCE_SECONDS = 20.0  # that a compilation waits for the engine to be idle

type Deliver = Callable[[TokenEvent], None]


class JaxEngine:
    """Continuous batching over jitted prefill and a decoder; see `types.Engine` for the contract."""

    def __init__(
        self,
        config: Config,
        params: Params,
        plan: CachePlan,
        decoder: Decoder,
        *,
        max_queue: int,
        prefix_cache: bool = True,
        pace: Pace | None = None,
    ) -> None:
        """Allocates the KV cache; `start` compiles and begins to serve.

        Args:
          config: the model's configuration.
          params: DESIGN.md, "Parameters".
          plan: slots, context, chunk and pages, from `memory.plan_cache`.
          decoder: of the same model, for plan.slots slots; the engine alone uses it.
          max_queue: requests that may wait for a slot.
          prefix_cache: whether requests use what earlier ones with the same beginning left in the KV cache.
          pace: sizes chunks and quanta while there are both.
        """
        self.max_context = plan.max_context
        self.max_requests = plan.slots + max_queue
        self._pace = pace or Pace()
        self._decoder = decoder
        self._runner = Runner(config, params, plan, decoder)
        self._scheduler = Scheduler(
            config,
            plan,
            max_queue=max_queue,
            prefix_cache=prefix_cache,
            pace=self._pace,
            sizes=lambda: self._runner.sizes,
        )
        self._changed = threading.Condition()  # guards the scheduler and all below
        self._deliver: dict[str, Deliver] = {}
        self._cancelled: set[str] = set()  # requests that are to end
        self._decoding: dict[str, int] = {}  # requests that the running quantum began with → slot
        self._stopwatch = Stopwatch(self._pace)
        self._ends: deque[float] = deque(maxlen=16)  # when the last requests ended
        self._draining = False
        self._stopped = False
        self._failure: str | None = None
        self._warmer: threading.Thread | None = None
        self._warm = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        """Compiles what every request needs, then starts the thread."""
        self._runner.compile(self._scheduler.tables())
        self._thread.start()

    @property
    def prefill_shapes(self) -> tuple[int, int]:
        """Sizes of prefill that are compiled, and all that there will be after `warm_up`."""
        return len(self._runner.sizes), self._runner.all_sizes

    def warm_up(self) -> None:
        """Compiles in the background what makes some requests faster or only some need: while nobody waits, if it can.

        A compilation takes Python's lock for seconds in small pieces, which delays every token a little and some by
        tenths of a second. So each waits for the engine to be idle; but where that is never so, not for ever.
        """

        def moment() -> bool:
            with self._changed:
                self._changed.wait_for(lambda: self._draining or not self._deliver, timeout=_PATIENCE_SECONDS)
                return not self._draining

        def compile() -> None:
            self._runner.warm_up(moment)
            self._warm = not self._draining

        self._warmer = threading.Thread(target=compile, name="warm-up")
        self._warmer.start()

    def submit(self, request: EngineRequest, deliver: Deliver) -> None:
        """Queues a request; see `types.Engine.submit`."""
        with self._changed:
            if self._failure is not None:
                raise EngineUnavailable(f"The engine has failed: {self._failure}")
            if self._draining:
                raise EngineUnavailable("The server is shutting down")
            self._scheduler.check(request)
            if request.request_id in self._deliver:
                raise ValueError(f"request id {request.request_id!r} is in use")
            try:
                self._scheduler.add(request)
            except QueueFull:
                raise QueueFull(self._seconds_between_ends()) from None
            self._deliver[request.request_id] = deliver
            self._steer()
            self._changed.notify()

    def _seconds_between_ends(self) -> float:
        """How long it took of late until a place became free: when a request ends, one that waits moves up."""
        if len(self._ends) < 2:
            return 1.0
        return min(max((self._ends[-1] - self._ends[0]) / (len(self._ends) - 1), 1.0), _LONGEST_RETRY_SECONDS)

    def cancel(self, request_id: str) -> None:
        """Asks for a request's end; it takes effect at the next decode step, or before the next device call."""
        with self._changed:
            if request_id in self._deliver:
                self._cancelled.add(request_id)
                self._steer()
                self._changed.notify()

    def stats(self) -> EngineStats:
        """A snapshot of queue, slots, pages, compiled programs and the device's memory."""
        compiled, shapes = self.prefill_shapes
        memory = self._runner.device_memory()
        with self._changed:
            return replace(
                self._scheduler.stats(),
                failure=self._failure,
                warm=self._warm,
                prefill_compiled=compiled,
                prefill_shapes=shapes,
                chunks=dict(self._stopwatch.chunks),
                seconds=dict(self._stopwatch.seconds),
                device_bytes=memory,
            )

    def shutdown(self, deadline_s: float) -> None:
        """Refuses new requests, waits up to `deadline_s` seconds for the others, cancels the rest, ends the thread.

        A device call that does not return within half a minute more is left behind: the thread is a daemon.
        """
        end = time.monotonic() + deadline_s
        with self._changed:
            self._draining = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._deliver, timeout=max(end - time.monotonic(), 0))
            self._stopped = True
            self._steer()
            self._changed.notify_all()
        if self._warmer is not None:
            self._warmer.join()
        if self._thread.is_alive():
            self._thread.join(timeout=_LAST_CALL_SECONDS)
            if self._thread.is_alive():
                _log.error("a device call did not return within %g s of the shutdown", _LAST_CALL_SECONDS)

    def _loop(self) -> None:
        try:
            self._serve()
        except Exception as error:  # a fault of ours, or a device that is lost: nobody may wait for this thread
            _log.exception("the engine has failed")
            with self._changed:
                self._failure = f"{type(error).__name__}: {error}"
                waiting, self._deliver = self._deliver, {}
                for deliver in waiting.values():
                    with contextlib.suppress(Exception):
                        deliver(TokenEvent(None, FinishReason.ERROR, self._failure))
                self._changed.notify_all()

    def _serve(self) -> None:
        while (work := self._next_work()) is not None:
            try:
                self._run(work)
            except Exception as error:
                _log.exception("a device call failed; its requests end with an error")
                self._runner.reset()
                with self._changed:
                    self._send(self._scheduler.fail_running(f"{type(error).__name__}: {error}"))
        with self._changed:
            self._send(self._scheduler.cancel_all())

    def _next_work(self) -> Work | None:
        """Waits for work; None when the engine ends."""
        with self._changed:
            while not self._stopped:
                self._apply_cancellations()
                if (work := self._scheduler.next_work()) is not None:
                    return work
                self._changed.wait()
                self._stopwatch.works()
            return None

    def _run(self, work: Work) -> None:
        tables = self._scheduler.tables()  # this thread alone changes them
        if isinstance(work, PrefillWork):
            self._stopwatch.prefills(self._runner.size_of(work), work.pairs, others=self._scheduler.decodes)
            drawn = self._runner.prefill(work, tables)
            self._stopwatch.prefilled(drawn=work.draws)
            with self._changed:
                self._send(self._scheduler.complete(work, drawn))
            return
        with self._changed:
            self._decoding = {self._scheduler.request_of(row.slot).request_id: row.slot for row in work.rows}
            self._stopwatch.decodes()
        try:
            self._runner.decode(work, tables, self._take)
        finally:
            self._stopwatch.decoded()
            with self._changed:
                self._decoding.clear()

    def _take(self, records: list[TokenRecord]) -> None:
        """Receives one step of the running quantum."""
        self._stopwatch.step()
        with self._changed:
            self._send(self._scheduler.take(records))
            self._apply_cancellations()
            self._steer()
            if self._fit_a_smaller_size(records):
                self._decoder.stop()

    def _apply_cancellations(self) -> None:
        """Ends what is cancelled, but not a row of the running quantum: the decoder ends that itself."""
        for request_id in self._cancelled - self._decoding.keys():
            self._cancelled.discard(request_id)
            self._send(self._scheduler.cancel(request_id))

    def _fit_a_smaller_size(self, records: list[TokenRecord]) -> bool:
        """Whether the rows that go on would decode faster by themselves than with those of the quantum that ended."""
        live = sum(record.finish is Finish.NONE for record in records)
        sizes = self._decoder.sizes
        return 0 < live < len(records) and bisect_left(sizes, live) < bisect_left(sizes, len(records))

    def _steer(self) -> None:
        """Tells the running quantum, if there is one, what has changed. In any thread."""
        for request_id in self._cancelled & self._decoding.keys():
            self._decoder.cancel(self._decoding[request_id])
        if self._decoding and (self._stopped or self._scheduler.can_admit()):
            self._decoder.stop()

    def _send(self, deliveries: list[Delivery]) -> None:
        """Hands events to their receivers; a receiver that fails loses its request, nobody else's."""
        for request, event in deliveries:
            deliver = self._deliver[request.request_id]
            if event.finish_reason is not None:
                self._ends.append(time.monotonic())
                del self._deliver[request.request_id]
                self._cancelled.discard(request.request_id)
            try:
                deliver(event)
            except Exception:
                _log.exception("the receiver of request %s failed; the request is cancelled", request.request_id)
                if event.finish_reason is None:
                    self._deliver[request.request_id] = _discard
                    self._cancelled.add(request.request_id)
        if not self._deliver:
            self._changed.notify_all()


def _discard(event: TokenEvent) -> None:
    """Receives the remaining events of a request whose receiver failed."""

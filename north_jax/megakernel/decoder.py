"""The decoder whose quanta are single calls: compiled code runs the steps while this thread delivers their tokens.

A quantum is queued at the engine, and one FFI call runs it. The call is made in a thread of its own, because XLA's CPU
backend keeps the caller until the call has run: it runs what looks cheap at once, and a custom call counts no work.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ..adjust import mask_words
from ..config import Config
from ..decoding import BackendError, DecodeRow, Deliver, Finish, HistoryCounts, TokenRecord, check_draws, draw_of
from ..kv_cache import KVCache, PageTables
from ..layers import Array, Params
from .abi import MAX_BIASES, MAX_ROWS, ROW_FIELDS, Buffer
from .batch import Entry, Steps, biases_of, masks_of, pack_rows, tables_of
from .binding import add_schedule, make_engine
from .build import BATCHES, build
from .call import decode_call, read_workspace
from .layout import LOCAL
from .orders import Order
from .schedule import Schedule
from .selection import choices, select
from .support import lists_for

_WAIT_SECONDS = 0.05  # for tokens, before another look at the call


class DecodeError(RuntimeError):
    """A quantum failed; the message is what the executor or the kernel reported. The cache is lost."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Shape:
    """What runs a batch of one size, in one wave order."""

    schedule: Schedule
    number: int  # of the schedule at the engine
    call: jax.stages.Compiled  # shared by the schedules of one batch size, as what follows
    no_biases: Array  # for rows without any, which need not be sent
    no_masks: Array


@dataclasses.dataclass(frozen=True, slots=True)
class _Running:
    """The quantum that runs."""

    number: int
    row_of_slot: dict[int, int]


def _size_for(rows: int) -> int:
    """The compiled batch size that so many rows run in."""
    return next(batch for batch in BATCHES if batch >= rows)


class MegakernelDecoder:
    """See `decoding.Decoder`. The rows of a quantum form a batch of the smallest size that holds them."""

    backend = "megakernel"

    def __init__(
        self,
        config: Config,
        params: Params,
        *,
        slots: int,
        max_context: int,
        sms: int | None = None,
        order: Order | None = None,
        threads: int | None = None,
        timeout_s: float = 10.0,
        counter_origin: int = 0,
        planes: int = 2,
    ) -> None:
        """Binds the model's weights, and keeps them alive.

        Args:
          config: the model's configuration.
          params: DESIGN.md, "Parameters": arrays of one type on one device, never donated.
          slots: rows of the page tables.
          max_context: most positions a row may hold.
          sms: lists of a schedule; by default what suits the device.
          order: wave order of the schedules; by default `selection.select` chooses for each quantum.
          threads: of the CPU executor; by default as many as the machine has cores.
          timeout_s: a quantum that waits for so long without success fails.
          counter_origin: what counters begin with in every quantum, a uint32. They are compared by difference, so that
            they may wrap: an origin just below 2^32 shows it.
          planes: copies of each activation, which the layers use in turn: with as many as there are layers,
            `activations` shows all of them.

        Raises:
          ValueError: `counter_origin` is no uint32.
          BackendError: nothing compiled decodes on this device, or it does not take this model or so many slots.
        """
        if slots > MAX_ROWS:
            raise BackendError(f"the megakernel decodes at most {MAX_ROWS} slots together, not {slots}")
        if not 0 <= counter_origin < 2**32:
            raise ValueError(f"counter_origin is {counter_origin}, expected a uint32")
        self.max_rows = slots
        self.sizes = tuple(batch for batch in BATCHES if batch <= _size_for(slots))
        self._vocabulary = config.vocab_size
        self._max_context = max_context
        self._engine = make_engine(config, params)
        self._device = next(iter(params["embed"].devices()))
        self._threads = threads or os.cpu_count() or 1
        self._timeout_s = timeout_s
        self._counter_origin = counter_origin
        sms = sms or lists_for(config, self._device.platform)
        self._build = partial(build, config, sms=sms, dtype=params["embed"].dtype, planes=planes)
        self._order = order
        try:
            self._build(batch=1)
        except ValueError as error:
            raise BackendError(str(error)) from error
        self._shapes: dict[tuple[int, str], _Shape] = {}  # by batch size and name of the order
        self._workspace_bytes = 0
        self._workspace: Array | None = None
        self._counts = HistoryCounts(slots, config.vocab_size, self._device)
        self._last: tuple[_Shape, int] | None = None  # what ran the last quantum, and its rows
        self._caller = ThreadPoolExecutor(1, thread_name_prefix="decode-call")
        self._lock = threading.Lock()  # guards what follows
        self._running: _Running | None = None
        self._decoding = (
            False  # what was said meanwhile: calls of a quantum follow each other where a row has a grammar
        )
        self._stopped = False
        self._cancelled: set[int] = set()

    def not_pipelined(self) -> dict[tuple[int, str], str]:
        """By batch size and order: why a schedule runs on the plain CUDA kernel, not on the pipelined one."""
        reasons = {shape: self._engine.not_pipelined(of.number) for shape, of in self._shapes.items()}
        return {shape: reason for shape, reason in reasons.items() if reason}

    def compile(self, cache: KVCache, tables: PageTables) -> None:
        schedules = [[self._build(batch=batch, order=order) for order in self._orders(batch)] for batch in self.sizes]
        self._workspace_bytes = max(schedule.workspace.bytes for of_batch in schedules for schedule in of_batch)
        for of_batch in schedules:
            batch = of_batch[0].batch
            shape = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
            no_biases = jnp.zeros((batch, MAX_BIASES, 2), jnp.int32, device=self._device)
            no_masks = jnp.zeros((batch, mask_words(self._vocabulary)), jnp.uint32, device=self._device)
            call = decode_call.lower(
                shape((batch, ROW_FIELDS)),
                jax.ShapeDtypeStruct((self._workspace_bytes,), jnp.uint8),
                shape((self.max_rows, self._vocabulary)),
                *(shape((batch, table.shape[1])) for table in tables),
                no_biases,
                no_masks,
                cache,
                engine=self._engine.id,
            ).compile()
            for schedule in of_batch:
                number = add_schedule(self._engine, schedule)
                self._shapes[batch, schedule.order] = _Shape(schedule, number, call, no_biases, no_masks)
        self._workspace = self._take_workspace()

    def decode(
        self, cache: KVCache, tables: PageTables, rows: Sequence[DecodeRow], steps: int, deliver: Deliver
    ) -> KVCache:
        self._check(rows, steps)
        live = list(rows)
        with self._lock:
            self._decoding, self._stopped = True, False
            self._cancelled.clear()
        try:
            # A grammar is asked before each step, and there is none between the steps of a call.
            each = 1 if any(row.grammar for row in rows) else steps
            for _ in range(0, steps, each):
                if not live or self._stopped:
                    break
                cache = self._quantum(cache, tables, live, each, deliver)
        finally:
            with self._lock:
                self._decoding = False
        return cache

    def _quantum(
        self, cache: KVCache, tables: PageTables, live: list[DecodeRow], steps: int, deliver: Deliver
    ) -> KVCache:
        """One call. Of `live`, it leaves the rows that go on, where they are then."""
        assert self._shapes, "compile comes before decode"
        rows = tuple(live)
        batch = _size_for(len(rows))
        shape = self._shape_for(batch, max(row.position for row in rows) + 1)
        biases, masks = biases_of(rows, batch), masks_of(rows, batch, self._vocabulary)
        histories = {row.slot: row.history for row in rows if row.sampling.penalises and row.history is not None}
        operands = (
            pack_rows(rows, batch),
            self._take_workspace(),
            self._counts.take(histories),
            *tables_of(rows, tables, batch),
            shape.no_biases if biases is None else biases,
            shape.no_masks if masks is None else masks,
            cache,
        )
        self._last = None
        with self._lock:
            number = self._engine.queue(
                shape.number,
                steps,
                threads=self._threads,
                timeout_s=self._timeout_s,
                counter_origin=self._counter_origin,
            )
            self._running = _Running(number, {row.slot: i for i, row in enumerate(rows)})
            for slot in self._cancelled & self._running.row_of_slot.keys():
                self._engine.cancel(self._running.row_of_slot[slot], number)
        step = Steps(number, [row.slot for row in rows])
        call = self._caller.submit(_run, shape.call, operands)
        try:
            for entries in self._entries(number, call):
                for records in step.add(entries):
                    live[:] = self._advanced(live, records)
                    deliver(records)
        except BaseException:  # the receiver's: the call must have ended before anything else happens to its operands
            self._engine.stop()
            for _ in self._entries(number, call):
                pass
            wait([call])
            raise
        finally:
            self._engine.drop_queued()  # of a call that failed on its way
            with self._lock:
                self._running = None
        _, self._workspace, counts, cache = self._result(number, call)
        self._counts.put(counts)
        self._last = (shape, len(rows))
        return cache

    def schedule_of(self, rows: int, context: int) -> Schedule:
        """The task lists that so many rows run by, the longest of `context` positions. After compile()."""
        return self._shape_for(_size_for(rows), context).schedule

    def _shape_for(self, batch: int, context: int) -> _Shape:
        order = self._order or select(batch, context)
        return self._shapes[batch, order.name]

    def _advanced(self, live: list[DecodeRow], records: list[TokenRecord]) -> list[DecodeRow]:
        """Tells the rows' histories and grammars what a step drew; gives the rows that go on."""
        going = []
        for row, record in zip(live, records, strict=True):
            token = record.token
            if token >= 0 and row.history is not None:
                self._counts.drew(row.slot, row.history, token, counted=row.sampling.penalises)
            if token >= 0 and row.grammar is not None:
                row.grammar.accept(token)
            if record.finish is Finish.NONE:
                position, remaining = row.position + 1, row.remaining - 1
                going.append(dataclasses.replace(row, token=token, position=position, remaining=remaining))
        return going

    def stop(self) -> None:
        with self._lock:
            self._stopped = self._decoding
            if self._running is not None:
                self._engine.stop()

    def cancel(self, slot: int) -> None:
        with self._lock:
            if self._decoding:
                self._cancelled.add(slot)
            if self._running is not None and slot in self._running.row_of_slot:
                self._engine.cancel(self._running.row_of_slot[slot], self._running.number)

    def logits(self) -> np.ndarray:
        """What the last step of the last quantum computed: float32 [rows, V], in the order of its rows.

        They are as `adjust.adjust` leaves them, after penalties, biases and masks.
        A row that ended before that step has those of an earlier one, or anything.

        Raises:
          RuntimeError: no quantum has run, or the last one failed.
        """
        logits = self.activations(Buffer.LOGITS, 0)
        assert self._last is not None
        return logits[: self._last[1]]

    def activations(self, buffer: Buffer, layer: int) -> np.ndarray:
        """What the last step of the last quantum left in a buffer, of rows that it ran.

        Args:
          buffer: one that the step's schedule has.
          layer: the plane is that of this layer; the number of layers for what follows the last one. Layers share
            planes, and of those that share one the last is seen.

        Returns:
          In the shape that `abi.Buffer` names, for the compiled batch: idle rows hold anything. LOCAL buffers have an
          axis more, the SMs, before the others. LOCAL_HIDDEN holds anything after the pipelined kernel, which keeps it
          in shared memory alone.

        Raises:
          RuntimeError: no quantum has run, or the last one failed.
        """
        if self._last is None or self._workspace is None:
            raise RuntimeError("no quantum left activations")
        schedule = self._last[0].schedule
        spec, offset = schedule.workspace.buffers[buffer], schedule.workspace.offsets[buffer]
        plane = layer % spec.planes
        if buffer in LOCAL:
            shape = (schedule.sms, spec.planes, *spec.shape)
            return read_workspace(self._workspace, offset, shape, spec.dtype)[:, plane]
        return read_workspace(self._workspace, offset + plane * spec.plane_bytes, spec.shape, spec.dtype)

    def _orders(self, batch: int) -> list[Order]:
        return [self._order] if self._order else [order for _, order in choices(batch)]

    def _check(self, rows: Sequence[DecodeRow], steps: int) -> None:
        slots = [row.slot for row in rows]
        if len({*slots}) < len(slots) or not {*slots} <= {*range(self.max_rows)}:
            raise ValueError(f"rows of slots {slots}: expected different ones below {self.max_rows}")
        check_draws({row.slot: draw_of(row) for row in rows}, self._vocabulary)
        if steps < 1:
            raise ValueError(f"a quantum of {steps} steps")
        for row in rows:
            end = row.position + min(steps, row.remaining)
            if row.position < 0 or row.remaining < 1 or end > self._max_context:
                raise ValueError(
                    f"slot {row.slot} would go from {row.position} to {end} positions, max_context is "
                    f"{self._max_context}"
                )

    def _take_workspace(self) -> Array:
        """The workspace, for a call that donates it; a new one after a call that failed."""
        workspace, self._workspace = self._workspace, None
        if workspace is None:
            workspace = jnp.zeros(self._workspace_bytes, jnp.uint8, device=self._device)
        return workspace

    def _entries(self, number: int, call: Future[_State]) -> Iterator[list[Entry]]:
        """The entries of a running quantum, as they come, until it has ended."""
        over = False
        while not over:
            over = call.done() or self._engine.finished() >= number  # then no entry comes after these
            yield self._engine.take_entries(number, _WAIT_SECONDS)

    def _result(self, number: int, call: Future[_State]) -> _State:
        try:
            state = call.result()
        except Exception as error:  # of several types: JAX's quick path turns those of a handler into ValueError
            if report := self._engine.error(number):
                raise DecodeError(report) from error
            raise
        if report := self._engine.error(number):
            raise DecodeError(report)
        return state


type _State = tuple[Array, Array, Array, KVCache]  # rows, workspace, counts, cache


def _run(call: jax.stages.Compiled, operands: tuple[object, ...]) -> _State:
    """The call, and the wait for its end: all results of a call are ready together."""
    state: _State = call(*operands)
    state[1].block_until_ready()
    return state

"""Translates descriptors into a program: bytes from the geometry, divided work from `division`."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from ..abi import MAX_SPLITS, OPERATIONS, PAGE_TOKENS, PASS_BITS, Buffer, Field, Lane, Opcode
from ..division import attention_items, attention_splits, dealt
from ..schedule import Schedule
from ..tasks import TILE_ROWS
from .load import Load
from .machine import Kernel, Machine
from .program import Arrivals, Entry, Item, Page, Phase, Program, Stage

F = Field
_FLOAT = 4  # bytes
type _Task = list[int]
_ATTENTION = (Opcode.ATTN_DECODE, Opcode.ATTN_DRAIN)
_EXPERT_UP = (Opcode.MOE_UPGATE_ACT, Opcode.MOE_UPGATE_ACT_DRAIN)
_EXPERT_DOWN = (Opcode.MOE_DOWN, Opcode.MOE_DOWN_DRAIN)
_SAMPLING = (Opcode.SAMPLE_HISTOGRAM, Opcode.SAMPLE_MASS, Opcode.SAMPLE_DRAW, Opcode.END_STEP)
_PHASES = {
    Opcode.QKV_PROJ: Phase.QKV,
    Opcode.ROUTER_GEMM: Phase.ROUTER,
    Opcode.O_PROJ: Phase.OUT,
    Opcode.FFN_UPGATE_ACT: Phase.UP,
    Opcode.FFN_DOWN: Phase.DOWN,
    Opcode.LM_HEAD: Phase.HEAD,
    **dict.fromkeys(_ATTENTION, Phase.ATTENTION),
    **dict.fromkeys(_EXPERT_UP, Phase.UP),
    **dict.fromkeys(_EXPERT_DOWN, Phase.DOWN),
}


def translate(schedule: Schedule, load: Load, machine: Machine, kernel: Kernel) -> Program:
    """The program of a schedule under a load. Raises ValueError where the load is of another batch or model."""
    layers = schedule.config.num_hidden_layers
    if load.batch != schedule.batch or len(load.active) != layers:
        raise ValueError(
            f"a load of {load.batch} rows and {len(load.active)} layers does not fit a schedule of {schedule.batch} "
            f"rows and {layers} layers"
        )
    tasks = schedule.tasks.tolist()
    sms = range(schedule.sms)
    needs = [*schedule.counter_needs.tolist(), 1]
    logits = next(task[F.ARRIVE] for task in tasks if task[F.OPCODE] == Opcode.LM_HEAD)
    program = Program(
        schedule=schedule,
        stream=[[] for _ in sms],
        loader=[[] for _ in sms],
        side=[[] for _ in sms],
        queues=[[] for _ in schedule.queue_names],
        needs=needs,
        end=len(needs) - 1 if kernel.sampling else logits,
    )
    pages = _Pages(schedule, load, machine, kernel)
    for sm in sms:
        stages = _Stages(program, sm, load, machine, kernel)
        for task in tasks[schedule.begin[sm] : schedule.begin[sm + 1]]:
            opcode = Opcode(task[F.OPCODE])
            if OPERATIONS[opcode].lane == Lane.MATRIX:
                _add_matrix(program, sm, opcode, task, stages, pages)
            elif kernel.sampling or opcode not in _SAMPLING:
                stages.add(opcode, task)
    return program


def _add_matrix(program: Program, sm: int, opcode: Opcode, task: _Task, stages: _Stages, pages: _Pages) -> None:
    base = stages.inputs(opcode, task)
    gate, gate_time = stages.gate(opcode, task)
    stream, layer = program.stream[sm], task[F.LAYER]
    if not OPERATIONS[opcode].claims:
        items = pages.items(opcode, task)
        stream += [Entry(item, -1, layer, base, gate, gate_time) for item in items]
    else:
        queue = program.queues[task[F.QUEUE]]
        items = [] if queue else pages.items(opcode, task)  # all that the queue holds, at its first claimer
        queue += items
        stream.append(Entry(None, task[F.QUEUE], layer, base, gate, gate_time))
    program.bytes += sum(page.bytes for item in items for page in item.pages)


def _waits(task: _Task) -> tuple[int, ...]:
    return tuple(range(task[F.WAIT], task[F.WAIT] + task[F.WAIT_COUNT]))


def _arrives(task: _Task) -> Arrivals:
    return ((task[F.ARRIVE], task[F.ARRIVE_COUNT]),) if task[F.ARRIVE_COUNT] else ()


class _Stages:
    """Loader and side lanes of one SM."""

    def __init__(self, program: Program, sm: int, load: Load, machine: Machine, kernel: Kernel) -> None:
        self._program, self._load, self._machine, self._kernel = program, load, machine, kernel
        self._loader, self._side = program.loader[sm], program.side[sm]
        self._config = program.schedule.config
        self._type = program.schedule.workspace.buffers[Buffer.HIDDEN].dtype.itemsize
        self._staged: dict[tuple[int, int, int], int] = {}  # buffer, layer, first column → stage

    def add(self, opcode: Opcode, task: _Task) -> None:
        """A task of the loader or the side lane."""
        config, machine, rows = self._config, self._machine, task[F.BATCH_COUNT]
        width = rows * config.hidden_size * _FLOAT
        counters, arrivals, previous = _waits(task), _arrives(task), False
        compute, size = machine.side_task, 0
        if opcode == Opcode.EMBED:  # what ended a step begins the next
            counters, previous, compute, size = (self._program.end,), True, 0.0, width
        elif opcode == Opcode.ADD_RMSNORM:
            local = task[F.INPUT] == Buffer.LOCAL_RESIDUAL
            added = task[F.SPLIT] + 1 if task[F.INPUT_2] else 0
            compute, size = machine.norm, width * (added + (not local))
        elif opcode == Opcode.ATTN_COMBINE:
            splits = attention_splits(self._load.positions[task[F.BATCH_BEGIN]], task[F.WINDOW]).number
            size = splits * task[F.ROW_COUNT] * (config.head_dim + 2) * _FLOAT
            if self._kernel.whole_phases:
                kv_heads = config.num_key_value_heads
                place = task[F.BATCH_BEGIN] * kv_heads + task[F.ROW_BEGIN] // config.queries_per_kv_head
                first = task[F.WAIT] - place
                counters = tuple(range(first, first + self._load.batch * kv_heads))
        elif opcode == Opcode.ROUTER_TOPK:
            compute = machine.top_k
        elif opcode == Opcode.MOE_GATHER:
            size = task[F.ROW_COUNT] * config.hidden_size * self._type
        elif opcode == Opcode.MOE_COMBINE:
            size = rows * config.num_experts_per_tok * task[F.ROW_COUNT] * _FLOAT
        elif opcode in (Opcode.SAMPLE_HISTOGRAM, Opcode.SAMPLE_MASS):
            passes = self._kernel.search_passes
            if passes > (task[F.SPLIT] if opcode == Opcode.SAMPLE_HISTOGRAM else 0):
                size = round(rows * task[F.ROW_COUNT] * _FLOAT * self._kernel.vocabulary_scale)
                size += rows * 2**PASS_BITS * 8 * (task[F.SPLIT] > 0 or opcode == Opcode.SAMPLE_MASS)
            else:  # no row asks for it
                counters, compute = (), 0.0
        elif opcode == Opcode.END_STEP:
            arrivals = ((self._program.end, 1),)
        loads = OPERATIONS[opcode].lane == Lane.LOADER
        lane, phase = (self._loader, Phase.NORM) if loads else (self._side, Phase.SIDE)
        lane.append(Stage(phase, task[F.LAYER], len(lane), counters, previous, size, compute, arrivals))
        if loads and task[F.OUTPUT] == Buffer.LOCAL_HIDDEN:
            self._staged[Buffer.LOCAL_HIDDEN, task[F.LAYER], 0] = len(lane) - 1

    def inputs(self, opcode: Opcode, task: _Task) -> int:
        """Makes the loader stage a matrix task's inputs where they are not there yet. Gives the first stage."""
        config, rows = self._config, task[F.BATCH_COUNT]
        layer, buffer = task[F.LAYER], task[F.INPUT]
        key = (buffer, layer, task[F.K_BEGIN])
        if key in self._staged:
            return self._staged[key]
        if buffer == Buffer.GATHERED:
            return 0  # rows of a claimed expert arrive before its page: the producer saw their signal. See `items`.
        group = config.queries_per_kv_head
        if opcode in _ATTENTION:
            slices = config.num_key_value_heads
            size = rows * (group + 2) * config.head_dim * self._type
        elif opcode in _EXPERT_DOWN:
            slices = self._load.active[layer]
            size = rows * config.num_experts_per_tok * config.intermediate_size * self._type // slices
        elif OPERATIONS[opcode].fields >= {F.K_SLICE}:
            slices, size = task[F.K_COUNT] // task[F.K_SLICE], rows * task[F.K_SLICE] * self._type
        else:
            slices, size = 0, rows * config.hidden_size * self._type
        waits: list[tuple[int, ...]] = [(task[F.SLICE_WAIT] + number,) for number in range(slices)] or [_waits(task)]
        if self._kernel.whole_phases:
            waits, size = [tuple(counter for each in waits for counter in each)], size * len(waits)
        self._staged[key] = first = len(self._loader)
        phase = _PHASES[opcode]
        self._loader.extend(Stage(phase, layer, first, counters, False, size, 0.0, ()) for counters in waits)
        return first

    def gate(self, opcode: Opcode, task: _Task) -> tuple[tuple[int, ...], float]:
        """The counters that a producer waits for before it can ask for pages, and what it does then."""
        if not OPERATIONS[opcode].routed:
            return (), 0.0
        chosen = -(-self._load.batch // self._kernel.top_k_warps) * self._machine.top_k
        by_logits = task[F.INPUT_2] == Buffer.ROUTER_LOGITS
        return _waits(task), chosen if by_logits else self._machine.access_latency


class _Pages:
    """Items and pages of matrix tasks."""

    def __init__(self, schedule: Schedule, load: Load, machine: Machine, kernel: Kernel) -> None:
        self._load, self._machine, self._kernel = load, machine, kernel
        self._config, self._sms = schedule.config, schedule.sms
        config = schedule.config
        self._type = schedule.workspace.buffers[Buffer.HIDDEN].dtype.itemsize
        self._slices = not kernel.whole_phases  # whether page k waits for slice k
        self._groups = -(-load.batch // 8)  # columns of a tensor-core product
        self._page = functools.cache(self._make_page)
        self._tile = functools.cache(self._make_tile)
        self._items_of = functools.cache(
            lambda window: attention_items(load.positions, [True] * load.batch, config.num_key_value_heads, window)
        )

    def items(self, opcode: Opcode, task: _Task) -> list[Item]:
        """A task's items; those of a whole queue where the task claims."""
        config, layer, phase, arrivals = self._config, task[F.LAYER], _PHASES[opcode], _arrives(task)
        rows, hidden = task[F.ROW_COUNT], config.hidden_size
        if opcode in _ATTENTION:
            return list(self._attention(task, opcode == Opcode.ATTN_DECODE))
        if opcode in _EXPERT_UP:
            tiles = config.intermediate_size // rows
            mine = range(self._load.active[layer] * tiles)  # as division.expert_items numbers them
            if opcode == Opcode.MOE_UPGATE_ACT:
                rounds = task[F.ROUND_BEGIN], task[F.ROUND_END]
                mine = dealt(len(mine), task[F.DEALER], task[F.DEALERS], rounds)
            pages = self._tile(2 * rows, hidden, -1 if task[F.INPUT] == Buffer.GATHERED else 0)
            each = task[F.ARRIVE_COUNT]
            return [Item(phase, layer, pages, ((task[F.ARRIVE] + n // tiles, each),)) for n in mine]
        if opcode in _EXPERT_DOWN:
            width = config.intermediate_size
            ranks = [self._page(rows, width, rank * self._slices) for rank in range(self._load.active[layer])]
            if opcode == Opcode.MOE_DOWN:
                return [Item(phase, layer, self._shown(ranks), arrivals)]
            # Every claimer arrives when the queue is empty: here the last item does, for all of them.
            claimed = [Item(phase, layer, (page,), ()) for page in ranks for _ in range(hidden // rows)]
            claimed[-1] = claimed[-1]._replace(arrivals=((task[F.ARRIVE], self._sms),))
            return claimed
        if opcode == Opcode.LM_HEAD:  # one task a SM, in tiles
            heights = [min(TILE_ROWS, rows - begin) for begin in range(0, max(rows, 1), TILE_ROWS)]
            items = [Item(phase, layer, self._tile(height, hidden, 0), ()) for height in heights]
            items[-1] = items[-1]._replace(arrivals=arrivals)
            return items
        if F.K_SLICE not in OPERATIONS[opcode].fields:
            rows *= 1 + (opcode == Opcode.FFN_UPGATE_ACT)  # gate rows and up rows
            return [Item(phase, layer, self._tile(rows, hidden, 0), arrivals)]
        parts = range(task[F.K_COUNT] // task[F.K_SLICE])
        columns = [page for part in parts for page in self._tile(rows, task[F.K_SLICE], part * self._slices)]
        return [Item(phase, layer, self._shown(columns), arrivals)]

    def _attention(self, task: _Task, is_dealt: bool) -> Iterable[Item]:
        config, window = self._config, task[F.WINDOW]
        kv_heads = config.num_key_value_heads
        items = self._items_of(window)
        for row, head, split in items[task[F.DEALER] :: task[F.DEALERS]] if is_dealt else items:
            splits = attention_splits(self._load.positions[row], window)
            positions = splits.positions(split)
            pages = -(-positions.stop // PAGE_TOKENS) - positions.start // PAGE_TOKENS
            rows = -(-pages * PAGE_TOKENS * 2 * config.head_dim // self._kernel.page_columns)  # keys and values
            cuts = [min(TILE_ROWS, rows - begin) for begin in range(0, rows, TILE_ROWS)]
            shown = self._shown([self._page(cut, self._kernel.page_columns, head * self._slices) for cut in cuts])
            # The last split arrives for the missing ones too.
            number = MAX_SPLITS - split if split == splits.number - 1 else 1
            counter = task[F.ARRIVE] + row * kv_heads + head
            yield Item(Phase.ATTENTION, task[F.LAYER], shown, ((counter, number * task[F.ARRIVE_COUNT]),))

    def _make_tile(self, rows: int, columns: int, stage: int) -> tuple[Page, ...]:
        """A weight tile, cut along its columns."""
        width = self._kernel.page_columns
        return self._shown([self._page(rows, min(width, columns - begin), stage) for begin in range(0, columns, width)])

    def _make_page(self, rows: int, columns: int, stage: int) -> Page:
        """A page of `rows` bulk copies."""
        copy = columns * self._type
        if not self._kernel.streams:
            return Page(0, 0.0, 0.0, 0.0, stage)
        machine, size = self._machine, rows * copy
        work = machine.consume_page + self._groups * size / machine.shared_rate
        return Page(size, size / machine.stream_rate(copy), size / machine.sm_port, work, stage)

    def _shown(self, pages: list[Page]) -> tuple[Page, ...]:
        """What is left of an item in the experiments that stream less."""
        return tuple(pages if self._kernel.streams and not self._kernel.first_pages_only else pages[:1])

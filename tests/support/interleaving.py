"""A step of a schedule in a random interleaving, with tags instead of numbers: what the checker claims, tried out.

Written from the comments of `abi.OPERATIONS` alone, apart from the checker and the CPU executor. Every element of every
buffer holds the layer that wrote it last. A role of an SM is a generator that yields after each event.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Generator, Iterator

import numpy as np

from north_jax.megakernel import division
from north_jax.megakernel.abi import (
    MAX_SPLITS,
    OPERATIONS,
    PASS_BITS,
    PASSES,
    SAMPLE_BLOCK,
    Buffer,
    Field,
    Lane,
    Opcode,
    Row,
)
from north_jax.megakernel.checker import Instance
from north_jax.megakernel.layout import LOCAL
from north_jax.megakernel.schedule import Schedule

F, B, Op = Field, Buffer, Opcode
AHEAD = 4  # tasks that an SM has loaded and not stored
type Role = Generator[bool]  # True: something happened
type Access = tuple[Field, int, tuple]  # buffer field, layer, index


class Violation(Exception):
    """Something happened in an order that gives wrong numbers, or nothing can happen any more."""


class Step:
    """One step on all SMs."""

    def __init__(self, schedule: Schedule, instance: Instance) -> None:
        self.schedule, self.config, self.batch = schedule, schedule.config, schedule.batch
        self.live, self.positions = instance.live, instance.positions.tolist()
        config = self.config
        self.group, self.d = config.queries_per_kv_head, config.head_dim
        self.kv_heads, self.k = config.num_key_value_heads, config.num_experts_per_tok
        self.ranks = min(config.num_experts, self.batch * self.k)
        self.routes = [division.routes(chosen.astype(np.int32), self.live) for chosen in instance.experts]
        self.tags: dict[int, np.ndarray] = {}
        for name, spec in schedule.workspace.buffers.items():
            copies = schedule.sms if name in LOCAL else 1
            self.tags[name] = np.full((copies, spec.planes, *spec.shape), -1, np.int32)
        self.counters = np.zeros(len(schedule.counter_needs), np.int64)
        self.claims = collections.Counter[int]()
        self.drawn = np.zeros(self.batch, bool)
        self.complete = np.zeros(len(schedule.tasks), bool)
        self.sm_of = np.repeat(np.arange(schedule.sms), np.diff(schedule.begin))

    def run(self, seed: int) -> None:
        """Runs the step. Roles get turns at random, some of them seldom; raises Violation.

        What its rows ask of sampling is as random: passes of the search, and whether there is a draw from masses.
        """
        rng = random.Random(seed)
        self.passes = rng.choice([0, PASSES // 2, PASSES])
        self.masses = self.passes > 0 or rng.choice([False, True])
        roles = [role for sm in range(self.schedule.sms) for role in _Sm(self, sm).roles()]
        weights = [rng.choice([1, 1, 1, 0.1, 0.01]) for _ in roles]
        blocked: set[int] = set()
        while roles:
            free = [i for i in range(len(roles)) if i not in blocked]
            if not free:
                raise Violation(f"nothing can happen any more; counters {self.counters.tolist()}")
            chosen = rng.choices(free, [weights[i] for i in free])[0]
            for _ in range(rng.choice([1, 3, 30])):
                try:
                    happened = next(roles[chosen])
                except StopIteration:
                    del roles[chosen], weights[chosen]
                    blocked.clear()
                    break
                if not happened:
                    blocked.add(chosen)
                    break
                blocked.clear()
        if not self.complete.all():
            raise Violation("tasks were not run")

    def touch(self, task: int, access: Access, *, writes: bool) -> None:
        """Reads or writes elements; they must hold, or not yet hold, the values of that layer."""
        field, layer, index = access
        name = int(self.schedule.tasks[task, field])
        tags = self.tags[name]
        place = (self.sm_of[task] if name in LOCAL else 0, layer % tags.shape[1], *index)
        found = tags[place]
        if not writes and not (found == layer).all():
            raise Violation(f"{self.schedule.describe(task)} reads {B(name).name} of layer {layer}, finds {found}")
        if writes:
            if (found == layer).any():
                raise Violation(f"{self.schedule.describe(task)} writes {B(name).name} of layer {layer} again")
            tags[place] = layer

    def arrive(self, counter: int, count: int) -> None:
        self.counters[counter] += count
        if self.counters[counter] > self.schedule.counter_needs[counter]:
            raise Violation(f"too many arrivals at counter {self.schedule.counter_names[counter]}")

    def shows(self, first: int, count: int, need: int) -> bool:
        return bool((self.counters[first : first + count] >= need).all())


class _Sm:
    """The roles of one SM."""

    def __init__(self, step: Step, sm: int) -> None:
        self.step, self.schedule = step, step.schedule
        tasks = range(self.schedule.begin[sm], self.schedule.begin[sm + 1])
        lanes = {task: OPERATIONS[Opcode(self.at(task, F.OPCODE))].lane for task in tasks}
        self.matrix = [task for task in tasks if lanes[task] == Lane.MATRIX]
        self.load_list = [task for task in tasks if lanes[task] != Lane.SIDE]
        self.side_list = [task for task in tasks if lanes[task] == Lane.SIDE]
        self.opened: set[int] = set()
        self.items: dict[int, collections.deque] = {task: collections.deque() for task in self.matrix}
        self.staged: dict[int, collections.deque] = {task: collections.deque() for task in self.matrix}
        self.all_claimed: set[int] = set()
        self.all_loaded: set[int] = set()
        self.stored = 0

    def at(self, task: int, field: Field) -> int:
        return int(self.schedule.tasks[task, field])

    def op(self, task: int) -> Opcode:
        return Opcode(self.at(task, F.OPCODE))

    def roles(self) -> list[Role]:
        return [self.producer(), self.loader(), self.store(), self.side()]

    def wait(self, task: int) -> Role:
        while not self.step.shows(self.at(task, F.WAIT), self.at(task, F.WAIT_COUNT), self.at(task, F.WAIT_NEED)):
            yield False

    def producer(self) -> Role:
        for place, task in enumerate(self.matrix):
            operation = OPERATIONS[self.op(task)]
            if not operation.routed:
                continue
            while place >= self.stored + AHEAD:
                yield False
            yield from self.wait(task)
            yield from self.open(task)

    def open(self, task: int) -> Role:
        """Reads what decides the items, and gives them to the loader."""
        claims = OPERATIONS[self.op(task)].claims
        self.parameters(task)
        self.choose(task)
        items = list(self.all_items(task))
        self.opened.add(task)
        yield True
        if not claims:
            self.items[task].extend(items)
        while claims:
            queue = self.at(task, F.QUEUE)
            number = self.step.claims[queue]
            self.step.claims[queue] += 1
            if number >= len(items):
                break
            self.items[task].append(items[number])
            yield True
        self.all_claimed.add(task)
        yield True

    def choose(self, task: int) -> None:
        if not OPERATIONS[self.op(task)].routed:
            return
        logits = self.at(task, F.INPUT_2) == B.ROUTER_LOGITS
        index = (self.step.live.nonzero()[0],) if logits else (slice(None),)
        self.step.touch(task, (F.INPUT_2, self.at(task, F.LAYER), index), writes=False)

    def parameters(self, task: int) -> None:
        """A task reads rows' parameters: nobody may have changed them."""
        if self.step.drawn.any():
            raise Violation(f"{self.schedule.describe(task)} reads {Row.POSITION.name} after it has changed")

    def loader(self) -> Role:
        for task in self.load_list:
            if self.op(task) in (Op.EMBED, Op.ADD_RMSNORM):
                yield from self.wait(task)
                self.run_whole(task)
                yield True
                continue
            while self.matrix.index(task) >= self.stored + AHEAD:
                yield False
            if OPERATIONS[self.op(task)].routed:
                while task not in self.opened:
                    yield False
            else:
                yield from self.wait(task)
                yield from self.open(task)
            while self.items[task] or task not in self.all_claimed:
                if not self.items[task]:
                    yield False
                    continue
                item = self.items[task][0]
                need = self.at(task, F.SLICE_NEED) if F.SLICE_NEED in OPERATIONS[self.op(task)].fields else 0
                while need and not self.step.shows(self.at(task, F.SLICE_WAIT) + self.slice(task, item), 1, need):
                    yield False
                for access in self.loads(task, item):
                    self.step.touch(task, access, writes=False)
                self.staged[task].append(self.items[task].popleft())
                yield True
            self.all_loaded.add(task)
            yield True

    def store(self) -> Role:
        for task in self.matrix:
            while self.staged[task] or task not in self.all_loaded:
                if not self.staged[task]:
                    yield False
                    continue
                item = self.staged[task].popleft()
                for access in self.loads(task, item):  # what was loaded may be read until now
                    self.step.touch(task, access, writes=False)
                self.consume(task, item)
                yield True
            self.choose(task)
            self.parameters(task)
            self.finish(task)
            self.step.complete[task] = True
            self.stored += 1
            yield True

    def side(self) -> Role:
        for task in self.side_list:
            if not self.asked_for(task):
                self.parameters(task)
                self.step.arrive(self.at(task, F.ARRIVE), self.at(task, F.ARRIVE_COUNT))
                self.step.complete[task] = True
                yield True
                continue
            yield from self.wait(task)
            if self.op(task) is Op.END_STEP:
                self.end(task)
            else:
                self.run_whole(task)
            yield True

    def asked_for(self, task: int) -> bool:
        if self.op(task) is Op.SAMPLE_HISTOGRAM:
            return self.at(task, F.SPLIT) < self.step.passes
        return self.op(task) is not Op.SAMPLE_MASS or self.step.masses

    def end(self, task: int) -> None:
        self.step.complete[task] = True
        if not self.step.complete.all():
            raise Violation(f"the step ended before {self.schedule.describe(int(self.step.complete.argmin()))}")
        if (self.step.counters != self.schedule.counter_needs).any():
            raise Violation("the step ended with arrivals missing")
        first, count = self.at(task, F.QUEUE), self.at(task, F.ROW_COUNT)
        if any(not first <= queue < first + count for queue in self.step.claims):
            raise Violation("the step ended with a queue that was not emptied")

    def run_whole(self, task: int) -> None:
        """A task of the LOADER or SIDE lane."""
        if self.op(task) is not Op.SAMPLE_DRAW:
            self.parameters(task)
        for access in self.loads(task, None):
            self.step.touch(task, access, writes=False)
        for access in self.stores(task, None):
            self.step.touch(task, access, writes=True)
        if self.op(task) is Op.SAMPLE_DRAW:
            if self.step.drawn[self.rows(task, everyone=True)].any():
                raise Violation("a token is drawn twice")
            self.step.drawn[self.rows(task)] = True
        self.step.arrive(self.at(task, F.ARRIVE), self.at(task, F.ARRIVE_COUNT))
        self.step.complete[task] = True

    def rows(self, task: int, everyone: bool = False) -> np.ndarray:
        rows = np.arange(self.at(task, F.BATCH_COUNT)) + self.at(task, F.BATCH_BEGIN)
        return rows if everyone else rows[self.step.live[rows]]

    def span(self, task: int, unit: int = 1) -> slice:
        begin = self.at(task, F.ROW_BEGIN)
        return slice(begin * unit, (begin + self.at(task, F.ROW_COUNT)) * unit)

    # What items there are.

    def all_items(self, task: int) -> Iterator[object]:
        """The items of a task, or of its queue."""
        op, step = self.op(task), self.step
        if op in (Op.ATTN_DECODE, Op.ATTN_DRAIN):
            window = self.at(task, F.WINDOW)
            every = division.attention_items(step.positions, step.live.tolist(), step.kv_heads, window)
        elif op in (Op.MOE_UPGATE_ACT, Op.MOE_UPGATE_ACT_DRAIN, Op.MOE_DOWN_DRAIN):
            active = len(step.routes[self.at(task, F.LAYER)].experts)
            width = step.config.hidden_size if op is Op.MOE_DOWN_DRAIN else step.config.intermediate_size
            every = division.expert_items(active, -(-width // self.at(task, F.ROW_COUNT)))
        elif op is Op.MOE_DOWN:
            yield from range(len(step.routes[self.at(task, F.LAYER)].experts))
            return
        elif op in (Op.O_PROJ, Op.FFN_DOWN):
            begin, width = self.at(task, F.K_BEGIN), self.at(task, F.K_SLICE)
            yield from range(begin // width, (begin + self.at(task, F.K_COUNT)) // width)
            return
        else:
            yield None
            return
        if OPERATIONS[op].claims:
            yield from every
            return
        rounds = (self.at(task, F.ROUND_BEGIN), self.at(task, F.ROUND_END))
        rounds = (0, len(every)) if op is Op.ATTN_DECODE else rounds
        for number in division.dealt(len(every), self.at(task, F.DEALER), self.at(task, F.DEALERS), rounds):
            yield every[number]

    def slice(self, task: int, item: object) -> int:
        if isinstance(item, division.AttentionItem):
            return item.head
        return item.rank if isinstance(item, division.ExpertItem) else int(item)  # type: ignore[call-overload]

    def places(self, task: int, rank: int) -> np.ndarray:
        """Rows of the expert buffers that an active expert has."""
        routes = self.step.routes[self.at(task, F.LAYER)]
        own = np.arange(routes.first[rank], routes.first[rank + 1])
        return own if self.at(task, F.INPUT_2) == B.ROUTES else routes.assignments[own]

    # What they read and write.

    def loads(self, task: int, item) -> Iterator[Access]:
        op, layer, step = self.op(task), self.at(task, F.LAYER), self.step
        rows = self.rows(task)
        if op in (Op.QKV_PROJ, Op.ROUTER_GEMM, Op.FFN_UPGATE_ACT, Op.LM_HEAD):
            yield F.INPUT, layer, (rows,)
        elif op is Op.ADD_RMSNORM:
            adds = self.at(task, F.INPUT_2) != B.NONE
            yield F.INPUT, layer - adds, (rows,)
            if adds:
                for part in range(self.at(task, F.SPLIT)):
                    yield F.INPUT_2, layer - 1, (part, rows)
                yield F.INPUT_3, layer - 1, (rows,)
        elif op in (Op.ATTN_DECODE, Op.ATTN_DRAIN):
            heads = step.config.num_attention_heads
            for head in (
                *range(item.head * step.group, (item.head + 1) * step.group),
                heads + item.head,
                heads + step.kv_heads + item.head,
            ):
                yield F.INPUT, layer, (item.row, slice(head * step.d, (head + 1) * step.d))
        elif op is Op.ATTN_COMBINE:
            for row in rows.tolist():
                number = division.attention_splits(step.positions[row], self.at(task, F.WINDOW)).number
                for head in range(*self.span(task).indices(step.config.num_attention_heads)):
                    for field in (F.INPUT, F.INPUT_2):
                        place = (row, head // step.group, slice(number), head % step.group)
                        yield field, layer, place
        elif op in (Op.O_PROJ, Op.FFN_DOWN):
            width = self.at(task, F.K_SLICE)
            yield F.INPUT, layer, (rows, slice(item * width, (item + 1) * width))
        elif op is Op.MOE_UPGATE_ACT:
            yield F.INPUT, layer, (self.places(task, item.rank) // step.k,)
        elif op is Op.MOE_UPGATE_ACT_DRAIN:
            yield F.INPUT, layer, (self.places(task, item.rank),)
        elif op is Op.MOE_DOWN:
            yield F.INPUT, layer, (self.places(task, item),)
        elif op is Op.MOE_DOWN_DRAIN:
            yield F.INPUT, layer, (self.places(task, item.rank),)
        elif op is Op.ROUTER_TOPK:
            yield F.INPUT, layer, (rows,)
        elif op is Op.ROUTE_FINALIZE:
            yield F.INPUT, layer, (slice(None),)
        elif op is Op.MOE_GATHER:
            yield F.INPUT_2, layer, (slice(None),)
            yield F.INPUT, layer, (step.routes[layer].assignments[self.span(task)] // step.k,)
        elif op is Op.MOE_COMBINE:
            assigned = step.routes[layer].assignments // step.k
            yield F.INPUT, layer, (np.flatnonzero(np.isin(assigned, rows)), self.span(task))
            yield F.INPUT_2, layer, (rows,)
            yield F.INPUT_3, layer, (slice(None),)
        elif op is Op.SAMPLE_HISTOGRAM:
            yield F.INPUT, layer, (rows, self.span(task))
            yield F.INPUT_2, layer, (rows, slice(self.at(task, F.DEALERS)))
            if number := self.at(task, F.SPLIT):
                yield F.OUTPUT, layer, (rows, self.search(task, number - 1))
        elif op is Op.SAMPLE_MASS:
            yield F.INPUT, layer, (rows, self.span(task))
            yield F.INPUT_2, layer, (rows, slice(self.at(task, F.DEALERS)))
            if step.passes:
                yield F.INPUT_3, layer, (rows, self.search(task, step.passes - 1))
        elif op is Op.SAMPLE_DRAW:
            yield F.INPUT, layer, (rows,)
            yield F.INPUT_2, layer, (rows, slice(self.at(task, F.DEALERS)))
            if step.masses:
                yield F.INPUT_3, layer, (rows,)

    def search(self, task: int, number: int) -> slice:
        """Elements of SEARCH that stand for what each range does in a pass."""
        first = number * 2 ** (PASS_BITS + 1)
        return slice(first, first + self.at(task, F.DEALERS))

    def stores(self, task: int, item) -> Iterator[Access]:
        op, layer, step = self.op(task), self.at(task, F.LAYER), self.step
        rows = self.rows(task)
        if op is Op.EMBED:
            yield F.OUTPUT, layer, (rows,)
        elif op is Op.ADD_RMSNORM:
            yield F.OUTPUT, layer, (rows,)
            if self.at(task, F.OUTPUT_2) != B.NONE:
                yield F.OUTPUT_2, layer, (rows,)
        elif op in (Op.ATTN_DECODE, Op.ATTN_DRAIN):
            yield F.OUTPUT, layer, (item.row, item.head, item.split)
            yield F.OUTPUT_2, layer, (item.row, item.head, item.split)
        elif op is Op.ATTN_COMBINE:
            yield F.OUTPUT, layer, (rows, self.span(task, step.d))
        elif op is Op.O_PROJ:
            yield F.OUTPUT, layer, (self.at(task, F.SPLIT), rows, self.span(task))
        elif op in (Op.MOE_UPGATE_ACT, Op.MOE_UPGATE_ACT_DRAIN, Op.MOE_DOWN_DRAIN):
            width = self.at(task, F.ROW_COUNT)
            columns = slice(item.tile * width, (item.tile + 1) * width)
            yield F.OUTPUT, layer, (self.places(task, item.rank)[:, None], _numbers(columns, step, op))
        elif op is Op.ROUTER_TOPK:
            yield F.OUTPUT, layer, (self.rows(task, everyone=True),)
        elif op is Op.SAMPLE_HISTOGRAM:
            yield F.OUTPUT, layer, (rows, self.search(task, self.at(task, F.SPLIT)).start + self.at(task, F.DEALER))
        elif op is Op.ROUTE_FINALIZE:
            yield F.OUTPUT, layer, (slice(None),)
        elif op is Op.MOE_GATHER:
            yield F.OUTPUT, layer, (np.arange(len(step.routes[layer].assignments))[self.span(task)],)
        elif op is Op.SAMPLE_MASS:
            span = self.span(task)
            yield F.OUTPUT, layer, (rows, slice(span.start // SAMPLE_BLOCK, -(-span.stop // SAMPLE_BLOCK)))
        elif op is not Op.SAMPLE_DRAW:
            yield F.OUTPUT, layer, (rows, self.span(task))
            if op is Op.LM_HEAD:
                yield F.OUTPUT_2, layer, (rows, self.at(task, F.DEALER))

    def consume(self, task: int, item: object) -> None:
        """What an item writes, and its arrivals."""
        first, each = self.at(task, F.ARRIVE), self.at(task, F.ARRIVE_COUNT)
        if self.op(task) is not Op.MOE_DOWN and isinstance(item, tuple):
            for access in self.stores(task, item):
                self.step.touch(task, access, writes=True)
        if isinstance(item, division.AttentionItem):
            number = division.attention_splits(self.step.positions[item.row], self.at(task, F.WINDOW)).number
            missing = MAX_SPLITS - number if item.split == number - 1 else 0
            self.step.arrive(first + item.row * self.step.kv_heads + item.head, each * (1 + missing))
        elif self.op(task) in (Op.MOE_UPGATE_ACT, Op.MOE_UPGATE_ACT_DRAIN):
            assert isinstance(item, division.ExpertItem)
            self.step.arrive(first + item.rank, each)

    def finish(self, task: int) -> None:
        """What is written after the last item, and the task's own arrivals."""
        op, step = self.op(task), self.step
        first, each = self.at(task, F.ARRIVE), self.at(task, F.ARRIVE_COUNT)
        dealer, dealers = self.at(task, F.DEALER), self.at(task, F.DEALERS)
        if op in (Op.ATTN_DECODE, Op.ATTN_DRAIN):
            for row in np.flatnonzero(~step.live).tolist():
                for number in range(row * step.kv_heads, (row + 1) * step.kv_heads):
                    step.arrive(first + number, each * MAX_SPLITS * (number % dealers == dealer))
        elif op in (Op.MOE_UPGATE_ACT, Op.MOE_UPGATE_ACT_DRAIN):
            tiles = step.config.intermediate_size // self.at(task, F.ROW_COUNT)
            absent = range(len(step.routes[self.at(task, F.LAYER)].experts), step.ranks)
            for rank in absent if self.at(task, F.ROUND_BEGIN) == 0 else ():
                step.arrive(first + rank, each * tiles * (rank % dealers == dealer))
        else:
            if op is not Op.MOE_DOWN_DRAIN:
                for access in self.stores(task, None):
                    step.touch(task, access, writes=True)
            step.arrive(first, each)


def _numbers(columns: slice, step: Step, op: Opcode) -> np.ndarray:
    width = step.config.hidden_size if op is Op.MOE_DOWN_DRAIN else step.config.intermediate_size
    return np.arange(width)[columns]

"""Whether every descriptor is well formed: each field in its range, and what the configuration says it must be."""

from __future__ import annotations

import numpy as np

from ..abi import OPERATIONS, PASSES, SAMPLE_BLOCK, Buffer, Field, Opcode, Weight
from .faults import Report
from .operands import OPERANDS, Sizes
from .view import View

F = Field


def check_form(view: View, sizes: Sizes, report: Report) -> None:
    """Reports fields that no schedule of this model may have."""
    check = _Form(view, sizes, report)
    check.unread()
    check.layers()
    for opcode, operation in OPERATIONS.items():
        tasks = view.select(opcode)
        check.operands(opcode, tasks)
        if F.ROW_COUNT in operation.fields and opcode is not Opcode.END_STEP:
            check.rows(opcode, tasks)
    check.batch()
    check.norms()
    check.columns()
    check.dealers()
    check.counters()
    check.queues()


def slice_range(view: View, sizes: Sizes, tasks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first, count) of the counters that the slices of tasks wait for; count 0 where there is no wait.

    For attention and the experts they are those of all KV heads and ranks, whichever a task comes to have.
    """
    opcode, first = view.opcode[tasks], view[F.SLICE_WAIT][tasks].copy()
    count = np.zeros(len(tasks), np.int64)
    count[np.isin(opcode, [Opcode.ATTN_DECODE, Opcode.ATTN_DRAIN])] = sizes.kv_heads
    count[np.isin(opcode, [Opcode.MOE_DOWN, Opcode.MOE_DOWN_DRAIN])] = sizes.ranks
    sliced = np.isin(opcode, [Opcode.O_PROJ, Opcode.FFN_DOWN])
    width = np.maximum(view[F.K_SLICE][tasks], 1)
    first[sliced] += (view[F.K_BEGIN][tasks] // width)[sliced]
    count[sliced] = (view[F.K_COUNT][tasks] // width)[sliced]
    count[view[F.SLICE_NEED][tasks] == 0] = 0
    return first, count


class _Form:
    def __init__(self, view: View, sizes: Sizes, report: Report) -> None:
        self._view, self._sizes, self._report = view, sizes, report
        self._config = view.schedule.config

    def _expect(
        self, rule: str, field: Field, tasks: np.ndarray, good: np.ndarray, expected: str, *values: np.ndarray | object
    ) -> None:
        """Reports tasks that are not `good`. `expected` is a format of `values`; of an array, the task's own."""

        def words(i: int) -> str:
            own = (value[i] if isinstance(value, np.ndarray) else value for value in values)
            return f"{field.name} is {self._view[field][tasks[i]]}, expected {expected.format(*own)}"

        self._report.tasks(rule, tasks, ~good, words)

    def unread(self) -> None:
        read = np.zeros((max(Opcode) + 1, len(self._view.fields)), bool)
        for opcode, operation in OPERATIONS.items():
            read[opcode, [F.OPCODE, F.TASK, *operation.fields]] = True
        wrong = (self._view.fields.T != 0) & ~read[self._view.opcode]
        everyone = np.arange(len(self._view))

        def words(i: int) -> str:
            return (
                f"it does not read {', '.join(F(f).name for f in np.flatnonzero(wrong[i]).tolist())}, which must be 0"
            )

        self._report.tasks("unread field", everyone, wrong.any(axis=1), words)
        numbers = self._view[F.TASK]
        self._expect("task number", F.TASK, everyone, numbers == everyone, "its place in the lists, {}", everyone)

    def layers(self) -> None:
        layers = self._config.num_hidden_layers
        for opcode in OPERATIONS:
            tasks = self._view.select(opcode)
            if F.LAYER not in OPERATIONS[opcode].fields:
                continue
            place, layer = OPERANDS[opcode].place, self._view.layer[tasks]
            good = (layer >= 0) & (layer <= layers) & place.holds(self._config)[np.clip(layer, 0, layers)]
            self._expect("layer", F.LAYER, tasks, good, place.value)

    def operands(self, opcode: Opcode, tasks: np.ndarray) -> None:
        layer, layers = self._view.layer[tasks], self._config.num_hidden_layers
        takes, fields = OPERANDS[opcode], OPERATIONS[opcode].fields
        if takes.weight is not None:
            kind = np.full(len(tasks), takes.weight)
            if opcode is Opcode.ADD_RMSNORM:
                kind[layer == layers] = Weight.FINAL_NORM
            wanted = np.where(kind >= Weight.EMBED, layers, layer) * len(Weight) + kind
            names = np.array([weight.name for weight in Weight])[kind]
            good = self._view[F.WEIGHT][tasks] == wanted
            self._expect("weight", F.WEIGHT, tasks, good, "{}, {} of layer {}", wanted, names, layer)
        for field, allowed in takes.buffers.items():
            good = np.isin(self._view[field][tasks], allowed)
            self._expect("buffer", field, tasks, good, " or ".join(f"{int(b)} ({b.name})" for b in allowed))
        own = {
            F.POOL: np.arange(layers + 1),
            F.WINDOW: np.array([*(self._config.window(n) or 0 for n in range(layers)), 0]),
            F.ROPE: np.array([*map(int, self._config.rope_layers), 0]),
        }
        for field in own.keys() & fields:
            wanted = own[field][np.clip(layer, 0, layers)]
            good = self._view[field][tasks] == wanted
            self._expect("layer's own", field, tasks, good, "{}, as in layer {}", wanted, layer)

    def rows(self, opcode: Opcode, tasks: np.ndarray) -> None:
        total = self._sizes.rows(opcode)
        begin, count = self._view[F.ROW_BEGIN][tasks], self._view[F.ROW_COUNT][tasks]
        end = begin + count
        # A vocabulary may have fewer tiles, or blocks, than there are SMs.
        least = 0 if opcode in (Opcode.LM_HEAD, Opcode.SAMPLE_HISTOGRAM, Opcode.SAMPLE_MASS) else 1
        good = (count >= least) & (begin >= 0) & (end <= total)
        self._expect("rows", F.ROW_COUNT, tasks, good, "{} or more rows from {} on, of {}", least, begin, total)
        if opcode in (Opcode.MOE_UPGATE_ACT, Opcode.MOE_UPGATE_ACT_DRAIN):
            good = total % np.maximum(count, 1) == 0
            self._expect("rows", F.ROW_COUNT, tasks, good, "a divisor of {}", total)
        elif opcode is Opcode.QKV_PROJ:
            good = (self._region(begin) == self._region(end - 1)) & (begin % 2 == 0) & (count % 2 == 0)
            expected = "the queries of one KV head, or its key or value, in whole pairs, from {} on"
            self._expect("rows", F.ROW_COUNT, tasks, good, expected, begin)
        elif opcode in (Opcode.SAMPLE_HISTOGRAM, Opcode.SAMPLE_MASS):
            good = (begin % SAMPLE_BLOCK == 0) & ((end % SAMPLE_BLOCK == 0) | (end == total))
            self._expect("rows", F.ROW_COUNT, tasks, good, "whole blocks of {} from {} on", SAMPLE_BLOCK, begin)

    def _region(self, row: np.ndarray) -> np.ndarray:
        """A number for the part of QKV's rows that `row` is in: the queries of a KV head, its key or its value."""
        config = self._config
        head, queries = row // config.head_dim, config.num_attention_heads
        return np.where(head < queries, -1 - head // config.queries_per_kv_head, head)

    def batch(self) -> None:
        tasks, most = self._view.reading(F.BATCH_COUNT), self._sizes.batch
        begin, count = self._view[F.BATCH_BEGIN][tasks], self._view[F.BATCH_COUNT][tasks]
        good = (count >= 1) & (begin >= 0) & (begin + count <= most)
        self._expect("batch", F.BATCH_COUNT, tasks, good, "1 or more rows from {} on, of {}", begin, most)
        whole = [opcode for opcode, takes in OPERANDS.items() if takes.whole_batch]
        good = ~np.isin(self._view.opcode[tasks], whole) | (count == most)
        self._expect("batch", F.BATCH_COUNT, tasks, good, "all {}: what it does depends on every row", most)

    def norms(self) -> None:
        tasks = self._view.select(Opcode.ADD_RMSNORM)
        adds = self._view[F.INPUT_2][tasks] != Buffer.NONE
        first = self._view.layer[tasks] == 0
        self._expect("norm", F.INPUT_2, tasks, adds != first, "ATTENTION_OUT, save in the first layer")
        for field in (F.INPUT_3, F.OUTPUT_2):
            good = (self._view[field][tasks] != Buffer.NONE) == adds
            self._expect("norm", field, tasks, good, "a buffer if and only if INPUT_2 is one")
        parts = np.where(adds, self._sizes.splits, 0)
        good = self._view[F.SPLIT][tasks] == parts
        self._expect("norm", F.SPLIT, tasks, good, "{}, all parts of ATTENTION_OUT", parts)

    def columns(self) -> None:
        for opcode in (Opcode.O_PROJ, Opcode.FFN_DOWN):
            tasks, total = self._view.select(opcode), self._sizes.columns(opcode)
            begin, count, width = (self._view[f][tasks] for f in (F.K_BEGIN, F.K_COUNT, F.K_SLICE))
            good = (begin >= 0) & (count >= 1) & (begin + count <= total)
            self._expect("columns", F.K_COUNT, tasks, good, "1 or more columns from {} on, of {}", begin, total)
            safe = np.maximum(width, 1)
            good = (width >= 1) & (count % safe == 0) & (begin % safe == 0)
            self._expect("columns", F.K_SLICE, tasks, good, "a divisor of K_COUNT {} and K_BEGIN {}", count, begin)
        tasks = self._view.select(Opcode.SAMPLE_HISTOGRAM)
        number = self._view[F.SPLIT][tasks]
        self._expect("pass", F.SPLIT, tasks, (number >= 0) & (number < PASSES), "0 to {}", PASSES - 1)
        tasks, parts = self._view.select(Opcode.O_PROJ), self._sizes.splits
        split = self._view[F.SPLIT][tasks]
        self._expect("part", F.SPLIT, tasks, (split >= 0) & (split < parts), "0 to {}", parts - 1)

    def dealers(self) -> None:
        tasks, most = self._view.reading(F.DEALERS), len(self._view)
        dealers = self._view[F.DEALERS][tasks]
        self._expect("dealer", F.DEALERS, tasks, (dealers >= 1) & (dealers <= most), "1 to {}, all tasks", most)
        sampling = Opcode.SAMPLE_HISTOGRAM, Opcode.SAMPLE_MASS, Opcode.SAMPLE_DRAW
        tasks = self._view.select(Opcode.LM_HEAD, *sampling)
        ranges = self._sizes.ranges
        good = self._view[F.DEALERS][tasks] == ranges
        self._expect("dealer", F.DEALERS, tasks, good, "{}, the ranges of RANGE_BEST", ranges)
        tasks = self._view.reading(F.DEALER)
        dealer, dealers = self._view[F.DEALER][tasks], self._view[F.DEALERS][tasks]
        self._expect("dealer", F.DEALER, tasks, (dealer >= 0) & (dealer < dealers), "one of {} dealers", dealers)
        items = (Opcode.ATTN_DECODE, Opcode.ATTN_DRAIN, Opcode.MOE_UPGATE_ACT, Opcode.MOE_UPGATE_ACT_DRAIN)
        tasks = self._view.select(*items)
        good = self._view[F.ARRIVE_COUNT][tasks] >= 1
        self._expect("counters", F.ARRIVE_COUNT, tasks, good, "1 or more: others wait for its items")
        tasks = self._view.reading(F.ROUND_BEGIN)
        first, end = self._view[F.ROUND_BEGIN][tasks], self._view[F.ROUND_END][tasks]
        self._expect("rounds", F.ROUND_END, tasks, (first >= 0) & (first <= end), "{} or more, and 0 or more", first)

    def counters(self) -> None:
        for first, number in ((F.WAIT, F.WAIT_COUNT), (F.ARRIVE, F.ARRIVE_COUNT), (F.SLICE_WAIT, F.SLICE_NEED)):
            tasks = self._view.reading(first)
            begin, count = self._view[first][tasks], self._view[number][tasks]
            none = count == 0
            self._expect("counters", number, tasks, count >= 0, "0 or more")
            self._expect("counters", first, tasks, ~none | (begin == 0), "0, as {} is 0", number.name)
            if first is F.WAIT:
                good = ~none | (self._view[F.WAIT_NEED][tasks] == 0)
                self._expect("counters", F.WAIT_NEED, tasks, good, "0, as WAIT_COUNT is 0")
            elif first is F.SLICE_WAIT:
                begin, count = slice_range(self._view, self._sizes, tasks)
            else:
                count = np.where(none, 0, self._arrivals(tasks))
            total = len(self._view.schedule.counter_needs)
            good = none | ((begin >= 0) & (count <= total) & (begin + count <= total))
            self._expect("counters", first, tasks, good, "{} counters from {} on, of {}", count, begin, total)

    def _arrivals(self, tasks: np.ndarray) -> np.ndarray:
        """Counters that tasks, or the items of their group, arrive at."""
        opcode, sizes = self._view.opcode[tasks], self._sizes
        count = np.ones(len(tasks), np.int64)
        count[np.isin(opcode, [Opcode.ATTN_DECODE, Opcode.ATTN_DRAIN])] = sizes.batch * sizes.kv_heads
        count[np.isin(opcode, [Opcode.MOE_UPGATE_ACT, Opcode.MOE_UPGATE_ACT_DRAIN])] = sizes.ranks
        return count

    def queues(self) -> None:
        queues = len(self._view.schedule.queue_names)
        tasks = self._view.select(Opcode.END_STEP)
        good = (self._view[F.QUEUE][tasks] == 0) & (self._view[F.ROW_COUNT][tasks] == queues)
        self._expect("end of the step", F.ROW_COUNT, tasks, good, "{}: every queue, from 0 on, is emptied", queues)
        tasks = self._view.reading(F.QUEUE)
        tasks = tasks[self._view.opcode[tasks] != Opcode.END_STEP]
        queue = self._view[F.QUEUE][tasks]
        self._expect("queue", F.QUEUE, tasks, (queue >= 0) & (queue < queues), "one of {} queues", queues)

"""The norm before a layer or the head, and what follows the last layer: logits, sampling, the end of a step."""

from __future__ import annotations

from collections.abc import Iterator

from .abi import PASSES, SAMPLE_BLOCK, Buffer, Field, Opcode, Weight
from .tasks import TILE_ROWS, Dealt, Draft, Task, anywhere, wait

F = Field


def norm_wave(draft: Draft, layer: int, kind: Weight, previous_end: int | None, hidden: int) -> Dealt:
    """The norm before a layer or the head, after the embedding where it is the first.

    Args:
      draft: the schedule under construction.
      layer: index of the layer; the number of layers for the head.
      kind: NORM or FINAL_NORM.
      previous_end: counter of the outputs that are added; None before the first layer.
      hidden: counter of the normalised rows, where the norm is not local.
    """
    local, batch = draft.order.local_norm, draft.batch
    residual, output = (Buffer.LOCAL_RESIDUAL, Buffer.LOCAL_HIDDEN) if local else (Buffer.RESIDUAL, Buffer.HIDDEN)
    group = layer * len(Weight)
    norm = draft.task(Opcode.ADD_RMSNORM, layer, weight=group + kind, input=residual, output=output)
    before: list[Task] = []
    if previous_end is None:
        table = draft.config.num_hidden_layers * len(Weight) + Weight.EMBED
        before = [draft.task(Opcode.EMBED, layer, weight=table, output=residual)]
    else:
        norm |= wait(previous_end) | {
            F.INPUT_2: Buffer.ATTENTION_OUT,
            F.INPUT_3: Buffer.MLP_OUT,
            F.SPLIT: draft.tiling.splits,
            F.OUTPUT_2: residual,
        }
    if local:
        return Dealt([[*before, norm]] * draft.sms, fixed=True)
    lists: list[list[Task]] = [[] for _ in range(draft.sms)]
    for row in range(batch):
        one = {F.BATCH_BEGIN: row, F.BATCH_COUNT: 1}
        lists[row % draft.sms] += [task | one for task in before]
        lists[row % draft.sms].append(norm | one | draft.counters.arrive(hidden))
    return Dealt(lists, fixed=True)


def head_waves(draft: Draft, previous_end: int) -> Iterator[Dealt]:
    """Final norm, logits, sampling and the end of the step, in order."""
    config, counters, sms = draft.config, draft.counters, draft.sms
    layer, vocabulary = config.num_hidden_layers, config.vocab_size
    hidden = -1 if draft.order.local_norm else counters.new("head input")
    # Consecutive, each with an arrival of every SM: who needs the last of them waits for all at once. It must, because
    # optional tasks arrive without having waited.
    logits = counters.several(["logits", *(f"histograms of pass {n}" for n in range(PASSES)), "masses"])
    drawn = counters.new("draws")
    yield norm_wave(draft, layer, Weight.FINAL_NORM, previous_end, hidden)

    source: Task = {F.INPUT: Buffer.LOCAL_HIDDEN} if draft.order.local_norm else {F.INPUT: Buffer.HIDDEN} | wait(hidden)
    head = source | draft.task(
        Opcode.LM_HEAD,
        layer,
        weight=layer * len(Weight) + Weight.EMBED,
        output=Buffer.LOGITS,
        output_2=Buffer.RANGE_BEST,
        dealers=sms,
    )
    yield Dealt(
        [
            [head | part | {F.DEALER: sm} | counters.arrive(logits)]
            for sm, part in enumerate(_shares(vocabulary, sms, TILE_ROWS))
        ],
        fixed=True,
    )

    # The same ranges on the same SMs in every pass.
    ranges = list(_shares(vocabulary, sms, SAMPLE_BLOCK))
    source = {F.INPUT: Buffer.LOGITS, F.INPUT_2: Buffer.RANGE_BEST, F.WAIT: logits, F.DEALERS: sms}
    histogram = source | draft.task(Opcode.SAMPLE_HISTOGRAM, layer, output=Buffer.SEARCH)
    for number in range(PASSES):
        one = histogram | {F.SPLIT: number, F.WAIT_COUNT: 1 + number}
        yield Dealt(
            [[one | part | {F.DEALER: sm} | counters.arrive(logits + 1 + number)] for sm, part in enumerate(ranges)],
            fixed=True,
        )
    mass = source | draft.task(Opcode.SAMPLE_MASS, layer, input_3=Buffer.SEARCH, output=Buffer.MASS)
    mass[F.WAIT_COUNT] = 1 + PASSES
    yield Dealt([[mass | part | counters.arrive(logits + 1 + PASSES)] for part in ranges], fixed=True)

    draw = source | draft.task(
        Opcode.SAMPLE_DRAW, layer, input_3=Buffer.MASS, output=Buffer.SEARCH, wait_count=2 + PASSES
    )
    rows = [{F.BATCH_BEGIN: row, F.BATCH_COUNT: 1} for row in range(draft.batch)]
    yield anywhere(draw | row | counters.arrive(drawn) for row in rows)

    end: Task = {F.OPCODE: Opcode.END_STEP, F.ROW_COUNT: len(draft.queues)}
    yield anywhere([end | wait(drawn)])


def _shares(total: int, parts: int, multiple: int) -> Iterator[Task]:
    """ROW fields of `parts` consecutive ranges, as even as multiples of `multiple` allow; some may be empty."""
    units = -(-total // multiple)
    for part in range(parts):
        begin, end = (min(units * p // parts * multiple, total) for p in (part, part + 1))
        yield {F.ROW_BEGIN: begin, F.ROW_COUNT: end - begin}

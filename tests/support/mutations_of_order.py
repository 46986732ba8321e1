"""Planted faults of waits, arrivals and places in the lists."""

from __future__ import annotations

import dataclasses

from north_jax.megakernel.abi import Buffer, Field, Opcode

from .editing import Edit, Table, Task

F, Op, B = Field, Opcode, Buffer
MUTATIONS = Table()


def unwaited(task: Task) -> Task:
    return task.set(wait=0, wait_need=0, wait_count=0)


# Numbers of arrivals.


@MUTATIONS("counters")
def wait_dropped_by_half(edit: Edit):
    return [edit.one(Op.MOE_DOWN, 1).set(wait_count=0), "WAIT_NEED"]


@MUTATIONS("wait")
def need_one_too_many(edit: Edit):
    task = edit.one(Op.ADD_RMSNORM, 2, nth=1)
    return [task.set(wait_need=task[F.WAIT_NEED] + 1), "(layer 1 outputs)"]


@MUTATIONS("wait")
def need_one_too_few(edit: Edit):
    task = edit.one(Op.ADD_RMSNORM, 2, nth=1)
    return [task.set(wait_need=task[F.WAIT_NEED] - 1), "(layer 1 outputs)"]


@MUTATIONS("wait")
def slice_need_one_too_few(edit: Edit):
    task = edit.one(Op.MOE_DOWN, 2, nth=1)
    return [task.set(slice_need=task[F.SLICE_NEED] - 1), "(layer 2 hidden units of expert rank 0)"]


@MUTATIONS("wait")
def wait_for_a_counter_of_other_need(edit: Edit):
    task = edit.one(Op.MOE_DOWN, 2)
    return [task.set(wait=edit.counter("layer 2 outputs")), "(layer 2 outputs)"]


@MUTATIONS("wait")
def wait_for_the_next_counter_too(edit: Edit):
    task = edit.one(Op.SAMPLE_DRAW)
    return [task.set(wait_count=task[F.WAIT_COUNT] + 1), "(draws)"]


@MUTATIONS("arrivals")
def arrival_dropped(edit: Edit):
    edit.one(Op.O_PROJ, 3).set(arrive=0, arrive_count=0)
    return ["(layer 3 outputs): 7 arrivals in a step, the schedule states 8"]


@MUTATIONS("arrivals")
def arrival_twice(edit: Edit):
    edit.one(Op.O_PROJ, 3).set(arrive_count=2)
    return ["(layer 3 outputs): 9 arrivals in a step, the schedule states 8"]


@MUTATIONS("arrivals")
def arrival_at_another_counter(edit: Edit):
    edit.one(Op.QKV_PROJ, 3, row_begin=0).set(arrive=edit.counter("layer 3 queries of KV head 1"))
    return ["(layer 3 queries of KV head 0): 24 arrivals in a step, the schedule states 48"]


@MUTATIONS("arrivals")
def need_of_the_schedule_wrong(edit: Edit):
    edit.needs[edit.counter("draws")] += 1
    return ["(draws): 3 arrivals in a step, the schedule states 4"]


@MUTATIONS("arrivals")
def items_that_arrive_elsewhere(edit: Edit):
    for task in edit.tasks(Op.ATTN_DECODE, 1):
        task.set(arrive=task[F.ARRIVE] + 1)
    return ["(layer 1 splits of row 0, KV head 0): 0 arrivals", "signalled by nobody"]


# Reads too early.


@MUTATIONS("read too early")
def norm_that_does_not_wait(edit: Edit):
    task = unwaited(edit.one(Op.ADD_RMSNORM, 2, nth=1))
    return [task, "may read ATTENTION_OUT of layer 1"]


@MUTATIONS("read too early")
def norm_that_waits_for_an_earlier_layer(edit: Edit):
    task = edit.one(Op.ADD_RMSNORM, 3, nth=1).set(wait=edit.counter("layer 1 outputs"))
    return [task, "may read", "of layer 2", "it waits for", "(layer 1 outputs)"]


@MUTATIONS("read too early")
def combination_that_does_not_wait(edit: Edit):
    task = unwaited(edit.one(Op.ATTN_COMBINE, 2, batch_begin=2))
    return [task, "before the attention of layer 2", "(layer 2 splits of row 2, KV head 0)"]


@MUTATIONS("read too early")
def combination_that_waits_for_another_row(edit: Edit):
    task = edit.one(Op.ATTN_COMBINE, 2, batch_begin=2, row_begin=4)
    task.set(wait=edit.counter("layer 2 splits of row 1, KV head 1"))
    return [task, "PARTIAL of layer 2", "(layer 2 splits of row 2, KV head 1)"]


@MUTATIONS("read too early")
def slices_that_do_not_wait(edit: Edit):
    task = edit.one(Op.O_PROJ, 2).set(slice_wait=0, slice_need=0)
    return [task, "may read ATTENTION of layer 2"]


@MUTATIONS("read too early")
def slices_that_wait_for_another_layer(edit: Edit):
    task = edit.one(Op.O_PROJ, 2).set(slice_wait=edit.counter("layer 1 attention of KV head 0"))
    return [task, "may read ATTENTION of layer 2", "(layer 1 attention of KV head 1)"]


@MUTATIONS("read too early")
def slice_that_is_too_wide(edit: Edit):
    for task in edit.tasks(Op.O_PROJ, 2):
        task.set(k_slice=64)
    return [edit.one(Op.O_PROJ, 2), "may read ATTENTION of layer 2"]


@MUTATIONS("read too early")
def dense_slices_that_do_not_wait(edit: Edit):
    task = edit.one(Op.FFN_DOWN).set(slice_wait=0, slice_need=0)
    return [task, "may read DENSE_HIDDEN of layer 0"]


@MUTATIONS("read too early", "ahead")
def attention_that_does_not_wait(edit: Edit):
    for task in edit.tasks(Op.ATTN_DECODE, 2):
        task.set(slice_wait=0, slice_need=0)
    return [edit.one(Op.ATTN_DECODE, 2), "may read QKV of layer 2"]


@MUTATIONS("read too early", "ahead")
def attention_that_waits_for_another_layer(edit: Edit):
    for task in edit.tasks(Op.ATTN_DECODE, 2):
        task.set(slice_wait=edit.counter("layer 1 queries of KV head 0"))
    return [edit.one(Op.ATTN_DECODE, 2), "may read QKV of layer 2"]


@MUTATIONS("read too early")
def experts_that_do_not_wait_for_hidden_units(edit: Edit):
    task = edit.one(Op.MOE_DOWN, 2).set(slice_wait=0, slice_need=0)
    return [task, "may read EXPERT_HIDDEN of layer 2", "(layer 2 hidden units of expert rank 0)"]


@MUTATIONS("read too early")
def experts_that_wait_for_the_ranks_of_another_layer(edit: Edit):
    task = edit.one(Op.MOE_DOWN, 2).set(slice_wait=edit.counter("layer 1 hidden units of expert rank 0"))
    return [task, "may read EXPERT_HIDDEN of layer 2"]


@MUTATIONS("read too early")
def routing_that_does_not_wait(edit: Edit):
    task = unwaited(edit.one(Op.MOE_UPGATE_ACT, 2, dealer=3, round_begin=0))
    return [task, "may read ROUTER_LOGITS of layer 2"]


@MUTATIONS("read too early", "ahead")
def tile_that_arrives_for_another_head(edit: Edit):
    first, second = edit.one(Op.QKV_PROJ, 3, row_begin=0), edit.one(Op.QKV_PROJ, 3, row_begin=32)
    first[F.ARRIVE], second[F.ARRIVE] = second[F.ARRIVE], first[F.ARRIVE]
    return [second, "may read QKV of layer 3"]


@MUTATIONS("read too early")
def draw_before_the_masses(edit: Edit):
    task = edit.one(Op.SAMPLE_DRAW, batch_begin=1)
    return [task.set(wait_count=task[F.WAIT_COUNT] - 1), "may read MASS of layer 5"]


@MUTATIONS("read too early")
def masses_before_the_last_pass(edit: Edit):
    task = edit.one(Op.SAMPLE_MASS)
    return [task.set(wait_count=task[F.WAIT_COUNT] - 1), "may read SEARCH of layer 5"]


@MUTATIONS("read too early")
def pass_before_the_one_before_it(edit: Edit):
    task = edit.one(Op.SAMPLE_HISTOGRAM, split=4)
    return [task.set(wait_count=task[F.WAIT_COUNT] - 1), "may read SEARCH of layer 5"]


@MUTATIONS("read too early")
def pass_that_does_not_wait(edit: Edit):
    return [unwaited(edit.one(Op.SAMPLE_HISTOGRAM)), "may read RANGE_BEST of layer 5"]


@MUTATIONS("read too early")
def draw_that_trusts_optional_tasks(edit: Edit):
    # The masses alone prove nothing of the logits: where no row asks for them, nobody waited for those.
    task = edit.one(Op.SAMPLE_DRAW, batch_begin=1).set(wait=edit.counter("masses"), wait_count=1)
    return [task, "may read LOGITS of layer 5"]


@MUTATIONS("read too early")
def norm_after_what_reads_it(edit: Edit):
    norm = edit.remove(edit.one(Op.ADD_RMSNORM, 2))
    after = edit.one(Op.QKV_PROJ, 2)
    edit.insert_before(after, norm)
    edit.remove(after)
    edit.insert_before(norm, after)
    return [after, "may read LOCAL_HIDDEN of layer 2 on SM 0 before", norm]


@MUTATIONS("read too early", "tuned")
def input_that_is_not_waited_for(edit: Edit):
    return [unwaited(edit.one(Op.QKV_PROJ, 2)), "may read HIDDEN of layer 2"]


@MUTATIONS("read too early", "tuned")
def routes_before_the_choices(edit: Edit):
    router = edit.counter("layer 2 router")
    task = edit.one(Op.ROUTE_FINALIZE, 2).set(wait=router, wait_need=int(edit.needs[router]))
    return [task, "may read TOPK of layer 2"]


@MUTATIONS("read too early", "tuned")
def choices_before_the_router(edit: Edit):
    return [unwaited(edit.one(Op.ROUTER_TOPK, 2)), "may read ROUTER_LOGITS of layer 2"]


@MUTATIONS("read too early", "tuned")
def claims_before_the_gathering(edit: Edit):
    task = edit.one(Op.MOE_UPGATE_ACT_DRAIN, 2, dealer=1).set(wait=edit.counter("layer 2 routes"), wait_need=1)
    return [task, "may read GATHERED of layer 2"]


@MUTATIONS("read too early", "tuned")
def gathering_before_the_routes(edit: Edit):
    task = edit.one(Op.MOE_GATHER, 3, row_begin=0).set(wait=edit.counter("layer 3 top-k"), wait_need=2)
    return [task, "may read ROUTES of layer 3"]


@MUTATIONS("read too early", "tuned")
def experts_combined_too_early(edit: Edit):
    task = edit.one(Op.MOE_COMBINE, 2, batch_begin=1)
    return [task.set(wait=edit.counter("layer 2 routes"), wait_need=1), "may read EXPERT_OUT of layer 2"]


# Overwritten too early.


def with_one_plane(edit: Edit, buffer: Buffer) -> None:
    workspace = edit.original.workspace
    buffers = workspace.buffers | {buffer: dataclasses.replace(workspace.buffers[buffer], planes=1)}
    edit.changes["workspace"] = dataclasses.replace(workspace, buffers=buffers)


def unused_choices(edit: Edit, after: Task) -> None:
    """Chooses the experts of layer 1 before a task, for nobody."""
    router = edit.one(Op.MOE_DOWN, 1)
    for row in range(3):
        task = router.copy()
        task.fields[:] = 0
        task.set(opcode=Op.ROUTER_TOPK, layer=1, input=B.ROUTER_LOGITS, output=B.TOPK, batch_begin=row, batch_count=1)
        task.set(wait=router[F.WAIT], wait_need=router[F.WAIT_NEED], wait_count=1)
        edit.insert_before(after, task)


@MUTATIONS("overwritten too early")
def reader_that_nobody_waits_for(edit: Edit):
    # The choices of layer 1, which this order does not use: a side lane may fall behind.
    with_one_plane(edit, B.ROUTER_LOGITS)
    unused_choices(edit, edit.one(Op.SAMPLE_MASS))
    first = edit.one(Op.ROUTER_TOPK, batch_begin=0)
    return [edit.one(Op.ROUTER_GEMM, 2), "may overwrite ROUTER_LOGITS of layer 1", first]


@MUTATIONS("overwritten too early", "behind")
def dealer_that_falls_behind(edit: Edit):
    # An SM without a tile of an output projection may still choose experts in the layer before.
    with_one_plane(edit, B.ROUTER_LOGITS)
    return [edit.one(Op.ROUTER_GEMM, 2), "may overwrite ROUTER_LOGITS of layer 1", "MOE_UPGATE_ACT of layer 1"]


@MUTATIONS("overwritten too early", "behind")
def norm_that_falls_behind(edit: Edit):
    with_one_plane(edit, B.ATTENTION_OUT)
    return ["may overwrite ATTENTION_OUT of layer", "ADD_RMSNORM of layer", "has read it"]


# Deadlocks.


@MUTATIONS("deadlock")
def norm_before_what_it_waits_for(edit: Edit):
    norm, last = edit.one(Op.ADD_RMSNORM, 2), edit.one(Op.O_PROJ, 1)
    edit.insert_before(last, edit.remove(norm))
    return [norm, "(layer 1 outputs)", "which", last, "comes after, on the same SM"]


@MUTATIONS("deadlock")
def two_tasks_swapped(edit: Edit):
    first, second = edit.one(Op.ATTN_DECODE, 2, dealer=0), edit.one(Op.O_PROJ, 2)
    first.fields[:], second.fields[:] = second.fields.copy(), first.fields.copy()
    return [first, "(layer 2 attention of KV head"]


@MUTATIONS("deadlock")
def task_on_another_sm_before_what_it_waits_for(edit: Edit):
    task = edit.remove(edit.one(Op.MOE_DOWN, 2, row_begin=32))
    edit.insert_before(edit.one(Op.MOE_UPGATE_ACT, 2, dealer=1, round_begin=0), task)
    return [task, "waits for", "the up projection of layer 2"]


@MUTATIONS("deadlock")
def wait_for_its_own_arrival(edit: Edit):
    task = edit.one(Op.QKV_PROJ, 2, row_begin=0)
    task.set(wait=task[F.ARRIVE], wait_count=1, wait_need=int(edit.needs[task[F.ARRIVE]]))
    return [task, "(layer 2 queries of KV head 0)"]


@MUTATIONS("deadlock")
def side_tasks_in_the_wrong_order(edit: Edit):
    first = edit.one(Op.ATTN_COMBINE, 1)
    sm, _ = edit.place(first)
    last = next(task for task in edit.lists[sm] if task[F.OPCODE] == Op.ATTN_COMBINE and task[F.LAYER] == 3)
    edit.insert_before(first, edit.remove(last))
    return [last, "(layer 3 splits of row"]


@MUTATIONS("deadlock")
def wait_for_a_later_layer(edit: Edit):
    task = edit.one(Op.ADD_RMSNORM, 2).set(wait=edit.counter("layer 3 outputs"))
    return [task, "(layer 3 outputs)"]


@MUTATIONS("deadlock", "tuned")
def claimer_before_the_items_it_waits_for(edit: Edit):
    up = edit.one(Op.MOE_UPGATE_ACT_DRAIN, 2, dealer=1)
    sm, _ = edit.place(up)
    down = next(t for t in edit.lists[sm] if t[F.OPCODE] == Op.MOE_DOWN_DRAIN and t[F.LAYER] == 2)
    edit.insert_before(up, edit.remove(down))
    return [down, "the up projection of layer 2, of which", up]


# The end of the step.


@MUTATIONS("end of the step")
def end_missing(edit: Edit):
    edit.remove(edit.one(Op.END_STEP))
    return ["0 END_STEP tasks, expected one"]


@MUTATIONS("end of the step")
def end_twice(edit: Edit):
    end = edit.one(Op.END_STEP)
    edit.insert_before(end, end.copy())
    return ["2 END_STEP tasks, expected one"]


@MUTATIONS("end of the step")
def end_too_early(edit: Edit):
    draw = edit.one(Op.SAMPLE_DRAW)
    task = edit.one(Op.END_STEP)
    task.set(wait=draw[F.WAIT], wait_need=draw[F.WAIT_NEED], wait_count=draw[F.WAIT_COUNT])
    return [task, "may run before", "SAMPLE_DRAW"]


@MUTATIONS("end of the step")
def end_that_does_not_wait(edit: Edit):
    return [unwaited(edit.one(Op.END_STEP)), "may run before"]


@MUTATIONS("end of the step", "tuned")
def end_that_forgets_a_queue(edit: Edit):
    task = edit.one(Op.END_STEP)
    return [task.set(row_count=task[F.ROW_COUNT] - 1), "every queue"]


@MUTATIONS("end of the step")
def draw_before_a_reader_of_the_row(edit: Edit):
    # A choice of experts that nobody waits for may still read which rows are live.
    unused_choices(edit, edit.one(Op.SAMPLE_DRAW))
    return ["SAMPLE_DRAW of layer 5", "may run before"]

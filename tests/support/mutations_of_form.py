"""Planted faults that one descriptor, or the tasks of one operation, show: fields, shares, coverage, sizes."""

from __future__ import annotations

import dataclasses

from north_jax.megakernel.abi import SAMPLE_BLOCK, Buffer, Field, Opcode

from .editing import Edit, Table

F, Op, B = Field, Opcode, Buffer
MUTATIONS = Table()


# Lists and fields.


@MUTATIONS("lists")
def lists_that_do_not_cover_the_tasks(edit: Edit):
    begin = edit.original.begin.copy()
    begin[1], begin[2] = begin[2], begin[1]
    edit.changes["begin"] = begin
    return ["do not cover"]


@MUTATIONS("opcode")
def unknown_opcode(edit: Edit):
    task = edit.one(Op.ROUTER_GEMM, 2).set(opcode=99)
    return [edit.name(task), "99"]


@MUTATIONS("unread field")
def unread_field_set(edit: Edit):
    task = edit.one(Op.LM_HEAD).set(rope=1)
    return [task, "does not read ROPE"]


@MUTATIONS("task number")
def wrong_task_number(edit: Edit):
    edit.renumber = False
    task = edit.one(Op.O_PROJ, 1)
    task.set(task=task[F.TASK] + 1)
    return [task]


@MUTATIONS("layer")
def dense_operation_in_an_expert_layer(edit: Edit):
    return [edit.one(Op.FFN_DOWN).set(layer=1), "a dense layer"]


@MUTATIONS("layer")
def embedding_in_a_later_layer(edit: Edit):
    return [edit.one(Op.EMBED).set(layer=1)]


@MUTATIONS("layer")
def sampling_in_a_layer(edit: Edit):
    return [edit.one(Op.SAMPLE_MASS).set(layer=4), "the head"]


@MUTATIONS("weight")
def weight_of_another_layer(edit: Edit):
    task = edit.one(Op.QKV_PROJ, 2)
    return [task.set(weight=task[F.WEIGHT] + 8), "QKV of layer 2"]


@MUTATIONS("weight")
def weight_of_another_kind(edit: Edit):
    task = edit.one(Op.O_PROJ, 2)
    return [task.set(weight=task[F.WEIGHT] + 3), "OUT of layer 2"]


@MUTATIONS("layer's own")
def window_of_another_layer(edit: Edit):
    return [edit.one(Op.ATTN_COMBINE, 4).set(window=70), "WINDOW is 70, expected 0"]


@MUTATIONS("layer's own")
def rope_of_another_layer(edit: Edit):
    return [edit.one(Op.QKV_PROJ, 4).set(rope=1), "ROPE is 1, expected 0, as in layer 4"]


@MUTATIONS("layer's own")
def pages_of_another_layer(edit: Edit):
    return [edit.one(Op.QKV_PROJ, 3).set(pool=2), "POOL is 2, expected 3"]


@MUTATIONS("buffer")
def output_into_another_buffer(edit: Edit):
    return [edit.one(Op.ROUTER_GEMM, 1).set(output=B.MLP_OUT), "ROUTER_LOGITS"]


@MUTATIONS("batch")
def rows_of_the_batch_that_do_not_exist(edit: Edit):
    return [edit.one(Op.O_PROJ, 1).set(batch_begin=1), "rows from 1 on, of 3"]


@MUTATIONS("batch")
def routing_of_some_rows(edit: Edit):
    return [edit.one(Op.MOE_DOWN, 1).set(batch_count=2), "every row"]


@MUTATIONS("rows")
def rows_beyond_the_weight(edit: Edit):
    return [edit.one(Op.MOE_DOWN, 1, row_begin=48).set(row_count=17)]


@MUTATIONS("rows")
def rows_of_two_heads(edit: Edit):
    return [edit.one(Op.QKV_PROJ, 1, row_begin=0).set(row_begin=16), "the queries of one KV head, or its key or value"]


@MUTATIONS("rows")
def tile_that_does_not_divide_an_expert(edit: Edit):
    for task in edit.tasks(Op.MOE_UPGATE_ACT, 1):
        task.set(row_count=7)
    return [edit.one(Op.MOE_UPGATE_ACT, 1), "a divisor of 16"]


@MUTATIONS("rows")
def part_of_a_sampling_block(edit: Edit):
    return [edit.one(Op.SAMPLE_MASS).set(row_begin=8, row_count=191), f"whole blocks of {SAMPLE_BLOCK}"]


@MUTATIONS("columns")
def slices_that_do_not_divide_the_columns(edit: Edit):
    return [edit.one(Op.O_PROJ, 1).set(k_slice=24), "a divisor of K_COUNT 64"]


@MUTATIONS("columns")
def columns_beyond_the_input(edit: Edit):
    return [edit.one(Op.FFN_DOWN).set(k_begin=24), "of 48"]


@MUTATIONS("part")
def part_that_does_not_exist(edit: Edit):
    return [edit.one(Op.O_PROJ, 1).set(split=1), "SPLIT is 1"]


@MUTATIONS("norm")
def norm_that_adds_too_few_parts(edit: Edit):
    return [edit.one(Op.ADD_RMSNORM, 2).set(split=0), "SPLIT is 0, expected 1, all parts"]


@MUTATIONS("norm")
def norm_that_adds_nothing(edit: Edit):
    task = edit.one(Op.ADD_RMSNORM, 2).set(input_2=0, input_3=0, output_2=0, split=0)
    return [task, "INPUT_2 is 0, expected ATTENTION_OUT"]


@MUTATIONS("dealer")
def dealer_beyond_the_dealers(edit: Edit):
    return [edit.one(Op.ATTN_DECODE, 1).set(dealer=4), "one of 4 dealers"]


@MUTATIONS("pass")
def pass_that_does_not_exist(edit: Edit):
    return [edit.one(Op.SAMPLE_HISTOGRAM).set(split=6), "SPLIT is 6, expected 0 to 5"]


@MUTATIONS("coverage")
def tokens_that_no_pass_counts(edit: Edit):
    task = next(task for task in edit.tasks(Op.SAMPLE_HISTOGRAM, split=2) if task[F.ROW_COUNT])
    task.set(row_begin=0, row_count=0)
    return ["the histogram of pass 2", "never written"]


@MUTATIONS("coverage")
def pass_that_is_run_twice(edit: Edit):
    edit.one(Op.SAMPLE_HISTOGRAM, split=2, dealer=1).set(split=1)
    return ["SEARCH of layer 5", "written 2 times"]


@MUTATIONS("dealer")
def histogram_of_some_ranges(edit: Edit):
    return [edit.one(Op.SAMPLE_HISTOGRAM).set(dealers=3), "the ranges of RANGE_BEST"]


@MUTATIONS("counters")
def wait_for_a_counter_that_does_not_exist(edit: Edit):
    return [edit.one(Op.MOE_DOWN, 3).set(wait=len(edit.needs))]


@MUTATIONS("counters")
def items_that_arrive_nowhere(edit: Edit):
    for task in edit.tasks(Op.MOE_UPGATE_ACT, 1):
        task.set(arrive=0, arrive_count=0)
    return [edit.one(Op.MOE_UPGATE_ACT, 1), "others wait for its items"]


@MUTATIONS("queue", "tuned")
def queue_that_does_not_exist(edit: Edit):
    return [edit.one(Op.ATTN_DRAIN, 0).set(queue=len(edit.original.queue_names))]


# Shares of dynamic work.


@MUTATIONS("shared work")
def dealer_twice(edit: Edit):
    task = edit.one(Op.ATTN_DECODE, 2, dealer=1).set(dealer=0)
    return [task, "DEALER 0 of the attention of layer 2"]


@MUTATIONS("shared work")
def dealer_missing(edit: Edit):
    edit.remove(edit.one(Op.ATTN_DECODE, 2, dealer=3))
    return ["attention of layer 2 lacks DEALER 3 of 4"]


@MUTATIONS("shared work")
def dealers_that_count_themselves_differently(edit: Edit):
    return [edit.one(Op.ATTN_DECODE, 2, dealer=1).set(dealers=5), "DEALERS is 4"]


@MUTATIONS("shared work")
def rounds_with_a_gap(edit: Edit):
    task = edit.one(Op.MOE_UPGATE_ACT, 1, dealer=2, round_begin=2).set(round_begin=3)
    return [task, "nobody runs rounds 2 to 2 of DEALER 2"]


@MUTATIONS("shared work")
def rounds_twice(edit: Edit):
    task = edit.one(Op.MOE_UPGATE_ACT, 1, dealer=2, round_begin=2).set(round_begin=1)
    return [task, "has rounds before 2 already"]


@MUTATIONS("shared work")
def rounds_that_end_too_early(edit: Edit):
    task = edit.one(Op.MOE_UPGATE_ACT, 1, dealer=2, round_begin=2).set(round_end=2)
    return [task, "nobody runs rounds 2 to 2 of DEALER 2"]


@MUTATIONS("shared work")
def padding_twice(edit: Edit):
    task = edit.one(Op.MOE_UPGATE_ACT, 1, dealer=2, round_begin=0)
    task.set(round_end=0)
    second = edit.one(Op.MOE_UPGATE_ACT, 1, dealer=2, round_begin=2).set(round_begin=0)
    return [second, "DEALER 2"]


@MUTATIONS("shared work", "tuned")
def items_dealt_and_claimed(edit: Edit):
    edit.one(Op.ATTN_DRAIN, 4, dealer=1).set(opcode=Op.ATTN_DECODE, queue=0)
    return ["attention of layer 4", "OPCODE"]


@MUTATIONS("shared work")
def item_of_another_input(edit: Edit):
    return [edit.one(Op.MOE_UPGATE_ACT, 1, dealer=2, round_begin=2).set(input=B.HIDDEN), "INPUT is 4"]


@MUTATIONS("queue", "tuned")
def queue_of_two_operations(edit: Edit):
    queue = edit.one(Op.MOE_UPGATE_ACT_DRAIN, 2)[F.QUEUE]
    for task in edit.tasks(Op.MOE_DOWN_DRAIN, 2):
        task.set(queue=queue)
    return ["the up projection of layer 2 and the down projection of layer 2", "layer 2 up"]


# Coverage.


@MUTATIONS("coverage")
def tile_missing(edit: Edit):
    task = edit.remove(edit.one(Op.QKV_PROJ, 2, row_begin=32))
    edit.needs[task[F.ARRIVE]] -= task[F.ARRIVE_COUNT]
    return ["QKV of layer 2", "columns 32 to 55", "never written"]


@MUTATIONS("coverage")
def tile_twice(edit: Edit):
    task = edit.one(Op.ROUTER_GEMM, 1)
    edit.insert_before(task, task.copy())
    edit.needs[task[F.ARRIVE]] += 1
    return [task, "ROUTER_LOGITS of layer 1", "written 2 times"]


@MUTATIONS("coverage")
def overlapping_tiles(edit: Edit):
    task = edit.one(Op.MOE_DOWN, 2, row_begin=16).set(row_begin=8)
    return [task, "MLP_OUT of layer 2", "columns 8 to 15", "written 2 times"]


@MUTATIONS("coverage")
def rows_of_the_batch_left_out(edit: Edit):
    task = edit.one(Op.QKV_PROJ, 2, row_begin=32).set(batch_count=2)
    return [task, "rows 2 to 2, columns 32 to 55", "never written"]


@MUTATIONS("coverage")
def combination_of_the_wrong_row(edit: Edit):
    task = edit.one(Op.ATTN_COMBINE, 3, batch_begin=2).set(batch_begin=1)
    return [task, "ATTENTION of layer 3", "written 2 times"]


@MUTATIONS("coverage")
def combination_of_the_wrong_head(edit: Edit):
    task = edit.one(Op.ATTN_COMBINE, 3, batch_begin=2, row_begin=4).set(row_begin=0)
    return [task, "ATTENTION of layer 3", "rows 2 to 2, columns 0 to 31", "written 2 times"]


@MUTATIONS("coverage", "tuned")
def columns_of_a_split_product_twice(edit: Edit):
    task = edit.one(Op.O_PROJ, 1, split=1, row_begin=16).set(k_begin=0)
    return [task, "the product of O_PROJ in layer 1", "written 2 times"]


@MUTATIONS("coverage")
def columns_of_a_product_left_out(edit: Edit):
    task = edit.one(Op.FFN_DOWN, row_begin=16).set(k_count=32)
    return [task, "the product of FFN_DOWN in layer 0", "never written"]


@MUTATIONS("coverage", "tuned")
def part_of_another_slice(edit: Edit):
    task = edit.one(Op.O_PROJ, 1, split=1, row_begin=16).set(split=0)
    return [task, "ATTENTION_OUT of layer 1", "written 2 times"]


@MUTATIONS("coverage")
def range_of_the_vocabulary_left_out(edit: Edit):
    task = edit.one(Op.LM_HEAD, dealer=1)
    task.set(row_count=task[F.ROW_COUNT] - 16)
    return [task, "LOGITS of layer 5", "never written"]


@MUTATIONS("coverage")
def range_of_the_vocabulary_reported_twice(edit: Edit):
    return [edit.one(Op.LM_HEAD, dealer=1).set(dealer=2), "RANGE_BEST of layer 5", "written 2 times"]


@MUTATIONS("coverage")
def token_never_drawn(edit: Edit):
    task = edit.remove(edit.one(Op.SAMPLE_DRAW, batch_begin=1))
    edit.needs[task[F.ARRIVE]] -= 1
    return ["row 1's token is drawn 0 times"]


@MUTATIONS("coverage")
def token_drawn_twice(edit: Edit):
    task = edit.one(Op.SAMPLE_DRAW, batch_begin=1).set(batch_begin=0)
    return [task, "row 0's token is drawn 2 times"]


@MUTATIONS("coverage", "tuned")
def assignment_never_gathered(edit: Edit):
    task = edit.remove(edit.one(Op.MOE_GATHER, 1, row_begin=3))
    edit.needs[task[F.ARRIVE]] -= 1
    return ["GATHERED of layer 1", "columns 3 to 3", "never written"]


@MUTATIONS("coverage", "tuned")
def experts_of_the_wrong_row_combined(edit: Edit):
    task = edit.one(Op.MOE_COMBINE, 1, batch_begin=1).set(batch_begin=0)
    return [task, "MLP_OUT of layer 1", "written 2 times"]


@MUTATIONS("coverage")
def input_that_nobody_writes(edit: Edit):
    return [edit.one(Op.QKV_PROJ, 2, row_begin=32).set(input=B.HIDDEN), "reads HIDDEN of layer 2, which nobody writes"]


@MUTATIONS("coverage")
def task_of_another_layer(edit: Edit):
    task = edit.one(Op.ROUTER_GEMM, 1)
    own = task[F.ARRIVE]
    task.fields[:] = edit.one(Op.ROUTER_GEMM, 2).fields
    task.set(arrive=own)
    return [task, "ROUTER_LOGITS of layer 2", "written 2 times"]


# Sizes.


@MUTATIONS("shared memory")
def tile_of_more_rows_than_a_page(edit: Edit):
    task = edit.one(Op.O_PROJ, 1, row_begin=16).set(row_begin=0, row_count=32)
    return [task, "at most 16"]


@MUTATIONS("workspace")
def buffers_upon_each_other(edit: Edit):
    workspace = edit.original.workspace
    offsets = workspace.offsets | {B.QKV: workspace.offsets[B.QKV] - 256}
    edit.changes["workspace"] = dataclasses.replace(workspace, offsets=offsets)
    return ["QKV begins at byte"]


@MUTATIONS("workspace")
def workspace_too_small(edit: Edit):
    workspace = edit.original.workspace
    edit.changes["workspace"] = dataclasses.replace(workspace, bytes=workspace.bytes - 256)
    return ["the workspace at"]


@MUTATIONS("workspace")
def buffer_missing(edit: Edit):
    workspace = edit.original.workspace
    buffers = {name: spec for name, spec in workspace.buffers.items() if name != B.SEARCH}
    edit.changes["workspace"] = dataclasses.replace(workspace, buffers=buffers)
    return ["SEARCH is missing"]


@MUTATIONS("workspace")
def buffer_of_another_shape(edit: Edit):
    workspace = edit.original.workspace
    spec = workspace.buffers[B.ATTENTION]
    buffers = workspace.buffers | {B.ATTENTION: dataclasses.replace(spec, shape=(3, 32))}
    edit.changes["workspace"] = dataclasses.replace(workspace, buffers=buffers)
    return ["ATTENTION is", "[3, 32], expected"]

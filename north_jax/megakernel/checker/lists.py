"""Whether a schedule is one at all: lists, opcodes, names and buffers. Everything else relies on it."""

from __future__ import annotations

import numpy as np

from ..abi import MAX_ROWS, Buffer, Field, Opcode
from ..layout import LOCAL, workspace
from ..schedule import Schedule
from .faults import Report
from .operands import Sizes

_ALIGNMENT = 16  # bytes: of the widest load


def check_lists(schedule: Schedule, report: Report) -> None:
    """Reports what keeps other rules from reading the schedule."""
    tasks, begin = schedule.tasks, schedule.begin
    rule = "lists"
    if not 1 <= schedule.batch <= MAX_ROWS:
        report.add(rule, f"{schedule.batch} rows, expected 1 to {MAX_ROWS}")
    if len(begin) < 2 or begin[0] != 0 or begin[-1] != len(tasks) or (np.diff(begin) < 0).any():
        report.add(rule, f"the lists of {len(begin) - 1} SMs do not cover {len(tasks)} tasks: they begin at {begin}")
    if len(schedule.counter_names) != len(schedule.counter_needs):
        report.add(rule, f"{len(schedule.counter_names)} names for {len(schedule.counter_needs)} counters")
    if report:
        return
    opcodes = tasks[:, Field.OPCODE]
    unknown = ~np.isin(opcodes, list(Opcode))
    report.tasks("opcode", np.arange(len(tasks)), unknown, lambda i: f"OPCODE {opcodes[i]} is no operation")
    ends = np.flatnonzero(opcodes == Opcode.END_STEP)
    if len(ends) != 1:
        report.add("end of the step", f"{len(ends)} END_STEP tasks, expected one: {[int(end) for end in ends]}")


def sizes_of(schedule: Schedule) -> Sizes:
    """The sizes that a schedule's operations go by."""
    config, buffers = schedule.config, schedule.workspace.buffers
    parts, ranges = buffers.get(Buffer.ATTENTION_OUT), buffers.get(Buffer.RANGE_BEST)
    return Sizes(
        batch=schedule.batch,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        expert_width=config.intermediate_size,
        dense_width=config.dense_intermediate_size,
        vocabulary=config.vocab_size,
        splits=parts.shape[0] if parts else 1,
        ranges=ranges.shape[1] if ranges else 1,
    )


def check_workspace(schedule: Schedule, report: Report) -> None:
    """Reports buffers that are missing, misshapen, outside the workspace or upon each other."""
    found, rule = schedule.workspace, "workspace"
    hidden = found.buffers.get(Buffer.HIDDEN)
    if hidden is None:
        report.add(rule, "HIDDEN is missing")
        return
    sizes = sizes_of(schedule)
    expected = workspace(
        schedule.config,
        batch=schedule.batch,
        sms=schedule.sms,
        dtype=hidden.dtype,
        planes=1,
        splits=sizes.splits,
        ranges=sizes.ranges,
    )
    end, before = 0, "the beginning"
    for name in sorted(found.buffers, key=lambda name: found.offsets[name]):
        spec, offset = found.buffers[name], found.offsets[name]
        wanted = expected.buffers.get(name)
        if wanted is None or (spec.shape, spec.dtype) != (wanted.shape, wanted.dtype):
            shape = None if wanted is None else f"{wanted.dtype}{list(wanted.shape)}"
            report.add(rule, f"{name.name} is {spec.dtype}{list(spec.shape)}, expected {shape}")
        if spec.planes < 1:
            report.add(rule, f"{name.name} has {spec.planes} planes")
        if offset < end or offset % _ALIGNMENT:
            report.add(rule, f"{name.name} begins at byte {offset}, {before} ends at {end}")
        end = offset + spec.plane_bytes * spec.planes * (schedule.sms if name in LOCAL else 1)
        before = name.name
    if end > found.bytes:
        report.add(rule, f"{before} ends at byte {end}, the workspace at {found.bytes}")
    for name in expected.buffers.keys() - found.buffers.keys():
        report.add(rule, f"{name.name} is missing")

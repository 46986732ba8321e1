"""Whether what an SM keeps in shared memory fits, and a task's tile fits a page."""

from __future__ import annotations

import numpy as np

from ..abi import Field, Opcode
from ..schedule import Schedule
from ..shared_memory import Capacities, budget, kv_pages
from .faults import Report

F = Field
_RULE = "shared memory"
_ROWS = (Opcode.ROUTER_GEMM, Opcode.O_PROJ, Opcode.FFN_DOWN, Opcode.MOE_DOWN, Opcode.MOE_DOWN_DRAIN)
_PAIRS = (Opcode.FFN_UPGATE_ACT, Opcode.MOE_UPGATE_ACT, Opcode.MOE_UPGATE_ACT_DRAIN)  # a gate and an up row a unit


def check_budget(schedule: Schedule, capacities: Capacities, report: Report) -> None:
    """Reports a schedule whose fixed parts leave too few pages, and tiles of more rows than a page."""
    memory = budget(schedule, capacities)
    kv = kv_pages(schedule, capacities)
    least = max(capacities.least_pages, kv)
    if memory.pages < least:
        parts = ", ".join(f"{name} {size}" for name, size in memory.parts.items())
        report.add(
            _RULE,
            f"{memory.pages} pages of {memory.page_bytes} bytes fit, expected {least} or more: "
            f"of {capacities.total} bytes {sum(memory.parts.values())} are taken ({parts})",
        )
    for opcodes, most in ((_ROWS, capacities.page_rows), (_PAIRS, capacities.page_rows // 2)):
        tasks = np.flatnonzero(np.isin(schedule.tasks[:, F.OPCODE], opcodes))
        count = schedule.tasks[tasks, F.ROW_COUNT]
        report.tasks(
            _RULE,
            tasks,
            count > most,
            lambda i, count=count, most=most: f"ROW_COUNT is {count[i]}, a tile has at most {most}",  # type: ignore[misc]
        )

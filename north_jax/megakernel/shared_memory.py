"""What an SM keeps in its shared memory while it runs a schedule: a budget in bytes, and the pages that are left.

The fixed parts come first, the rest are pages of the weight ring:

* input: the normalised input of a layer, all rows, where every SM norms for itself and it fits; otherwise it is staged
  by K slice like everything else;
* staging: slots of activations, each one K slice of up to GROUP rows (those of one n8 tile of the tensor cores). Larger
  batches are more groups through the same slots while a weight page stays;
* sums: what the consumer warps, which share a page's columns, leave to the epilogue, twice over; or, for attention, the
  sums of half of the warps;
* routing: experts, their rows and weights, of the task at hand and of the next;
* side: tables of sampling and routing;
* descriptors and barriers.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .abi import DESCRIPTOR_FIELDS, MAX_TOP_K, PAGE_TOKENS, PASS_BITS, Buffer, Field, Opcode
from .schedule import Schedule

F = Field
GROUP = 8  # rows of a tensor-core tile's columns


@dataclasses.dataclass(frozen=True, slots=True)
class Capacities:
    """Sizes of the kernel. The defaults are an H200's, and the pages that measured fastest."""

    total: int = 227 * 1024  # bytes that a block may have
    page_rows: int = 16
    page_row_bytes: int = 2048  # one bulk copy
    padding: int = 16  # bytes after a row, against bank conflicts
    least_pages: int = 4
    most_pages: int = 6  # more bring nothing
    staging_slots: int = 2
    consumer_warps: int = 8
    descriptors: int = 8
    barriers: int = 512  # bytes
    histogram: int = 2**PASS_BITS  # bins of a pass of sampling, 4 bytes each; a draw keeps as many floats there


@dataclasses.dataclass(frozen=True, slots=True)
class SharedMemory:
    """A budget.

    Attributes:
      parts: bytes of each fixed part.
      page_bytes: bytes of a page of the ring.
      pages: pages that fit beside the parts, at most `Capacities.most_pages`.
      resident_input: whether a layer's input stays, instead of being staged by K slice.
    """

    parts: dict[str, int]
    page_bytes: int
    pages: int
    resident_input: bool

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(self.parts.values()) + self.pages * self.page_bytes


def budget(schedule: Schedule, capacities: Capacities | None = None) -> SharedMemory:
    """The budget of a schedule: with the input resident where that leaves enough pages."""
    capacities = capacities or Capacities()
    if Buffer.LOCAL_HIDDEN in schedule.tasks[:, F.INPUT]:
        resident = _budget(schedule, capacities, resident=True)
        if resident.pages >= capacities.least_pages:
            return resident
    return _budget(schedule, capacities, resident=False)


def _budget(schedule: Schedule, c: Capacities, *, resident: bool) -> SharedMemory:
    config, batch = schedule.config, schedule.batch
    item = schedule.workspace.buffers[Buffer.HIDDEN].dtype.itemsize
    rows, groups = min(batch, GROUP), -(-batch // GROUP)
    d, group = config.head_dim, config.queries_per_kv_head
    sums = 2 * c.consumer_warps * c.page_rows * rows * groups * 4
    attention = c.consumer_warps // 2 * group * (d + 2) * 4
    assignments = batch * config.num_experts_per_tok
    routing = config.num_experts * 8 + assignments * 8  # expert and rows; choice and weight
    parts = {
        "input": batch * (config.hidden_size * item + c.padding) if resident else 0,
        "staging": c.staging_slots * max(_slots(schedule, c, item, rows, resident).values(), default=0),
        "sums": max(sums, attention),
        "routing": 2 * routing,
        "side": max(c.histogram * 4, routing) + MAX_TOP_K * 8,
        "descriptors": c.descriptors * DESCRIPTOR_FIELDS * 4,
        "barriers": c.barriers,
    }
    page = c.page_rows * (c.page_row_bytes + c.padding)
    pages = min(max(c.total - sum(parts.values()), 0) // page, c.most_pages)
    return SharedMemory(parts, page, pages, resident)


def _slots(schedule: Schedule, c: Capacities, item: int, rows: int, resident: bool) -> dict[Opcode, int]:
    """Bytes that one staged slice of each operation takes."""
    config, tasks = schedule.config, schedule.tasks
    page_columns = min(c.page_row_bytes // item, config.hidden_size)
    columns: dict[Opcode, int] = {}
    for opcode in Opcode:
        own = tasks[tasks[:, F.OPCODE] == opcode]
        if not len(own):
            continue
        if opcode in (Opcode.O_PROJ, Opcode.FFN_DOWN):
            columns[opcode] = int(own[:, F.K_SLICE].max())
        elif opcode in (Opcode.MOE_DOWN, Opcode.MOE_DOWN_DRAIN):
            columns[opcode] = config.intermediate_size
        elif opcode in _TAKE_HIDDEN and not (resident and (own[:, F.INPUT] == Buffer.LOCAL_HIDDEN).all()):
            columns[opcode] = page_columns
    slots = {opcode: rows * (count * item + c.padding) for opcode, count in columns.items()}
    if np.isin(tasks[:, F.OPCODE], [Opcode.ATTN_DECODE, Opcode.ATTN_DRAIN]).any():
        slots[Opcode.ATTN_DECODE] = (config.queries_per_kv_head + 2) * (config.head_dim * item + c.padding)
    return slots


def kv_pages(schedule: Schedule, capacities: Capacities) -> int:
    """Pages of the ring that the keys and values of one KV head's page take."""
    item = schedule.workspace.buffers[Buffer.HIDDEN].dtype.itemsize
    page = capacities.page_rows * (capacities.page_row_bytes + capacities.padding)
    return -(-2 * PAGE_TOKENS * schedule.config.head_dim * item // page)


_TAKE_HIDDEN = frozenset(
    {
        Opcode.QKV_PROJ,
        Opcode.ROUTER_GEMM,
        Opcode.FFN_UPGATE_ACT,
        Opcode.MOE_UPGATE_ACT,
        Opcode.MOE_UPGATE_ACT_DRAIN,
        Opcode.LM_HEAD,
    }
)

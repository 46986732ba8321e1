"""What every warp of the decode kernel does when, in one step: a file for Perfetto, and where the time goes.

    python -m north_jax.bench trace --out trace.json

Needs a build with -DNORTH_JAX_TRACE=ON, whose kernel is a little slower. The file is in the trace-event format: a
process an SM, a thread a warp, a slice a task, with its waits inside.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from north_jax.config import Config
from north_jax.geometries import NORTH
from north_jax.megakernel.abi import Field, Opcode
from north_jax.random_weights.popularity import ROUTINGS

TASK, BARRIER, COUNTER, END, GLOBAL = 1, 2, 3, 4, 5  # csrc/megakernel/pipeline/trace.h
EVENT = np.dtype([("clock", "<u4"), ("kind", "<i4"), ("task", "<i4"), ("place", "<i4")])
_EVENTS = 8192  # of a warp


class Slice(NamedTuple):
    """A task of a warp, or a wait in it; times in ns."""

    sm: int
    warp: int
    name: str
    task: int
    begin: float
    end: float


def nanoseconds(events: np.ndarray) -> np.ndarray:
    """[sms, warps, events] float64: the time of each event on the clock that all SMs share.

    An SM's clock changes its pace; it is read beside the shared one throughout the step, and between two such moments
    time is taken to run evenly.

    Args:
      events: [sms, warps, events] EVENT.
    """
    times = np.zeros(events.shape)
    for sm in range(events.shape[0]):
        fixed = events[sm][events[sm]["kind"] == GLOBAL]
        shared = fixed["place"].astype(np.uint32).astype(np.float64)
        times[sm] = np.interp(events[sm]["clock"].astype(np.float64), fixed["clock"].astype(np.float64), shared)
    return times


def slices(events: np.ndarray, tasks: np.ndarray, barriers: list[str], counters: tuple[str, ...]) -> Iterator[Slice]:
    """Tasks and waits of every warp, in order of their ends.

    Args:
      events: [sms, warps, events] EVENT.
      tasks: [n, DESCRIPTOR_FIELDS], of the schedule.
      barriers: names, by place.
      counters: names, by number.
    """
    times = nanoseconds(events)
    for sm, warp in np.ndindex(events.shape[:2]):
        task, wait = (-1, 0.0), ("", 0.0)
        for event, time in zip(events[sm, warp], times[sm, warp], strict=True):
            match int(event["kind"]):
                case 0:
                    break
                case k if k == TASK:
                    if task[0] >= 0:
                        name = Opcode(int(tasks[task[0], Field.OPCODE])).name
                        yield Slice(sm, warp, name, task[0], task[1], time)
                    task = (int(event["task"]), time)
                case k if k == BARRIER:
                    wait = (f"waits: {barriers[event['place']]}", time)
                case k if k == COUNTER:
                    wait = (f"waits: {counters[event['place']]}", time)
                case k if k == END:
                    yield Slice(sm, warp, wait[0], int(event["task"]), wait[1], time)


def perfetto(found: list[Slice], roles: list[str], tasks: np.ndarray) -> dict[str, Any]:
    """The slices in the trace-event format; times in µs from the first one on."""
    start = min(each.begin for each in found)
    rows: list[dict[str, Any]] = []
    for sm in sorted({each.sm for each in found}):
        rows.append({"ph": "M", "pid": sm, "name": "process_name", "args": {"name": f"SM {sm}"}})
        for warp, role in enumerate(roles):
            rows.append({"ph": "M", "pid": sm, "tid": warp, "name": "thread_name", "args": {"name": f"{warp} {role}"}})
    for each in found:
        times = {"ts": round((each.begin - start) / 1e3, 3), "dur": round((each.end - each.begin) / 1e3, 3)}
        layer = int(tasks[each.task, Field.LAYER])
        rows.append({"ph": "X", "pid": each.sm, "tid": each.warp, "name": each.name, **times, "args": {"layer": layer}})
    return {"traceEvents": rows, "displayTimeUnit": "ns"}


def summary(found: list[Slice], roles: list[str], tasks: np.ndarray) -> str:
    """Mean µs a task spends in each role's first warp, and how much of it in waits, as Markdown."""
    seen: dict[tuple[str, str], list[list[float]]] = defaultdict(lambda: [[], []])
    first = {role: roles.index(role) for role in roles}
    for each in found:
        role = roles[each.warp]
        if each.warp != first[role]:
            continue
        name = Opcode(int(tasks[each.task, Field.OPCODE])).name
        seen[role, name][each.name.startswith("waits")].append((each.end - each.begin) / 1e3)
    lines = ["| role | task | times | µs | of it waiting |", "| --- | --- | ---: | ---: | ---: |"]
    for (role, name), (lasting, waiting) in sorted(seen.items()):
        count = max(len(lasting), 1)
        lines.append(f"| {role} | {name} | {len(lasting)} | {sum(lasting) / count:.2f} | {sum(waiting) / count:.2f} |")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, default=NORTH, help="config.json (default: North Mini Code)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for Perfetto")
    parser.add_argument("--batch", type=int, default=1, help="rows (default: %(default)s)")
    parser.add_argument("--context", type=int, default=8192, help="positions held (default: %(default)s)")
    parser.add_argument("--routing", choices=ROUTINGS, default=ROUTINGS[0], help="(default: %(default)s)")
    parser.add_argument("--step", type=int, default=30, help="of a quantum of 64 (default: %(default)s)")
    parser.add_argument("--layers", type=int, nargs=2, default=(20, 23), help="first, and one past the last")
    parser.add_argument("--sms", type=int, nargs="+", default=[0, 32, 64, 96, 127], help="that the file shows")


def run(options: argparse.Namespace) -> None:
    from ffi import _native

    if not hasattr(_native, "trace_begin"):
        raise SystemExit("this build of ffi._native records no traces: build it with -DNORTH_JAX_TRACE=ON")
    from .decode import Bench, Cell, Run  # starts JAX

    config = Config.from_json(options.config)
    cell = Cell(options.routing, options.batch, options.context)
    bench = Bench(config, backend="megakernel", batches=[cell.batch], contexts=[cell.context], tokens=192)
    decoder, schedule = bench.megakernel(cell)
    work = Run(cell, decoder, bench.tables(cell), config.vocab_size, 64)
    bench.decode(work)
    _native.trace_begin(options.step, _EVENTS)
    bench.decode(work)
    raw = _native.trace_end(schedule.sms, _EVENTS)
    roles = _native.trace_warps()
    events = np.frombuffer(raw, EVENT).reshape(schedule.sms, len(roles), _EVENTS)
    layer = schedule.tasks[:, Field.LAYER]
    begin, end = options.layers
    found = [
        each
        for each in slices(events, schedule.tasks, _native.trace_barriers(), schedule.counter_names)
        if begin <= layer[each.task] < end
    ]
    print(f"{work.seconds[-1] * 1e3:.3f} ms a step while tracing; layers {begin} to {end - 1}, all SMs")
    print(summary(found, roles, schedule.tasks))
    shown = [each for each in found if each.sm in options.sms]
    options.out.write_text(json.dumps(perfetto(shown, roles, schedule.tasks)))

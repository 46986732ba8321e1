"""From what warps record to a picture."""

import json

import numpy as np
import pytest

from north_jax.bench.trace import BARRIER, COUNTER, END, EVENT, GLOBAL, TASK, nanoseconds, perfetto, slices, summary
from north_jax.megakernel.abi import DESCRIPTOR_FIELDS, Field, Opcode

ROLES = ["consumer", "controller"]
BARRIERS = ["page_full[0]", "page_full[1]"]
COUNTERS = ("layer 0 queries", "layer 0 outputs")


def recorded() -> np.ndarray:
    """One SM, two warps: its clock runs at 2 and then at 1 GHz, and wraps around nowhere."""
    events = np.zeros((1, 2, 8), EVENT)
    events[0, 0, :6] = [
        (1000, TASK, 0, 0),
        (1200, BARRIER, 0, 1),
        (1600, END, 0, 0),
        (2000, TASK, 1, 0),
        (2100, COUNTER, 1, 1),
        (2400, END, 1, 0),
    ]
    events[0, 0, 6] = (2500, TASK, -1, 0)
    # Of the shared clock, the low half: a number as C++ would store it.
    events[0, 1, :3] = [(1000, GLOBAL, 0, 5000), (2000, GLOBAL, 0, 5500), (3000, GLOBAL, 0, 6500)]
    return events


@pytest.fixture
def tasks() -> np.ndarray:
    tasks = np.zeros((2, DESCRIPTOR_FIELDS), np.int32)
    tasks[:, Field.OPCODE] = Opcode.QKV_PROJ, Opcode.ADD_RMSNORM
    tasks[:, Field.LAYER] = 0, 1
    return tasks


def test_a_changing_clock_is_followed():
    assert nanoseconds(recorded())[0, 0, :7].tolist() == [5000, 5100, 5300, 5500, 5600, 5900, 6000]


def test_tasks_and_waits_are_found(tasks):
    found = list(slices(recorded(), tasks, BARRIERS, COUNTERS))
    assert [(each.name, each.task, each.begin, each.end) for each in found] == [
        ("waits: page_full[1]", 0, 5100, 5300),
        ("QKV_PROJ", 0, 5000, 5500),
        ("waits: layer 0 outputs", 1, 5600, 5900),
        ("ADD_RMSNORM", 1, 5500, 6000),
    ]
    assert {(each.sm, each.warp) for each in found} == {(0, 0)}


def test_the_file_is_in_the_trace_event_format(tasks):
    found = list(slices(recorded(), tasks, BARRIERS, COUNTERS))
    rows = json.loads(json.dumps(perfetto(found, ROLES, tasks)))["traceEvents"]
    names = {(row.get("tid"), row["args"]["name"]) for row in rows if row["ph"] == "M"}
    assert names == {(None, "SM 0"), (0, "0 consumer"), (1, "1 controller")}
    qkv = next(row for row in rows if row["name"] == "QKV_PROJ")
    assert (qkv["ts"], qkv["dur"], qkv["pid"], qkv["tid"], qkv["args"]) == (0, 0.5, 0, 0, {"layer": 0})


def test_the_summary_tells_work_from_waiting(tasks):
    found = list(slices(recorded(), tasks, BARRIERS, COUNTERS))
    assert "| consumer | QKV_PROJ | 1 | 0.50 | 0.20 |" in summary(found, ROLES, tasks)
    assert "| consumer | ADD_RMSNORM | 1 | 0.50 | 0.30 |" in summary(found, ROLES, tasks)

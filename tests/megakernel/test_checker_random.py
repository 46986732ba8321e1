"""Random changes of schedules: the checker refuses them, or they are harmless and every interleaving runs.

What a step does in an interleaving is told by `support.interleaving`, which knows nothing of the checker.
"""

from __future__ import annotations

import functools
import random
import secrets

import numpy as np
import pytest
from support import tiny_config
from support.editing import Edit, Task
from support.interleaving import Step, Violation
from support.mutations_of_order import MUTATIONS

from north_jax.megakernel.abi import OPERATIONS, Field, Opcode
from north_jax.megakernel.build import build
from north_jax.megakernel.checker import Instance, check, instances
from north_jax.megakernel.orders import ORDERS, TUNED
from north_jax.megakernel.schedule import Schedule

F = Field
BASES = {
    "streamed": {"order": ORDERS["streamed-2"], "batch": 3, "sms": 4, "planes": 2},
    "down first": {"order": ORDERS["down-first-1"], "batch": 2, "sms": 3, "planes": 2},
    "tuned": {"order": TUNED, "batch": 2, "sms": 3, "planes": 1, "splits": 2},
}
# Fields that a schedule may change in without harm. A wait may go, or be for another counter, where the lane has waited
# for enough already; slices likewise; rounds may end behind the last item; an empty range begins anywhere, for any row.
HARMLESS = {F.WAIT, F.WAIT_COUNT, F.WAIT_NEED, F.SLICE_WAIT, F.SLICE_NEED, F.ROUND_END}
HARMLESS_IF_EMPTY = {F.ROW_BEGIN, F.BATCH_BEGIN, F.BATCH_COUNT}


@functools.cache
def base(name: str) -> Schedule:
    return build(tiny_config(hidden_size=64, num_hidden_layers=3), **BASES[name])


@functools.cache
def steps(name: str) -> tuple[Instance, ...]:
    """Instances of a base that are short enough to go through item by item."""
    schedule, seed = base(name), secrets.randbits(32)
    short = [instance for instance in instances(schedule, seed) if instance.positions.max() < 4000]
    print(f"instances of seed {seed}")
    return tuple(short)


def run(name: str, schedule: Schedule, rng: random.Random, times: int) -> None:
    """Goes through steps in random interleavings; raises Violation."""
    for _ in range(times):
        Step(schedule, rng.choice(steps(name))).run(rng.getrandbits(32))


def any_task(edit: Edit, rng: random.Random) -> Task:
    return rng.choice([task for tasks in edit.lists for task in tasks])


def other_value(edit: Edit, task: Task, field: Field, rng: random.Random) -> int:
    """A value that the field does not have: a neighbour, another task's, or any."""
    choices = [
        task[field] + rng.choice([-1, 1]),
        task[field] + rng.choice([-16, -8, -2, 2, 8, 16]),
        any_task(edit, rng)[field],
        rng.choice([0, 1, 2, 3]),
        rng.choice([-(2**31), 2**31 - 1, rng.randrange(-(2**31), 2**31)]),
    ]
    return rng.choice([value for value in choices if value != task[field]] or [task[field] + 1])


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("count", [30, pytest.param(1500, marks=pytest.mark.slow)])
def test_a_changed_field_is_refused_or_harmless(name, count):
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng, harmless = random.Random(seed), 0
    for _ in range(count):
        edit = Edit(base(name))
        task = any_task(edit, rng)
        read = OPERATIONS[Opcode(task[F.OPCODE])].fields | {F.OPCODE, F.TASK}
        field = rng.choice(sorted(read))
        edit.renumber = field is not F.TASK
        before = task[field]
        task[field] = other_value(edit, task, field, rng)
        schedule = edit.schedule()
        if check(schedule):
            continue
        harmless += 1
        words = f"{edit.name(task)} {field.name} {before} -> {task[field]}"
        assert field in HARMLESS or (field in HARMLESS_IF_EMPTY and task[F.ROW_COUNT] == 0), words
        run(name, schedule, rng, 2)
    print(f"{harmless} of {count} were harmless")


def drop_a_wait(edit: Edit, rng: random.Random) -> None:
    fields = rng.choice([(F.WAIT, F.WAIT_NEED, F.WAIT_COUNT), (F.SLICE_WAIT, F.SLICE_NEED)])
    waiting = [task for tasks in edit.lists for task in tasks if task[fields[1]]]
    task = rng.choice(waiting)
    for field in fields:
        task[field] = 0


def wait_for_another(edit: Edit, rng: random.Random) -> None:
    task = rng.choice([task for tasks in edit.lists for task in tasks if task[F.WAIT_COUNT]])
    needs = edit.needs.tolist()
    near = range(max(0, task[F.WAIT] - 12), min(len(needs), task[F.WAIT] + 3))
    task[F.WAIT] = rng.choice(near)
    task[F.WAIT_NEED] = needs[task[F.WAIT]]


def swap_arrivals(edit: Edit, rng: random.Random) -> None:
    items = {Opcode.ATTN_DECODE, Opcode.ATTN_DRAIN, Opcode.MOE_UPGATE_ACT, Opcode.MOE_UPGATE_ACT_DRAIN}
    single = [task for tasks in edit.lists for task in tasks if task[F.ARRIVE_COUNT] and task[F.OPCODE] not in items]
    first = rng.choice(single)
    second = rng.choice([task for task in single if abs(task[F.LAYER] - first[F.LAYER]) < 2])
    first[F.ARRIVE], second[F.ARRIVE] = second[F.ARRIVE], first[F.ARRIVE]


def move_within_a_list(edit: Edit, rng: random.Random) -> None:
    tasks = rng.choice(edit.lists)
    place = rng.randrange(len(tasks))
    tasks.insert(max(0, place + rng.choice([-3, -2, -1, 1, 2, 3])), tasks.pop(place))


def move_to_another_sm(edit: Edit, rng: random.Random) -> None:
    task = any_task(edit, rng)
    if task[F.OPCODE] in (Opcode.EMBED, Opcode.ADD_RMSNORM):
        return
    place = edit.place(task)[1]
    edit.remove(task)
    tasks = rng.choice(edit.lists)
    tasks.insert(min(len(tasks), max(0, place + rng.randrange(-2, 3))), task)


CHANGES = [drop_a_wait, wait_for_another, swap_arrivals, move_within_a_list, move_to_another_sm]


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_what_passes_runs_in_every_interleaving(name, count):
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng, passed = random.Random(seed), 0
    for _ in range(count):
        edit = Edit(base(name))
        changes = [rng.choice(CHANGES) for _ in range(rng.choice([1, 1, 2]))]
        for change in changes:
            change(edit, rng)
        schedule = edit.schedule()
        if check(schedule):
            continue
        passed += 1
        try:
            run(name, schedule, rng, 3)
        except Violation as violation:
            pytest.fail(f"{[change.__name__ for change in changes]} pass the check, but {violation}")
    print(f"{passed} of {count} pass and run")


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_what_is_built_runs_in_every_interleaving(order):
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for sms in (1, 3):
        planes = 1 if ORDERS[order].routed_by_tables else 2
        schedule = build(tiny_config(num_hidden_layers=4), batch=2, sms=sms, order=ORDERS[order], planes=planes)
        assert check(schedule) == []
        short = [instance for instance in instances(schedule, seed) if instance.positions.max() < 2000]
        for instance in rng.choice(np.array(short, object), 2):
            Step(schedule, instance).run(int(rng.integers(2**32)))


def test_interleavings_show_what_the_checker_finds():
    """So that they are a witness: planted races and deadlocks happen."""
    rng, runs, shown = random.Random(0), 10, {}
    kinds = [m for m in MUTATIONS if m.rule in ("deadlock", "read too early") and m.base == "streamed"][::2]
    schedule = build(tiny_config(hidden_size=64), batch=3, sms=4)
    choices = [instance for instance in instances(schedule, 0) if instance.positions.max() < 2000]
    for mutation in kinds:
        edit = Edit(schedule)
        mutation.plant(edit)
        shown[mutation.name] = any(breaks(edit.schedule(), rng.choice(choices), rng) for _ in range(runs))
    assert sum(shown.values()) > 0.7 * len(shown), shown


def breaks(schedule: Schedule, instance: Instance, rng: random.Random) -> bool:
    try:
        Step(schedule, instance).run(rng.getrandbits(32))
    except Violation:
        return True
    return False

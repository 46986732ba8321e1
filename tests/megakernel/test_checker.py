"""The checker: every schedule that is built passes, and every planted fault is found and named."""

from __future__ import annotations

import functools
import itertools
import secrets
import time

import numpy as np
import pytest
from support import tiny_config
from support.editing import Edit, Mutation, Task
from support.mutations_of_form import MUTATIONS as OF_FORM
from support.mutations_of_order import MUTATIONS as OF_ORDER
from support.mutations_of_order import unwaited

from north_jax.config import Config
from north_jax.geometries import NORTH
from north_jax.megakernel.abi import Opcode
from north_jax.megakernel.build import BATCHES, build, most_sms
from north_jax.megakernel.checker import ScheduleError, check, check_or_raise, instances
from north_jax.megakernel.orders import ORDERS, TUNED
from north_jax.megakernel.schedule import Schedule

REAL = NORTH
TILES = most_sms(tiny_config())
MUTATIONS = {mutation.name: mutation for mutation in (*OF_FORM, *OF_ORDER)}
SIZES = [(1, 1), (2, 2), (5, 1)]  # planes, splits; the tiny model has 5 layers


def sizes_of(order: str, sms: int) -> list[tuple[int, int]]:
    """The sizes that an order may have: where SMs choose experts for themselves, some overwrite what others read."""
    if ORDERS[order].routed_by_tables:
        return SIZES
    return [(planes, splits) for planes, splits in SIZES if planes == 5 or (planes == 2 and sms <= TILES)]


@functools.cache
def base(name: str) -> Schedule:
    """The schedules that faults are planted in."""
    config = tiny_config(hidden_size=64)
    if name == "tuned":
        return build(config, batch=2, sms=3, order=TUNED, planes=2, splits=2)
    if name == "ahead":  # attention straight after QKV: behind the router, every SM has had to wait for all queries
        return build(config, batch=3, sms=4, order=ORDERS["streamed-0, router 1st"])
    if name == "behind":
        return build(tiny_config(), batch=2, sms=24, planes=5)
    return build(config, batch=3, sms=4)


@pytest.mark.parametrize("name", ["streamed", "ahead", "tuned", "behind"])
def test_what_faults_are_planted_in_passes(name):
    assert check(base(name)) == []


def planted(mutation: Mutation) -> tuple[Schedule, list[str]]:
    """A schedule with a fault, and what the checker must say of it."""
    edit = Edit(base(mutation.base))
    words = mutation.plant(edit)
    return edit.schedule(), [edit.name(word) if isinstance(word, Task) else word for word in words]


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_faults_are_found_and_named(name):
    mutation = MUTATIONS[name]
    schedule, words = planted(mutation)
    faults = check(schedule)
    of_rule = [fault for fault in faults if fault.rule == mutation.rule]
    assert any(all(word in fault.text for word in words) for fault in of_rule), (words, list(map(str, faults)))


def test_faults_say_which_task_and_counter():
    schedule, _ = planted(MUTATIONS["combination that waits for another row"])
    with pytest.raises(ScheduleError) as error:
        check_or_raise(schedule)
    (fault, *_) = error.value.faults
    assert schedule.describe(fault.task) in fault.text
    assert schedule.counter_names[fault.counter] in fault.text
    assert str(fault) in str(error.value)


def test_a_circle_of_waits_is_told_task_by_task():
    schedule, _ = planted(MUTATIONS["norm before what it waits for"])
    (fault,) = check(schedule)
    circle = [part for part in fault.text.split("; ") if "task " in part]
    assert len(circle) >= 2
    assert fault.text.endswith("and so on")


def test_many_faults_of_a_rule_are_counted():
    edit = Edit(base("streamed"))
    for tasks in edit.lists:
        for task in tasks:
            task.set(batch_count=0)
    faults = [str(fault) for fault in check(edit.schedule()) if fault.rule == "batch"]
    assert len(faults) < 12
    assert "more of these" in faults[-1]


@pytest.mark.parametrize("order", ORDERS)
def test_schedules_of_every_order_pass(order):
    """A diagonal through what test_every_schedule_passes goes through in full."""
    for turn, (batch, sms) in enumerate(zip((1, 3, 8, 16, 32), (3, 128, 4, 132, 1), strict=True)):
        sizes = sizes_of(order, sms)
        planes, splits = sizes[turn % len(sizes)]
        schedule = build(tiny_config(), batch=batch, sms=sms, order=ORDERS[order], planes=planes, splits=splits)
        assert check(schedule) == [], (batch, sms, planes, splits)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sms", [1, 3, 4, 128, 132])
def test_every_schedule_passes(order, sms):
    for batch, (planes, splits) in itertools.product(BATCHES, sizes_of(order, sms)):
        schedule = build(tiny_config(), batch=batch, sms=sms, order=ORDERS[order], planes=planes, splits=splits)
        assert check(schedule) == [], (batch, planes, splits)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 8},
        {"num_key_value_heads": 1, "head_dim": 34},
        {"layer_types": ["full_attention"] * 5},
        {"mlp_layer_types": ["sparse"] * 5},
        {"mlp_layer_types": ["dense"] * 5},
        {"num_hidden_layers": 1},
        {"num_experts": 3, "num_experts_per_tok": 3},
        {"vocab_size": 5000},
    ],
    ids=str,
)
def test_other_models_pass(changes):
    for order in (ORDERS["streamed-1"], TUNED):
        assert check(build(tiny_config(**changes), batch=3, sms=2, order=order)) == []


@pytest.mark.parametrize("order", ["streamed-2", "down-first-1", "tuned"])
def test_instances_run_every_item_once(order):
    seed = secrets.randbits(32)
    schedule = build(tiny_config(num_hidden_layers=2), batch=4, sms=3, order=ORDERS[order], planes=2)
    for instance in instances(schedule, seed):
        assert check(schedule, instance) == [], (instance.name, seed)
        assert instance.live.any()
        assert (np.sort(instance.experts, axis=2)[:, :, 1:] > np.sort(instance.experts, axis=2)[:, :, :-1]).all()


@pytest.mark.parametrize("batch", [1, 8])
def test_the_real_model_passes_in_time(batch):
    schedule = build(Config.from_json(REAL), batch=batch, sms=128)
    begin = time.process_time()
    assert check(schedule) == []
    seconds = time.process_time() - begin
    print(f"{len(schedule.tasks)} tasks of batch {batch} checked in {seconds:.1f} s")
    assert seconds < 15


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch", [1, 2, 8, 32])
def test_every_order_of_the_real_model_passes(order, batch):
    config = Config.from_json(REAL)
    for sms in (128, 132):
        assert check(build(config, batch=batch, sms=sms, order=ORDERS[order])) == [], sms


def test_slices_that_do_not_fit_are_refused():
    schedule = build(tiny_config(prefix_dense_intermediate_size=1 << 17), batch=8, sms=2)
    (fault,) = check(schedule)
    assert fault.rule == "shared memory"
    assert "staging 1048832" in fault.text
    assert "0 pages of 33024 bytes fit, expected 4 or more" in fault.text


def test_a_step_without_work_is_refused():
    edit = Edit(base("streamed"))
    end = edit.one(Opcode.END_STEP)
    unwaited(end)
    edit.lists = [[end], [], [], []]
    faults = check(edit.schedule())
    assert any("row 0's token is drawn 0 times" in fault.text for fault in faults)

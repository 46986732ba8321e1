"""north_jax.decode and the engine behind it: buffers in place, errors that name their cause, the token ring."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import re
import threading
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_config, tiny_params
from support.quantum import Start, start

import ffi
from north_jax.adjust import mask_words
from north_jax.decoding import Finish
from north_jax.megakernel import abi
from north_jax.megakernel.batch import pack_rows, tables_of
from north_jax.megakernel.binding import add_schedule, make_engine
from north_jax.megakernel.build import build
from north_jax.megakernel.call import decode_call
from north_jax.megakernel.schedule import Schedule

PLATFORM = {"cpu": "cpu", "gpu": "cuda"}.get(jax.default_backend(), "")
pytestmark = pytest.mark.skipif(not ffi.available(PLATFORM), reason=str(ffi.build_info()))

CONFIG = tiny_config(num_hidden_layers=2)
BATCH = 4
SMS = 3
ROOM = 64
LONG = 3000  # steps: seconds
SCHEDULE = build(CONFIG, batch=BATCH, sms=SMS, dtype="float32")


class Operands(NamedTuple):
    """Of a call, in order."""

    rows: jax.Array
    workspace: jax.Array
    counts: jax.Array
    full_table: np.ndarray
    sliding_table: np.ndarray
    biases: np.ndarray
    masks: np.ndarray
    cache: tuple[jax.Array, ...]


@pytest.fixture(scope="module")
def params():
    return tiny_params(CONFIG)


@pytest.fixture(scope="module")
def batch():
    """Three live rows and an idle one."""
    return start(CONFIG, [5, 130, None, 63], room=ROOM)


@pytest.fixture
def engine(params):
    return make_engine(CONFIG, params)


def operands(batch: Start, *, live: int = 3) -> Operands:
    rows = batch.rows[:live]
    return Operands(
        jnp.array(pack_rows(rows, BATCH)),
        jnp.zeros(SCHEDULE.workspace.bytes, jnp.uint8),
        jnp.zeros((BATCH, CONFIG.vocab_size), jnp.int32),
        *tables_of(rows, batch.tables, BATCH),
        np.zeros((BATCH, abi.MAX_BIASES, 2), np.int32),
        np.zeros((BATCH, mask_words(CONFIG.vocab_size)), np.uint32),
        batch.cache(),
    )


def drain(engine, quantum):
    """The entries of a quantum up to its end."""
    entries, over = [], False
    while not over:
        over = engine.finished() >= quantum
        entries += engine.take_entries(quantum, 1.0)
    return entries


def in_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_donated_buffers_keep_their_place_and_are_never_copied(engine, batch):
    schedule = add_schedule(engine, SCHEDULE)
    state = operands(batch)
    step = decode_call.lower(*state, engine=engine.id).compile()

    def addresses(rows, workspace, counts, *cache):
        return [x.unsafe_buffer_pointer() for x in (rows, workspace, counts, *cache)]

    rows, workspace, counts, cache = state.rows, state.workspace, state.counts, state.cache
    before = addresses(rows, workspace, counts, *cache)
    for _ in range(3):
        engine.queue(schedule, 1)
        rows, workspace, counts, cache = step(rows, workspace, counts, *state[3:7], cache)
        assert addresses(rows, workspace, counts, *cache) == before
    hlo = step.as_text()
    assert hlo.count('custom_call_target="north_jax.decode"') == 1
    shapes = {f"s32[{BATCH},{abi.ROW_FIELDS}]", f"u8[{workspace.size}]", f"s32[{BATCH},{CONFIG.vocab_size}]"}
    shapes |= {f"f32[{','.join(map(str, pages.shape))}]" for pages in cache}
    for shape in shapes:
        assert shape in hlo
        assert not re.search(rf"= {re.escape(shape)}\S* copy(-start)?\(", hlo), hlo


def test_rows_and_entries_agree(engine, batch):
    quantum = engine.queue(add_schedule(engine, SCHEDULE), 5)
    state = operands(batch)
    rows, *_ = decode_call(*state, engine=engine.id)
    entries = drain(engine, quantum)
    assert [entry[:2] for entry in entries] == [(quantum, step) for step in range(5) for _ in range(3)]
    assert all(finish == Finish.NONE and logprobs is None for *_, finish, logprobs in entries)
    last = {slot: token for _, step, slot, token, *_ in entries if step == 4}
    rows = np.asarray(rows)
    for values, row in zip(rows, batch.rows, strict=False):
        assert values[abi.Row.TOKEN] == last[row.slot]
        assert values[abi.Row.POSITION] == row.position + 5
        assert values[abi.Row.REMAINING] == row.remaining - 5
        assert values[abi.Row.FINISH] == Finish.NONE
    np.testing.assert_array_equal(rows[3], pack_rows([], BATCH)[3])  # an idle row is left alone


WRONG = {
    "rows": lambda x: x._replace(rows=x.rows[:, :16]),
    "workspace": lambda x: x._replace(workspace=x.workspace[:-1]),
    "counts": lambda x: x._replace(counts=x.counts[:, 1:]),
    "biases": lambda x: x._replace(biases=x.biases[:, 1:]),
    "masks": lambda x: x._replace(masks=x.masks.astype(np.int32)),
    "full_table": lambda x: x._replace(full_table=x.full_table[:2]),
    "sliding_table": lambda x: x._replace(sliding_table=x.sliding_table.astype(np.float32)),
    "pages of layer 0": lambda x: x._replace(cache=(x.cache[0].astype(jnp.bfloat16), *x.cache[1:])),
    "pages of layer 1": lambda x: x._replace(cache=(*x.cache[:1], x.cache[1][..., :4])),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_operand_is_named_and_takes_its_quantum_with_it(engine, batch, name):
    schedule = add_schedule(engine, SCHEDULE)
    refused, quantum = engine.queue(schedule, 7), engine.queue(schedule, 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"north_jax.decode: {name} is .*, expected "):
        jax.block_until_ready(decode_call(*WRONG[name](operands(batch)), engine=engine.id))
    assert name in engine.error(refused)
    jax.block_until_ready(decode_call(*operands(batch), engine=engine.id))
    assert engine.error(quantum) == ""
    assert {entry[0] for entry in drain(engine, quantum)} == {quantum}


def test_a_missing_operand_is_an_error(engine, batch):
    engine.queue(add_schedule(engine, SCHEDULE), 1)
    state = operands(batch)
    with pytest.raises(jax.errors.JaxRuntimeError, match="8 operands and 4 results, expected 9 and 5 for 2 layers"):
        jax.block_until_ready(decode_call(*state._replace(cache=state.cache[:1]), engine=engine.id))


def test_a_result_of_its_own_is_refused(engine, batch):
    engine.queue(add_schedule(engine, SCHEDULE), 1)
    *others, cache = operands(batch)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*others[:3], *cache)]
    call = jax.ffi.ffi_call("north_jax.decode", results, input_output_aliases={0: 0, 1: 1, 2: 2, 7: 3})
    with pytest.raises(jax.errors.JaxRuntimeError, match="result 4 does not share the buffer of pages of layer 1"):
        jax.block_until_ready(call(*others, *cache, engine=np.int64(engine.id)))


def test_a_call_without_a_quantum_is_an_error(engine, batch):
    schedule = add_schedule(engine, SCHEDULE)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no quantum is queued"):
        jax.block_until_ready(decode_call(*operands(batch), engine=engine.id))
    engine.queue(schedule, 1)
    engine.drop_queued()
    with pytest.raises(jax.errors.JaxRuntimeError, match="no quantum is queued"):
        jax.block_until_ready(decode_call(*operands(batch), engine=engine.id))


def test_a_call_of_an_engine_that_is_gone_is_an_error(params, batch):
    engine = make_engine(CONFIG, params)
    engine.queue(add_schedule(engine, SCHEDULE), 1)
    number = engine.id
    del engine
    gc.collect()
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"no engine has id {number}; it was destroyed"):
        jax.block_until_ready(decode_call(*operands(batch), engine=number))


class Owner:
    """Something that a weak reference can watch."""


def test_an_engine_keeps_the_owner_of_its_weights():
    native = importlib.import_module("ffi._native")
    owner = Owner()
    watched = weakref.ref(owner)
    engine = native.DecodeEngine(
        platform="cpu",
        dtype="float32",
        geometry=native.Geometry(),
        weights=[(0, 0, 0)] * len(abi.Weight),
        frequencies=[],
        owner=owner,
    )
    del owner
    gc.collect()
    assert watched() is not None
    del engine
    gc.collect()
    assert watched() is None


def test_an_engine_that_goes_ends_its_call_first(params):
    engine = make_engine(CONFIG, params)
    quantum = engine.queue(add_schedule(engine, SCHEDULE), LONG)
    state, number, done = operands(start(CONFIG, [0, 1, 2], room=LONG)), engine.id, threading.Event()

    def call():
        jax.block_until_ready(decode_call(*state, engine=number))
        done.set()

    thread = in_thread(call)
    while not engine.take_entries(quantum, 1.0):
        pass
    assert not done.is_set()
    del engine  # the call's last step ends first
    gc.collect()
    thread.join(10)
    assert done.is_set()


def test_the_ring_goes_round_and_a_slow_reader_loses_nothing(engine):
    ring = importlib.import_module("ffi._native").abi_constants()["RING_ENTRIES"]
    steps = ring // 3 + 200
    quantum = engine.queue(add_schedule(engine, SCHEDULE), steps)
    state = operands(start(CONFIG, [0, 1, 2], room=steps))
    thread = in_thread(lambda: jax.block_until_ready(decode_call(*state, engine=engine.id)))
    thread.join(0.5)  # most likely the ring is full by then
    assert thread.is_alive()
    assert engine.finished() < quantum
    entries = []
    while len(entries) < ring:
        entries += engine.take_entries(quantum, 1.0)
    entries += drain(engine, quantum)
    thread.join()
    assert [entry[:2] for entry in entries] == [(quantum, step) for step in range(steps) for _ in range(3)]
    assert [entry[4] for entry in entries[-3:]] == [Finish.LENGTH] * 3


@pytest.mark.parametrize("origin", [0, 2**32 - 1])
def test_an_arrival_that_nobody_brings_is_reported(engine, batch, origin):
    tasks = SCHEDULE.tasks.copy()
    end = np.flatnonzero(tasks[:, abi.Field.OPCODE] == abi.Opcode.END_STEP)[0]  # nobody else waits for its counter
    counter = tasks[end, abi.Field.WAIT]
    task = np.flatnonzero((tasks[:, abi.Field.ARRIVE] == counter) & (tasks[:, abi.Field.ARRIVE_COUNT] > 0))[0]
    brought = tasks[task, abi.Field.ARRIVE_COUNT]
    tasks[task, [abi.Field.ARRIVE, abi.Field.ARRIVE_COUNT]] = 0
    name, need = SCHEDULE.counter_names[counter], SCHEDULE.counter_needs[counter]
    expected = f"counter {counter} ({name}): {need - brought} of {need} arrivals"
    faulty = add_schedule(engine, dataclasses.replace(SCHEDULE, tasks=tasks))
    quantum = engine.queue(faulty, 2, timeout_s=0.5, counter_origin=origin)
    call = functools.partial(decode_call, *operands(batch), engine=engine.id)
    if PLATFORM == "cpu":
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"(?s)north_jax.decode: .*{re.escape(expected)}"):
            jax.block_until_ready(call())
    else:  # a kernel's fault comes after its call
        jax.block_until_ready(call())
    assert expected in engine.error(quantum)
    following = engine.queue(add_schedule(engine, SCHEDULE), 1)
    jax.block_until_ready(decode_call(*operands(batch), engine=engine.id))
    assert engine.error(following) == ""


def test_the_engine_refuses_what_does_not_fit(engine):
    with pytest.raises(ValueError, match="no schedule has number 0"):
        engine.queue(0, 1)
    schedule = add_schedule(engine, SCHEDULE)
    with pytest.raises(ValueError, match="a quantum of 0 steps"):
        engine.queue(schedule, 0)
    with pytest.raises(ValueError, match="no batch has a row 32"):
        engine.cancel(abi.MAX_ROWS, 1)


def with_field(task: int, field: abi.Field, change: int) -> Schedule:
    tasks = SCHEDULE.tasks.copy()
    tasks[task, field] += change
    return dataclasses.replace(SCHEDULE, tasks=tasks)


WAITER = np.flatnonzero(SCHEDULE.tasks[:, abi.Field.WAIT_COUNT])[0]
AWAITED = SCHEDULE.tasks[WAITER, abi.Field.WAIT]
REFUSED = {
    "rows": (dataclasses.replace(SCHEDULE, batch=33), "33 rows, expected 1 to 32"),
    "begin": (
        dataclasses.replace(SCHEDULE, begin=SCHEDULE.begin[:-1]),
        f"the lists of {SMS - 1} SMs do not cover {len(SCHEDULE.tasks)} tasks",
    ),
    "names": (
        dataclasses.replace(SCHEDULE, counter_names=()),
        f"0 names for {len(SCHEDULE.counter_needs)} counters",
    ),
    "opcode": (
        with_field(2, abi.Field.OPCODE, 99 - SCHEDULE.tasks[2, abi.Field.OPCODE]),
        "task 2 (opcode 99 on SM 0): OPCODE is 99, expected an operation",
    ),
    "wait": (
        with_field(WAITER, abi.Field.WAIT_NEED, 1),
        f"WAIT_NEED is {SCHEDULE.counter_needs[AWAITED] + 1}, expected all arrivals at "
        f"{SCHEDULE.counter_names[AWAITED]}, {SCHEDULE.counter_needs[AWAITED]}",
    ),
    "pool": (
        with_field(
            np.flatnonzero(SCHEDULE.tasks[:, abi.Field.OPCODE] == abi.Opcode.ATTN_DECODE)[-1], abi.Field.POOL, 9
        ),
        "expected 0 to 1: a layer's pages",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_lists_that_would_lead_a_kernel_astray_are_refused(engine, batch, name):
    """On every platform, before anything of them reaches it; what was there before goes on."""
    schedule, message = REFUSED[name]
    sound = add_schedule(engine, SCHEDULE)
    with pytest.raises(ValueError, match=re.escape(message)):
        add_schedule(engine, schedule)
    quantum = engine.queue(sound, 1)
    jax.block_until_ready(decode_call(*operands(batch), engine=engine.id))
    assert engine.error(quantum) == ""

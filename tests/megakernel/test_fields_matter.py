"""Every field that an operation reads changes what the executor computes, or is refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_config, tiny_params
from support.quantum import start

import ffi
from north_jax.adjust import mask_words
from north_jax.megakernel.abi import MAX_BIASES, OPERATIONS, Buffer, Field, Opcode
from north_jax.megakernel.batch import pack_rows, tables_of
from north_jax.megakernel.binding import add_schedule, make_engine
from north_jax.megakernel.build import build
from north_jax.megakernel.call import decode_call
from north_jax.megakernel.orders import ORDERS
from north_jax.megakernel.schedule import Schedule
from north_jax.sampling import SamplingParams

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not ffi.available("cpu"), reason="the CPU executor is what is tested"
)
BATCH, STEPS = 3, 2
SEEDS = range(6)  # interleavings that a wrong wait may show in
CHANGES = (1, -1, 2, 5)
# As many planes as layers: then LAYER matters to every buffer.
CONFIG = tiny_config(
    num_hidden_layers=3,
    layer_types=["full_attention", "sliding_attention", "full_attention"],
    mlp_layer_types=["dense", "sparse", "sparse"],
    vocab_size=1301,
)


@functools.cache
def schedules() -> tuple[Schedule, ...]:
    names = ("streamed-1", "streamed-0, router 1st, shared norm", "tuned")
    return tuple(
        build(CONFIG, batch=BATCH, sms=3, dtype="float32", order=ORDERS[name], planes=3, splits=2) for name in names
    )


@functools.cache
def model():
    params = tiny_params(CONFIG)
    return make_engine(CONFIG, params), params


@functools.cache
def batch():
    sampling = [SamplingParams(top_p=0.8, seed=3), SamplingParams(top_k=200, top_p=0.9, logprobs=3), None]
    drawn = [SamplingParams(temperature=0) if one is None else one for one in sampling]
    return start(CONFIG, [100, 63, 69], room=8, sampling=drawn)


def outcome(schedule: Schedule, seed: int) -> str | bytes:
    """What the engine refuses or the executor reports, or all that it leaves behind."""
    engine, _ = model()
    rows = jnp.array(pack_rows(batch().rows, BATCH))
    workspace = jnp.zeros(schedule.workspace.bytes, jnp.uint8)
    try:
        number = add_schedule(engine, schedule)
    except ValueError as error:
        return str(error)
    quantum = engine.queue(number, STEPS, seed=seed, timeout_s=0.2)
    counts = jnp.zeros((BATCH, CONFIG.vocab_size), jnp.int32)
    biases = np.zeros((BATCH, MAX_BIASES, 2), np.int32)
    masks = np.zeros((BATCH, mask_words(CONFIG.vocab_size)), np.uint32)
    tables = tables_of(batch().rows, batch().tables, BATCH)
    operands = (rows, workspace, counts, *tables, biases, masks, batch().cache())
    try:
        rows, workspace, _, cache = decode_call(*operands, engine=engine.id)
        jax.block_until_ready(cache)
    except (jax.errors.JaxRuntimeError, ValueError):
        assert engine.error(quantum)
        return engine.error(quantum)
    finally:
        while engine.take_entries(quantum, 0.0):
            pass
    offset, size = schedule.workspace.offsets[Buffer.LOGITS], 4 * BATCH * CONFIG.vocab_size
    logits = np.asarray(workspace)[offset : offset + size]
    return b"".join([np.asarray(rows).tobytes(), logits.tobytes(), *(np.asarray(pages).tobytes() for pages in cache)])


@functools.cache
def expected(number: int) -> str | bytes:
    return outcome(schedules()[number], 0)


def changed(number: int, opcode: Opcode, field: Field) -> Iterator[Schedule]:
    """The schedule with one field of one task changed: tasks from the first to the last, in several ways."""
    schedule = schedules()[number]
    found = np.flatnonzero(schedule.tasks[:, Field.OPCODE] == opcode)
    for task in dict.fromkeys([*found[:2], *found[len(found) // 2 :][:2], *found[-2:]]):
        for change in CHANGES:
            tasks = schedule.tasks.copy()
            tasks[task, field] += change
            yield dataclasses.replace(schedule, tasks=tasks)


@pytest.mark.parametrize("opcode", Opcode)
def test_every_field_that_is_read_matters(opcode):
    for number in range(len(schedules())):
        assert isinstance(expected(number), bytes), expected(number)
    inert = [
        field.name
        for field in sorted(OPERATIONS[opcode].fields)
        if not any(
            outcome(schedule, seed) != expected(number)
            for number in range(len(schedules()))
            for schedule in changed(number, opcode, field)
            for seed in SEEDS
        )
    ]
    assert inert == []

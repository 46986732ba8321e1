"""MegakernelDecoder: quanta, their early ends, failures, and what it refuses."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_config, tiny_params
from support.quantum import Quanta, Start, start

import ffi
import north_jax
from north_jax.decoding import Finish, TokenRecord, make_decoder
from north_jax.megakernel import abi
from north_jax.megakernel import decoder as decoder_module
from north_jax.megakernel.build import build
from north_jax.megakernel.decoder import DecodeError, MegakernelDecoder
from north_jax.sampling import SamplingBatch, SamplingParams, sample

PLATFORM = {"cpu": "cpu", "gpu": "cuda"}.get(jax.default_backend(), "")
pytestmark = pytest.mark.skipif(not ffi.available(PLATFORM), reason=str(ffi.build_info()))

CONFIG = tiny_config()
STEPS = 12
LONG = 3000
SAMPLING = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=2, seed=7),
    SamplingParams(temperature=1.5, top_k=30, top_p=0.9, min_p=0.01, seed=2**40 + 1),
]


@pytest.fixture(scope="module")
def params():
    return tiny_params(CONFIG)


@pytest.fixture(scope="module")
def batch():
    """Slots 0, 2 and 3 of four: a short one, one past the window, one about to cross a page."""
    return start(CONFIG, [7, None, 200, 61], room=200, sampling=SAMPLING)


@pytest.fixture(scope="module")
def decoder(params, batch):
    return made(params, batch)


def made(params, batch: Start, **options) -> MegakernelDecoder:
    decoder = MegakernelDecoder(CONFIG, params, slots=batch.slots, max_context=batch.max_context, **options)
    decoder.compile(batch.cache(), batch.tables)
    return decoder


@pytest.fixture(scope="module")
def long_batch():
    """With room for a quantum of seconds, which surely runs when the host says something."""
    return start(CONFIG, [7, None, 200, 61], room=LONG, sampling=SAMPLING)


@pytest.fixture(scope="module")
def long(params, long_batch):
    return made(params, long_batch)


@pytest.fixture(scope="module")
def whole(decoder, batch):
    """The undisturbed quantum that others are compared with."""
    return Quanta(decoder, batch).run(STEPS)


def changed(rows, slot, **changes):
    return [dataclasses.replace(row, **changes) if row.slot == slot else row for row in rows]


def assert_same_cache(a, b):
    for layer, (left, right) in enumerate(zip(a, b, strict=True)):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right), f"layer {layer}")


def test_it_is_a_backend(params):
    decoder = make_decoder(CONFIG, params, backend="megakernel", slots=3, max_context=100)
    assert isinstance(decoder, MegakernelDecoder)
    assert (decoder.backend, decoder.max_rows) == ("megakernel", 3)


def test_every_step_comes_with_every_row(whole):
    assert [[record.slot for record in records] for records in whole.steps] == [[0, 2, 3]] * STEPS
    assert all(record.finish is Finish.NONE for records in whole.steps for record in records)
    assert len({record.token for records in whole.steps for record in records}) > 10


def test_it_shows_what_a_step_left(decoder, params, batch):
    """The residual stream before the last layer and after it, each in its plane; LOCAL buffers of every SM."""
    Quanta(decoder, batch).run(steps=1)
    last, rows = CONFIG.num_hidden_layers - 1, len(batch.rows)
    shapes = {name: decoder.activations(name, last).shape for name in (abi.Buffer.QKV, abi.Buffer.LOCAL_RESIDUAL)}
    width = (CONFIG.num_attention_heads + 2 * CONFIG.num_key_value_heads) * CONFIG.head_dim
    sms = decoder.schedule_of(rows, 201).sms
    assert shapes == {abi.Buffer.QKV: (3, width), abi.Buffer.LOCAL_RESIDUAL: (sms, 3, CONFIG.hidden_size)}
    before, after = (decoder.activations(abi.Buffer.RESIDUAL, layer) for layer in (last, last + 1))
    added = decoder.activations(abi.Buffer.ATTENTION_OUT, last).sum(axis=0) + decoder.activations(
        abi.Buffer.MLP_OUT, last
    )
    np.testing.assert_allclose(before + added, after, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(decoder.activations(abi.Buffer.LOGITS, 0), decoder.logits())
    with pytest.raises(KeyError):
        decoder.activations(abi.Buffer.NONE, 0)


def test_it_agrees_with_jax(decoder, params, batch):
    """Logits, draws and cache of a first step."""
    quanta = Quanta(decoder, batch).run(steps=1)
    tokens, starts, active = (
        np.zeros(batch.slots, np.int32),
        np.zeros(batch.slots, np.int32),
        np.zeros(batch.slots, bool),
    )
    for row in batch.rows:
        tokens[row.slot], starts[row.slot], active[row.slot] = row.token, row.position, True
    cache, logits = jax.jit(north_jax.decode_step, static_argnums=0)(
        CONFIG, params, batch.cache(), batch.tables, tokens, starts, active
    )
    slots = [row.slot for row in batch.rows]
    expected = np.asarray(logits)[slots]
    assert np.abs(decoder.logits() - expected).max() < 1e-4 * np.abs(expected).max()
    drawn = sample(decoder.logits(), SamplingBatch.of(SAMPLING), starts[slots] + 1)
    assert [record.token for record in quanta.steps[0]] == np.asarray(drawn).tolist()
    for ours, theirs in zip(quanta.cache, cache, strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parts", [[1] * STEPS, [5, 1, 6]])
def test_quanta_add_up(decoder, batch, whole, parts):
    parted = Quanta(decoder, batch)
    rows = parted.rows
    for steps in parts:
        parted.run(steps, rows)
        rows = parted.following(rows, steps)
    assert parted.steps == whole.steps
    assert_same_cache(parted.cache, whole.cache)


@pytest.mark.parametrize("slot", [0, 2, 3])
def test_a_row_does_not_depend_on_its_neighbours(decoder, batch, whole, slot):
    alone = Quanta(decoder, batch)
    alone.run(STEPS, rows=[row for row in alone.rows if row.slot == slot])
    assert alone.of(slot) == whole.of(slot)


def test_no_rows_is_no_call(decoder, batch):
    quanta = Quanta(decoder, batch).run(STEPS, rows=[])
    assert quanta.steps == []


def test_tokens_come_while_the_call_runs_and_stop_ends_it(long, long_batch):
    finished = []

    def after_step(count):
        if count == 3:
            finished.append(long._engine.finished() - finished_before)
            long.stop()

    finished_before = long._engine.finished()
    quanta = Quanta(long, long_batch).run(LONG, after_step=after_step)
    assert finished == [0]  # the quantum had not ended
    assert 3 <= len(quanta.steps) < LONG
    assert all(record.finish is Finish.NONE for record in quanta.steps[-1])


def test_stop_and_cancel_before_a_quantum_are_forgotten(decoder, batch, whole):
    decoder.stop()
    decoder.cancel(0)
    quanta = Quanta(decoder, batch).run(STEPS)
    assert quanta.steps == whole.steps
    decoder.stop()
    decoder.cancel(2)
    assert Quanta(decoder, batch).run(STEPS).steps == whole.steps


@pytest.mark.parametrize("slot", [0, 3])
def test_a_cancelled_row_ends_and_its_neighbours_do_not_notice(long, long_batch, slot):
    quanta = Quanta(long, long_batch)

    def after_step(count):
        if count == 2:
            long.cancel(slot)
            long.cancel(1)  # an idle slot
        if quanta.of(slot)[-1].finish is Finish.CANCELLED and len(quanta.steps[-1]) == 2:
            long.stop()

    quanta.run(LONG, after_step=after_step)
    undisturbed = Quanta(long, long_batch).run(len(quanta.steps))
    for row in quanta.rows:
        if row.slot != slot:
            assert quanta.of(row.slot) == undisturbed.of(row.slot)
    *before, last = quanta.of(slot)
    assert 2 <= len(before) < len(quanta.steps) < LONG
    assert before == undisturbed.of(slot)[: len(before)]
    assert last == TokenRecord(slot, -1, Finish.CANCELLED)


def test_stop_tokens_and_length_end_rows(decoder, batch, whole):
    drawn = [record.token for record in whole.of(2)]
    stop, first = drawn[4], drawn.index(drawn[4])
    never = set(range(CONFIG.vocab_size)) - set(drawn)
    rows = changed(batch.rows, 2, stop_token_ids=frozenset({stop, *sorted(never)[:7]}))
    rows = changed(rows, 0, remaining=2)
    quanta = Quanta(decoder, batch).run(STEPS, rows=rows)
    assert quanta.of(2) == [*whole.of(2)[:first], TokenRecord(2, stop, Finish.STOP)]
    assert quanta.of(0) == [whole.of(0)[0], TokenRecord(0, whole.of(0)[1].token, Finish.LENGTH)]
    assert quanta.of(3) == whole.of(3)


def test_a_quantum_ends_with_its_last_row(decoder, batch):
    quanta = Quanta(decoder, batch)
    quanta.run(steps=100, rows=[dataclasses.replace(row, remaining=2 + i) for i, row in enumerate(quanta.rows)])
    assert [[record.slot for record in records] for records in quanta.steps] == [[0, 2, 3], [0, 2, 3], [2, 3], [3]]


def test_logits_that_are_not_finite_end_their_row_with_an_error(decoder, batch, whole):
    quanta = Quanta(decoder, batch)
    page = batch.tables.full[2, 0]
    quanta.cache = tuple(
        pages.at[page].set(jnp.nan) if kind == "full_attention" else pages
        for kind, pages in zip(CONFIG.layer_types, quanta.cache, strict=True)
    )
    quanta.run(STEPS)
    assert quanta.of(2) == [TokenRecord(2, -1, Finish.ERROR)]
    assert quanta.of(0) == whole.of(0)


class Boom(Exception):
    """A receiver's."""


def test_a_receiver_that_fails_ends_the_quantum(decoder, batch, whole):
    def after_step(count):
        raise Boom

    with pytest.raises(Boom):
        Quanta(decoder, batch).run(STEPS, after_step=after_step)
    with pytest.raises(RuntimeError, match="no quantum left activations"):
        decoder.logits()
    assert Quanta(decoder, batch).run(STEPS).steps == whole.steps


def test_a_quantum_that_fails_raises_what_was_reported(params, batch, monkeypatch):
    """Nobody arrives for the lists' last wait, which END_STEP does."""

    def build_with_a_fault(*arguments, **options):
        schedule = build(*arguments, **options)
        tasks = schedule.tasks.copy()
        (end,) = np.flatnonzero(tasks[:, abi.Field.OPCODE] == abi.Opcode.END_STEP)
        tasks[tasks[:, abi.Field.ARRIVE] == tasks[end, abi.Field.WAIT], abi.Field.ARRIVE_COUNT] = 0
        tasks[tasks[:, abi.Field.ARRIVE_COUNT] == 0, abi.Field.ARRIVE] = 0
        names.add(schedule.counter_names[tasks[end, abi.Field.WAIT]])
        return dataclasses.replace(schedule, tasks=tasks)

    names: set[str] = set()
    monkeypatch.setattr(decoder_module, "build", build_with_a_fault)
    decoder = made(params, batch, timeout_s=0.3)
    quanta = Quanta(decoder, batch)
    with pytest.raises(DecodeError) as raised:
        quanta.run(STEPS)
    (name,) = names
    assert name in str(raised.value)
    assert len(quanta.steps) <= 1  # what the step drew may be out, but none follows
    with pytest.raises(DecodeError):  # the decoder itself is as before
        Quanta(decoder, batch).run(STEPS)


def test_a_cache_of_another_shape_is_an_error_and_leaves_nothing_queued(decoder, batch, whole):
    quanta = Quanta(decoder, batch)
    quanta.cache = tuple(pages[:-1] for pages in quanta.cache)
    with pytest.raises(TypeError):
        quanta.run(STEPS)
    assert Quanta(decoder, batch).run(STEPS).steps == whole.steps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot": 4}, r"rows of slots \[4, 2, 3\]: expected different ones below 4"),
        ({"slot": 2}, r"rows of slots \[2, 2, 3\]"),
        ({"stop_token_ids": frozenset(range(9))}, "slot 0 has 9 stop tokens, the megakernel takes 8"),
        ({"position": 1000}, "slot 0 would go from 1000 to 1012 positions, max_context is 400"),
        ({"remaining": 0}, "slot 0 would go"),
    ],
)
def test_rows_that_do_not_fit_are_refused(decoder, batch, changes, message):
    with pytest.raises(ValueError, match=message):
        Quanta(decoder, batch).run(STEPS, rows=[dataclasses.replace(batch.rows[0], **changes), *batch.rows[1:]])

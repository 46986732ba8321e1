"""Decoders: quanta against single steps by hand, their early ends, and what a row's end means to its neighbours."""

from __future__ import annotations

import dataclasses
import secrets
import sys
import threading
import types
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_config, tiny_params

import north_jax
from north_jax.decoding import (
    BackendError,
    Decoder,
    DecodeRow,
    Finish,
    TokenHistory,
    TokenRecord,
    finish_of,
    make_decoder,
)
from north_jax.kv_cache import PagedRows, init_cache
from north_jax.sampling import SamplingBatch, SamplingParams, sample

CONFIG = tiny_config()  # window 70
SLOTS = 5
CHUNK = 64
STEPS = 12
CONTEXT = 300
PAGES = {"full_pages": 20, "sliding_pages": 17}
PROMPTS = {0: 59, 2: 1, 3: 250, 4: 122}  # slot → length; slot 1 is idle; pages are crossed, and the ring's end
GREEDY = SamplingParams(temperature=0)

prefill = jax.jit(north_jax.prefill, static_argnums=0, donate_argnums=2)
decode_step = jax.jit(north_jax.decode_step, static_argnums=0, donate_argnums=2)
draw = jax.jit(sample)


@pytest.fixture(scope="module")
def params():
    return tiny_params(CONFIG)


@pytest.fixture(scope="module")
def start(params):
    """Four slots after random prompts: cache on the host, tables with room for STEPS more, rows of every sampling."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    paged = PagedRows(CONFIG, rows=SLOTS, max_context=CONTEXT, max_chunk=CHUNK, **PAGES)
    cache = tuple(jnp.full_like(pages, jnp.nan) for pages in init_cache(CONFIG, **PAGES, dtype="float32"))
    prompts = {slot: rng.integers(4, CONFIG.vocab_size, length) for slot, length in PROMPTS.items()}
    for first in range(0, max(PROMPTS.values()), CHUNK):
        tokens, lengths = np.zeros((SLOTS, CHUNK), np.int32), np.zeros(SLOTS, np.int32)
        for slot, prompt in prompts.items():
            part = prompt[first : first + CHUNK]
            tokens[slot, : len(part)], lengths[slot] = part, len(part)
            if len(part):
                paged.grow(slot, first, first + len(part))
        starts = np.full(SLOTS, first, np.int32)
        cache, _ = prefill(CONFIG, params, cache, paged.snapshot(), tokens, starts, lengths)
    for slot, length in PROMPTS.items():
        paged.grow(slot, length, length + STEPS)
    samplings = [
        GREEDY,
        SamplingParams(temperature=4, seed=seed),
        SamplingParams(temperature=3, top_k=20, top_p=0.9, seed=seed + 1),
        SamplingParams(temperature=2, min_p=0.02, seed=seed << 32),
    ]
    rows = [
        DecodeRow(slot, int(rng.integers(4, CONFIG.vocab_size)), length, 1000, frozenset(), sampling)
        for (slot, length), sampling in zip(PROMPTS.items(), samplings, strict=True)
    ]
    return tuple(np.asarray(pages) for pages in cache), paged.snapshot(), rows


class Quanta:
    """A decoder and a cache of its own, and the records of every step it delivered."""

    def __init__(self, params, start):
        cache, self.tables, self.rows = start
        self.cache = jax.tree.map(jnp.array, cache)
        self.decoder: Decoder = make_decoder(CONFIG, params, backend="jax", slots=SLOTS, max_context=CONTEXT)
        self.decoder.compile(self.cache, self.tables)
        self.steps: list[list[TokenRecord]] = []

    def run(self, steps=STEPS, rows=None, after_step=lambda count: None):
        """One quantum; `after_step` is called with the number of steps delivered so far."""
        thread = threading.current_thread()

        def deliver(records):
            assert threading.current_thread() is thread
            self.steps.append(records)
            after_step(len(self.steps))

        rows = self.rows if rows is None else rows
        self.cache = self.decoder.decode(self.cache, self.tables, rows, steps, deliver)
        return self

    def of(self, slot):
        return [record for records in self.steps for record in records if record.slot == slot]


def change(rows: Sequence[DecodeRow], slot, **changes):
    return [dataclasses.replace(row, **changes) if row.slot == slot else row for row in rows]


@pytest.fixture(scope="module")
def whole(params, start):
    """The undisturbed quantum that the others are compared with."""
    return Quanta(params, start).run()


def assert_same_cache(a, b):
    for layer, (left, right) in enumerate(zip(a, b, strict=True)):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right), f"layer {layer}")


def test_a_quantum_is_its_steps_by_hand(params, start, whole):
    cache, tables, rows = start
    cache = jax.tree.map(jnp.array, cache)
    tokens, starts = np.zeros(SLOTS, np.int32), np.zeros(SLOTS, np.int32)
    active, sampling = np.zeros(SLOTS, bool), [GREEDY] * SLOTS
    for row in rows:
        tokens[row.slot], starts[row.slot], active[row.slot] = row.token, row.position, True
        sampling[row.slot] = row.sampling
    for records in whole.steps:
        cache, logits = decode_step(CONFIG, params, cache, tables, tokens.copy(), starts.copy(), active)
        drawn = np.asarray(draw(logits, SamplingBatch.of(sampling), starts + 1))
        assert records == [TokenRecord(row.slot, int(drawn[row.slot]), Finish.NONE) for row in rows]
        tokens[active] = drawn[active]
        starts += active
    assert len(whole.steps) == STEPS
    assert_same_cache(whole.cache, cache)
    assert len({record.token for records in whole.steps for record in records}) > 10  # not the same again and again


@pytest.mark.parametrize("parts", [[1] * STEPS, [5, 1, 6]])
def test_quanta_add_up(params, start, whole, parts):
    parted = Quanta(params, start)
    rows = parted.rows
    for steps in parts:
        parted.run(steps, rows)
        rows = [
            dataclasses.replace(row, token=parted.of(row.slot)[-1].token, position=row.position + steps) for row in rows
        ]
    assert parted.steps == whole.steps
    assert_same_cache(parted.cache, whole.cache)


@pytest.mark.parametrize("count", [1, 4])
def test_stop_ends_the_quantum_after_the_step(params, start, whole, count):
    """From `deliver`, and from another thread meanwhile."""
    stopped = Quanta(params, start)

    def after_step(steps):
        if steps == count:
            other = threading.Thread(target=stopped.decoder.stop)
            other.start()
            other.join()

    stopped.run(after_step=after_step)
    assert stopped.steps == whole.steps[:count]


def test_a_stop_during_the_device_call_ends_its_step(params, start, whole, monkeypatch):
    stopped = Quanta(params, start)
    step = stopped.decoder._step
    calls = []

    def called(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            stopped.decoder.stop()
        return step(*arguments)

    monkeypatch.setattr(stopped.decoder, "_step", called)
    assert stopped.run().steps == whole.steps[:3]


def test_what_came_before_a_quantum_does_not_touch_it(params, start, whole):
    """Before the first, and left behind by one that ended."""
    late = Quanta(params, start)
    late.decoder.stop()
    late.decoder.cancel(0)
    late.run(3, after_step=lambda count: (late.decoder.stop(), late.decoder.cancel(2)) if count == 3 else None)
    rows = [dataclasses.replace(row, token=late.of(row.slot)[-1].token, position=row.position + 3) for row in late.rows]
    late.run(STEPS - 3, rows)
    assert late.steps == whole.steps


def test_cancel_ends_one_row_and_leaves_the_others(params, start, whole):
    cancelled = Quanta(params, start)

    def after_step(steps):
        if steps == 5:
            cancelled.decoder.cancel(3)
            cancelled.decoder.cancel(1)  # idle
            cancelled.decoder.cancel(99)

    cancelled.run(after_step=after_step)
    assert cancelled.of(3) == [*whole.of(3)[:5], TokenRecord(3, -1, Finish.CANCELLED)]
    for slot in (0, 2, 4):
        assert cancelled.of(slot) == whole.of(slot)
    assert [len(records) for records in cancelled.steps] == [4] * 6 + [3] * 6
    assert_same_kv(cancelled, whole, {0, 2, 4})


def assert_same_kv(a, b, slots):
    """The pages of these slots hold the same bits."""
    for layer, (left, right) in enumerate(zip(a.cache, b.cache, strict=True)):
        table = a.tables.of_layer(CONFIG, layer)
        pages = [page for slot in slots for page in table[slot] if page >= 0]
        np.testing.assert_array_equal(np.asarray(left)[pages], np.asarray(right)[pages], f"layer {layer}")


def test_a_quantum_ends_when_every_row_was_cancelled(params, start):
    def after_step(steps):
        for row in cancelled.rows:
            cancelled.decoder.cancel(row.slot)

    cancelled = Quanta(params, start)
    cancelled.run(after_step=after_step)
    assert cancelled.steps[1:] == [[TokenRecord(row.slot, -1, Finish.CANCELLED) for row in cancelled.rows]]


def test_stop_tokens_and_lengths_end_rows(params, start, whole):
    ended = Quanta(params, start)
    stop = whole.of(2)[6].token
    first = [record.token for record in whole.of(2)].index(stop)  # it may have come before
    rows = change(ended.rows, 2, stop_token_ids=frozenset({stop, 10_000}))
    rows = change(rows, 3, remaining=4, stop_token_ids=frozenset({10_000}))
    rows = change(rows, 4, remaining=1)
    ended.run(rows=rows)
    assert ended.of(2) == [*whole.of(2)[:first], TokenRecord(2, stop, Finish.STOP)]
    assert ended.of(3) == [*whole.of(3)[:3], TokenRecord(3, whole.of(3)[3].token, Finish.LENGTH)]
    assert ended.of(4) == [TokenRecord(4, whole.of(4)[0].token, Finish.LENGTH)]
    assert ended.of(0) == whole.of(0)
    assert_same_kv(ended, whole, {0})
    # Each row wrote what its steps took, and nothing after its end.
    untouched = Quanta(params, start)
    for slot, written in {2: first + 1, 3: 4, 4: 1}.items():
        position = PROMPTS[slot] + written
        for layer, pages in enumerate(ended.cache):
            table = ended.tables.of_layer(CONFIG, layer)
            page, offset = table[slot, position // 64 % table.shape[1]], position % 64
            before = np.asarray(untouched.cache[layer])[page, :, :, offset]
            np.testing.assert_array_equal(np.asarray(pages)[page, :, :, offset], before)


def test_a_quantum_ends_with_its_last_row(params, start, whole):
    ended = Quanta(params, start)
    ended.run(rows=[dataclasses.replace(row, remaining=2 + row.slot % 2) for row in ended.rows])
    assert len(ended.steps) == 3
    assert all(record.finish is Finish.LENGTH for record in ended.steps[-1])


def test_no_rows_are_no_steps(params, start):
    none = Quanta(params, start)
    none.run(rows=[])
    assert none.steps == []
    assert_same_cache(none.cache, start[0])


def test_idle_slots_and_their_pages_stay(params, start, whole):
    """Only two of four filled slots decode; the others keep every bit, and the two do not notice."""
    some = Quanta(params, start)
    some.run(rows=[row for row in some.rows if row.slot in (2, 3)])
    assert some.of(2) == whole.of(2) and some.of(3) == whole.of(3)
    assert_same_kv(some, Quanta(params, start), {0, 4})


def test_logits_that_are_not_finite_end_their_row_alone(params, start, whole):
    poisoned = Quanta(params, start)
    pages = poisoned.tables.full[3][poisoned.tables.full[3] >= 0]
    poisoned.cache = (poisoned.cache[0].at[pages, 1].set(jnp.nan), *poisoned.cache[1:])
    poisoned.run()
    assert poisoned.of(3) == [TokenRecord(3, -1, Finish.ERROR)]
    for slot in (0, 2, 4):
        assert poisoned.of(slot) == whole.of(slot)


class EvenTokens:
    """A grammar that allows even tokens, and notes what it was asked."""

    def __init__(self):
        self.calls = []

    def mask(self):
        self.calls.append("mask")
        return np.full(-(-CONFIG.vocab_size // 32), 0x55555555, np.uint32)

    def accept(self, token):
        self.calls.append(token)


def test_penalties_logprobs_and_a_grammar_concern_their_rows_alone(params, start, whole):
    """One row of each; what a quantum draws does not depend on where the quanta end."""

    def rows_of(quanta):
        penal = SamplingParams(temperature=0, frequency_penalty=2, presence_penalty=2, repetition_penalty=2)
        history = TokenHistory([5, 6, 7], generated=[quanta.rows[0].token])
        rows = change(quanta.rows, 0, sampling=penal, history=history)
        rows = change(rows, 2, sampling=dataclasses.replace(rows[1].sampling, logprobs=3))
        return change(rows, 3, grammar=EvenTokens())

    runs = []
    for parts in ([STEPS], [1, 6, STEPS - 7]):
        quanta = Quanta(params, start)
        rows = rows_of(quanta)
        for steps in parts:
            quanta.run(steps, rows)
            rows = [
                dataclasses.replace(row, token=quanta.of(row.slot)[-1].token, position=row.position + steps)
                for row in rows
            ]
        said = [record.token for record in quanta.of(0)]
        assert rows[0].history.generated[1:] == said
        assert len(set(said)) >= STEPS - 2  # such penalties let hardly anything come twice
        of_grammar = [record.token for record in quanta.of(3)]
        assert all(token % 2 == 0 for token in of_grammar)
        assert rows[2].grammar.calls == [call for token in of_grammar for call in ("mask", token)]
        runs.append(quanta)
    assert runs[0].steps == runs[1].steps
    assert runs[0].of(4) == whole.of(4)
    with_logprobs, without = runs[0].of(2), whole.of(2)
    assert [record[:3] for record in with_logprobs] == [record[:3] for record in without]
    assert all(len(record.logprobs.top) == 3 and record.logprobs.logprob <= 0 for record in with_logprobs)
    assert all(record.logprobs is None for record in without)
    assert [record.token for record in runs[0].of(0)] != [record.token for record in whole.of(0)]


def test_a_row_that_penalises_needs_its_history(params, start):
    quanta = Quanta(params, start)
    with pytest.raises(ValueError, match="slot 3 has penalties and no history"):
        quanta.run(rows=change(quanta.rows, 3, sampling=SamplingParams(presence_penalty=1)))
    assert quanta.steps == []


def test_a_failing_receiver_comes_out_of_decode(params, start):
    def after_step(steps):
        raise RuntimeError("the receiver is gone")

    failing = Quanta(params, start)
    with pytest.raises(RuntimeError, match="the receiver is gone"):
        failing.run(after_step=after_step)
    assert len(failing.steps) == 1


@pytest.mark.parametrize("slots", [(0, 0), (0, SLOTS), (-1,)])
def test_rows_of_wrong_slots_are_refused(params, start, slots):
    wrong = Quanta(params, start)
    with pytest.raises(ValueError, match="different ones below 5"):
        wrong.run(rows=[dataclasses.replace(wrong.rows[0], slot=slot) for slot in slots])


def test_finish_of():
    stops = frozenset({7})
    assert finish_of(5, 2, stops) is Finish.NONE
    assert finish_of(5, 1, stops) is Finish.LENGTH
    assert finish_of(7, 2, stops) is finish_of(7, 1, stops) is Finish.STOP
    assert finish_of(-1, 1, stops) is Finish.ERROR


def test_the_megakernel_is_refused_where_it_was_not_compiled(params, monkeypatch):
    monkeypatch.setattr("ffi.available", lambda platform: False)
    with pytest.raises(BackendError, match="compiled"):
        make_decoder(CONFIG, params, backend="megakernel", slots=2, max_context=100)


def test_backends(params, monkeypatch):
    sizes = {"slots": 2, "max_context": 100}
    for backend in ("auto", "jax"):
        decoder = make_decoder(CONFIG, params, backend=backend, **sizes)
        assert (decoder.backend, decoder.max_rows) == ("jax", 2)
    with pytest.raises(BackendError, match="'torch'"):
        make_decoder(CONFIG, params, backend="torch", **sizes)
    name = "north_jax.megakernel.decoder"
    module = types.ModuleType(name)
    module.MegakernelDecoder = lambda *arguments, **keywords: (arguments, keywords)
    monkeypatch.setitem(sys.modules, name, module)
    assert make_decoder(CONFIG, params, backend="megakernel", **sizes) == ((CONFIG, params), sizes)

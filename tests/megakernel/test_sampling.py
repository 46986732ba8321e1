"""Sampling in the compiled decode against sampling.py: what is kept, ties, penalties, biases, grammars, logprobs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_config, tiny_params
from support.quantum import Quanta, start

import ffi
from north_jax.adjust import mask_words
from north_jax.decoding import Finish, TokenHistory, make_decoder
from north_jax.megakernel.decoder import MegakernelDecoder
from north_jax.sampling import SamplingBatch, SamplingParams, sample

PLATFORM = {"cpu": "cpu", "gpu": "cuda"}.get(jax.default_backend(), "")
pytestmark = pytest.mark.skipif(not ffi.available(PLATFORM), reason=str(ffi.build_info()))

draw = jax.jit(sample)
FILTERS = [  # shares that are exact in float32: with ties, rounding must not decide
    {"top_p": 0.90625},
    {"top_p": 0.25},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 700, "top_p": 0.5},
    {"top_k": 900, "top_p": 0.9375, "min_p": 0.1},
    {"min_p": 0.4},
    {},
]


def compiled(config, params, batch, **options) -> MegakernelDecoder:
    decoder = MegakernelDecoder(config, params, slots=batch.slots, max_context=batch.max_context, **options)
    decoder.compile(batch.cache(), batch.tables)
    return decoder


@pytest.mark.parametrize("ties", ["all", "many", "none"])
@pytest.mark.parametrize("sms", [1, 7])
def test_what_is_kept_is_what_jax_keeps(ties, sms):
    """Every filter, over several ranges and blocks; the tokens drawn from the logits that the decoder left."""
    config = tiny_config(num_hidden_layers=1, vocab_size=5000)
    params = tiny_params(config, seed=3)
    embed = np.array(params["embed"])
    if ties == "all":
        embed[:] = 0
    elif ties == "many":  # of each logit 250, in every block
        embed = np.tile(embed[:20], (250, 1))
    embed *= 0.2  # of many likely tokens
    params = params | {"embed": jnp.array(embed)}
    batch = start(config, [9, 30, 70, 1, 5, 64, 100, 3], room=40)
    decoder = compiled(config, params, batch, sms=sms)
    drawn = set()
    for turn in range(8):
        sampling = [SamplingParams(1 + turn / 8, seed=100 * turn + i, **kept) for i, kept in enumerate(FILTERS)]
        rows = [
            dataclasses.replace(row, sampling=one, position=row.position + turn)
            for row, one in zip(batch.rows, sampling, strict=True)
        ]
        quanta = Quanta(decoder, batch).run(1, rows)
        positions = np.array([row.position + 1 for row in rows], np.int32)
        expected = draw(decoder.logits(), SamplingBatch.of(sampling), positions)
        assert [record.token for record in quanta.steps[0]] == np.asarray(expected).tolist()
        drawn |= {record.token for record in quanta.steps[0]}
    assert len(drawn) > 20


class Residue:
    """A grammar: tokens of one residue after the other."""

    def __init__(self, vocabulary):
        self.vocabulary, self.accepted = vocabulary, []

    def mask(self):
        allowed = np.arange(32 * mask_words(self.vocabulary)) % 3 == len(self.accepted) % 3
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    def accept(self, token):
        self.accepted.append(token)


def asking(batch, vocabulary):
    """Rows of every kind, with histories and grammars of their own."""
    penal = {"presence_penalty": 0.8, "frequency_penalty": 1.2, "repetition_penalty": 1.3}
    sampling = [
        SamplingParams(0),
        SamplingParams(0, **penal),
        SamplingParams(1.5, top_p=0.9, seed=5, logprobs=4, **penal),
        SamplingParams(1, seed=6, logit_bias=((5, 3.0), (vocabulary - 1, 4.0), (9, -100.0)), logprobs=0),
        SamplingParams(0, repetition_penalty=0.7, logprobs=20, logit_bias=tuple((t, 0.01 * t) for t in range(300))),
        SamplingParams(2, top_k=50, seed=7),
        SamplingParams(1, seed=8, top_k=90, logprobs=20),
        SamplingParams(1.2, presence_penalty=-2, seed=9),
    ]
    return [
        dataclasses.replace(
            row,
            sampling=one,
            history=TokenHistory(range(row.slot, 200, 7), generated=[row.token]),
            grammar=Residue(vocabulary) if row.slot == 6 else None,
        )
        for row, one in zip(batch.rows, sampling, strict=True)
    ]


def with_logprobs(steps):
    """Records without, and the numbers of, their log-probabilities."""
    plain = [[record._replace(logprobs=None) for record in records] for records in steps]
    logprobs = [record.logprobs for records in steps for record in records]
    tokens = [one and [token for token, _ in one.top] for one in logprobs]
    values = [value for one in logprobs if one for value in (one.logprob, *(value for _, value in one.top))]
    return plain, tokens, np.array(values)


@pytest.mark.parametrize("grammar", [False, True])
def test_all_that_rows_ask_for_agrees_with_jax(grammar):
    config = tiny_config(num_hidden_layers=2, vocab_size=1300)
    params = tiny_params(config, seed=4)
    batch = start(config, [9, 30, 70, 1, 5, 64, 100, 3], room=30)
    results = []
    for decoder in (
        compiled(config, params, batch, sms=5),
        make_decoder(config, params, backend="jax", slots=batch.slots, max_context=batch.max_context),
    ):
        decoder.compile(batch.cache(), batch.tables)
        quanta = Quanta(decoder, batch)
        rows = asking(batch, config.vocab_size)
        if not grammar:
            rows = [dataclasses.replace(row, grammar=None) for row in rows]
        for steps in (7, 1, 12):
            quanta.run(steps, rows)
            rows = quanta.following(rows, steps)
        for row in rows:
            assert row.history.generated[1:] == [record.token for record in quanta.of(row.slot)]
        results.append(quanta.steps)
        if grammar:
            of_grammar = [record.token for record in quanta.of(6)]
            assert [token % 3 for token in of_grammar] == [n % 3 for n in range(20)]
            assert rows[6].grammar.accepted == of_grammar
    ours, theirs = map(with_logprobs, results)
    assert ours[:2] == theirs[:2]
    np.testing.assert_allclose(ours[2], theirs[2], rtol=1e-5, atol=1e-5)
    assert len(ours[2]) == 20 * (5 + 1 + 21 + 21)
    plain = Quanta(compiled(config, params, batch), batch).run(20)  # the first row is as if it were alone
    assert plain.of(0) == [record for records in results[0] for record in records if record.slot == 0]
    assert plain.of(1) != [record for records in results[0] for record in records if record.slot == 1]


def test_a_slot_of_another_history_is_counted_anew():
    config = tiny_config(num_hidden_layers=1)
    params = tiny_params(config, seed=5)
    batch = start(config, [9, 30], room=40)
    decoder = compiled(config, params, batch)
    penal = SamplingParams(0, repetition_penalty=1.8, frequency_penalty=1)

    def run(history):
        rows = [dataclasses.replace(row, sampling=penal, history=history()) for row in batch.rows]
        return Quanta(decoder, batch).run(10, rows).steps

    first = run(lambda: TokenHistory([3]))
    assert run(lambda: TokenHistory(range(0, 199, 2))) != first
    assert run(lambda: TokenHistory([3])) == first


def test_stop_and_cancel_reach_a_quantum_of_single_steps():
    """Between the calls as well as during one."""
    config = tiny_config(num_hidden_layers=1)
    batch = start(config, [9, 30, 5], room=40)
    decoder = compiled(config, tiny_params(config, seed=5), batch)
    rows = [
        dataclasses.replace(row, grammar=Residue(config.vocab_size) if row.slot == 1 else None) for row in batch.rows
    ]

    def after_step(count):
        if count == 2:
            decoder.cancel(0)
        if count == 5:
            decoder.stop()

    quanta = Quanta(decoder, batch).run(12, rows, after_step)
    assert len(quanta.steps) in (5, 6)
    assert quanta.of(0)[-1].finish is Finish.CANCELLED and 3 <= len(quanta.of(0)) <= 4
    assert len(quanta.of(1)) == len(quanta.of(2)) == len(quanta.steps)


def test_a_grammar_that_allows_nothing_ends_its_row_with_an_error():
    config = tiny_config(num_hidden_layers=1)
    batch = start(config, [9, 30], room=40)
    decoder = compiled(config, tiny_params(config, seed=5), batch)
    nothing = Residue(config.vocab_size)
    nothing.mask = lambda: np.zeros(mask_words(config.vocab_size), np.uint32)
    rows = [dataclasses.replace(batch.rows[0], grammar=nothing), batch.rows[1]]
    quanta = Quanta(decoder, batch).run(3, rows)
    assert quanta.of(0) == [(0, -1, Finish.ERROR, None)]
    assert len(quanta.of(1)) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"presence_penalty": 1.0}, "slot 0 has penalties and no history"),
        ({"logit_bias": ((199, 1.0),)}, "slot 0 biases token 199, the vocabulary has 199"),
    ],
)
def test_what_rows_must_not_ask_for(changes, message):
    config = tiny_config(num_hidden_layers=1)
    batch = start(config, [9], room=40)
    decoder = compiled(config, tiny_params(config), batch)
    with pytest.raises(ValueError, match=message):
        Quanta(decoder, batch).run(1, batch.rows_with(sampling=SamplingParams(**changes)))

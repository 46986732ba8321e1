"""Penalties, bias, masks and log-probabilities: against plain definitions in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from north_jax.adjust import PROMPT_SEEN, Bias, Penalties, adjust, count, mask_words
from north_jax.decoding import Draw, SlotSampler, TokenHistory
from north_jax.logprobs import top_logprobs
from north_jax.sampling import MAX_LOGPROBS, SamplingParams

VOCABULARY = 70  # not a multiple of 32
PROMPT = [3, 3, 9, 40]
GENERATED = [9, 5, 5, 5, 69]


def logits_of(rows, seed=0):
    return np.random.default_rng(seed).normal(0, 3, (rows, VOCABULARY)).astype(np.float32)


def plain(logits, params, prompt=PROMPT, generated=GENERATED):
    """The definition, token by token, in float64."""
    adjusted = np.asarray(logits, np.float64).copy()
    biases = dict(params.logit_bias)
    for token in range(len(adjusted)):
        if token in prompt or token in generated:
            r = params.repetition_penalty
            adjusted[token] = adjusted[token] / r if adjusted[token] > 0 else adjusted[token] * r
        times = generated.count(token)
        adjusted[token] -= times * params.frequency_penalty + (times > 0) * params.presence_penalty
        adjusted[token] += biases.get(token, 0)
    return adjusted


PARAMS = [
    SamplingParams(),
    SamplingParams(presence_penalty=1.5),
    SamplingParams(frequency_penalty=-0.7),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.5, presence_penalty=-2, frequency_penalty=2),
    SamplingParams(logit_bias=((0, 100.0), (5, -100.0), (69, 0.5))),
    SamplingParams(repetition_penalty=1.1, logit_bias=tuple((token, token / 10) for token in range(60))),
]


def test_penalties_and_bias_are_their_definition():
    """Rows of every kind together, with and without each other's parts."""
    logits = logits_of(len(PARAMS))
    counts = jnp.tile(count(PROMPT, GENERATED, VOCABULARY), (len(PARAMS), 1))
    adjusted = adjust(logits, penalties=Penalties.of(PARAMS, counts), bias=Bias.of(PARAMS, VOCABULARY))
    for row, params in enumerate(PARAMS):
        np.testing.assert_allclose(adjusted[row], plain(logits[row], params), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(adjusted[0], logits[0])  # neutral rows keep every bit


def test_each_parameter_matters():
    """The comparison above can fail: no two rows of it get the same treatment."""
    logits = logits_of(1)[0]
    results = {plain(logits, params).tobytes() for params in PARAMS}
    assert len(results) == len(PARAMS)


def test_counts_tell_the_prompt_from_what_was_generated():
    counts = count(PROMPT, GENERATED, VOCABULARY)
    assert counts[[3, 40]].tolist() == [PROMPT_SEEN] * 2
    assert counts[9] == PROMPT_SEEN + 1
    assert counts[[5, 69, 0]].tolist() == [3, 1, 0]


def test_a_mask_leaves_what_it_allows_and_hides_no_fault():
    logits = logits_of(3)
    logits[1, 4], logits[2, 4] = np.nan, np.inf
    words = np.zeros((3, mask_words(VOCABULARY)), np.uint32)
    for token in (0, 31, 32, 69):
        words[:, token // 32] |= np.uint32(1 << token % 32)
    masked = np.asarray(adjust(logits, mask=words))
    assert np.flatnonzero(masked[0] > -np.inf).tolist() == [0, 31, 32, 69]
    np.testing.assert_array_equal(masked[0, [0, 31, 32, 69]], logits[0, [0, 31, 32, 69]])
    assert np.isnan(masked[1, 4]) and masked[2, 4] == np.inf


def test_log_probabilities():
    logits = logits_of(2, seed=1)
    logits[0, 7] = logits[0, 50] = 20  # a tie for the first place
    chosen = np.array([50, 3], np.int32)
    top = top_logprobs(jnp.asarray(logits), jnp.asarray(chosen))
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(top.tokens, order)
    np.testing.assert_allclose(top.values, np.take_along_axis(exact, order, axis=-1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(top.chosen, exact[[0, 1], chosen], rtol=1e-5, atol=1e-6)
    assert top.tokens[0, :2].tolist() == [7, 50]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("logit_bias", ((4, 101.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((4, 1.0), (4, 2.0))),
        ("logit_bias", tuple((token, 1.0) for token in range(301))),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


class Alternating:
    """A grammar: even and odd tokens in turn."""

    def __init__(self, first=0):
        self.parity, self.accepted = first, []

    def mask(self):
        word = np.uint32(0x55555555 if self.parity == 0 else 0xAAAAAAAA)
        return np.full(mask_words(VOCABULARY), word)

    def accept(self, token):
        self.accepted.append(token)
        self.parity ^= 1


def test_a_slot_sampler_keeps_its_counts_as_the_text_grows():
    """Rows with and without penalties over some steps, one of which joins late and one of which is replaced."""
    sampler = SlotSampler(4, VOCABULARY)
    penal = SamplingParams(temperature=0, frequency_penalty=0.5, presence_penalty=0.3, repetition_penalty=1.2)
    rows = {0: Draw(0, penal, TokenHistory(PROMPT)), 2: Draw(0, SamplingParams(temperature=0))}
    for step in range(12):
        if step == 4:
            rows[3] = Draw(0, penal, TokenHistory([1, 2], generated=[8]))
        if step == 8:
            rows[0] = Draw(0, penal, TokenHistory([6]))
        logits = logits_of(4, seed=5)  # the same in each step: only what was said changes
        expected = {}
        for slot, row in rows.items():
            prompt, generated = ([], []) if row.history is None else (row.history.prompt, row.history.generated)
            expected[slot] = int(np.argmax(plain(logits[slot], row.sampling, prompt, generated)))
        drawn = sampler.draw(jnp.asarray(logits), rows)
        assert {slot: token for slot, (token, _) in drawn.items()} == expected
    assert len(set(rows[0].history.generated)) > 1  # the penalties did something
    assert len(rows[3].history.generated) == 9


def test_a_slot_sampler_asks_the_grammar_before_every_draw():
    grammar = Alternating()
    rows = {0: Draw(0, SamplingParams(temperature=2, seed=5), grammar=grammar), 1: Draw(0, SamplingParams(seed=1))}
    sampler, other = SlotSampler(2, VOCABULARY), SlotSampler(2, VOCABULARY)
    for step in range(6):
        logits = jnp.asarray(logits_of(2, seed=step))
        drawn = sampler.draw(logits, rows)
        assert drawn[0].token % 2 == step % 2
        assert grammar.accepted[step:] == [drawn[0].token]
        assert drawn[1] == other.draw(logits, {1: rows[1]})[1]  # a row without a grammar does not notice


def test_reported_log_probabilities_are_of_the_adjusted_logits():
    """Also of a token outside the alternatives; −infinity is no alternative; rows that did not ask get none."""
    sampler = SlotSampler(3, VOCABULARY)
    logits = logits_of(3, seed=7)
    params = [
        SamplingParams(temperature=5, seed=3, logprobs=2, logit_bias=((9, 4.0),)),
        SamplingParams(),
        SamplingParams(temperature=0, logprobs=20),
    ]
    only_three = Alternating()
    only_three.mask = lambda: np.array([1 << 4 | 1 << 6 | 1 << 9, 0, 0], np.uint32)
    rows = {slot: Draw(4, p, grammar=only_three if slot == 2 else None) for slot, p in enumerate(params)}
    drawn = sampler.draw(jnp.asarray(logits), rows)
    exact = plain(logits[0], params[0])
    exact -= np.log(np.exp(exact).sum())
    token, logprobs = drawn[0]
    assert logprobs.logprob == pytest.approx(exact[token], abs=1e-5)
    assert [one for one, _ in logprobs.top] == np.argsort(-exact)[:2].tolist()
    assert drawn[1].logprobs is None
    assert sorted(one for one, _ in drawn[2].logprobs.top) == [4, 6, 9]
    assert sum(np.exp(value) for _, value in drawn[2].logprobs.top) == pytest.approx(1, abs=1e-5)


def test_what_a_slot_sampler_refuses():
    sampler = SlotSampler(1, VOCABULARY)
    with pytest.raises(ValueError, match="slot 0 has penalties and no history"):
        sampler.draw(jnp.zeros((1, VOCABULARY)), {0: Draw(0, SamplingParams(presence_penalty=1))})
    with pytest.raises(ValueError, match="slot 0 biases token 70, the vocabulary has 70"):
        sampler.draw(jnp.zeros((1, VOCABULARY)), {0: Draw(0, SamplingParams(logit_bias=((70, 1.0),)))})


def test_plain_rows_pay_nothing():
    """No table of counts is made, and no logit is touched, for rows that ask nothing."""
    sampler = SlotSampler(2, VOCABULARY)
    sampler.draw(jnp.zeros((2, VOCABULARY)), {0: Draw(0, SamplingParams(), TokenHistory([1]))})
    assert sampler._counts._table is None
    logits = jnp.zeros((2, VOCABULARY))
    assert adjust(logits) is logits
    assert Bias.of([SamplingParams()] * 2, VOCABULARY) is None

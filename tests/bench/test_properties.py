"""The property checks hold for the compiled decode, and notice when they do not."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from support import tiny_config

import ffi
from north_jax.bench import properties
from north_jax.bench.draws import probabilities, surprise
from north_jax.bench.properties import DRAWS, Stage
from north_jax.random_weights.weights import random_params
from north_jax.sampling import SamplingParams

compiled = pytest.mark.skipif(not ffi.available("cpu"), reason="nothing compiled")
STEPS = 3


@pytest.fixture(scope="module")
def stage():
    config = tiny_config(num_hidden_layers=2, vocab_size=700)
    return Stage(config, random_params(config, dtype="float32"), [1, 70, 130, 64, 63, 3, 100, 69], 5 * STEPS)


CHECKS = {
    "same bits": lambda stage: properties.same_bits(stage, 3),
    "independent rows": properties.independent_rows,
    "joining and leaving": lambda stage: properties.joining_and_leaving(stage, STEPS),
    "seeded draws": properties.seeded_draws,
}


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("check", CHECKS)
def test_it_holds(stage, check):
    assert CHECKS[check](stage)["ok"]


@compiled
@pytest.mark.parametrize("check", ["same bits", "independent rows"])
def test_a_last_bit_is_noticed(stage, check, monkeypatch):
    calls = iter(range(10**6))
    original = stage.decoder.logits

    def nearly():
        logits = original()
        return np.nextafter(logits, np.inf) if next(calls) == 1 else logits

    monkeypatch.setattr(stage.decoder, "logits", nearly)
    assert not CHECKS[check](stage)["ok"]


@compiled
def test_a_small_vocabulary_has_no_special_tokens_of_the_large_one(monkeypatch):
    monkeypatch.setattr(properties, "_DRAW_VOCABULARY", 64)
    config = tiny_config(num_hidden_layers=2, vocab_size=700, eos_token_id=699)
    stage = properties._small_vocabulary(config, random_params(config, dtype="float32"))
    assert properties.honest_draws(stage, 64)["ok"]


@compiled
def test_a_row_that_forgets_is_noticed(stage, monkeypatch):
    monkeypatch.setattr(
        properties, "gone_on", lambda row, records: dataclasses.replace(row, token=records[-1].token, remaining=99)
    )
    assert not properties.joining_and_leaving(stage, STEPS)["ok"]


@compiled
def test_draws_of_another_temperature_are_noticed(monkeypatch):
    config = tiny_config(num_hidden_layers=1, vocab_size=700)
    stage = Stage(config, random_params(config, dtype="float32"), [0] * 8, 1)
    monkeypatch.setattr(properties, "DRAWS", {"all tokens": SamplingParams(temperature=1)})
    assert properties.honest_draws(stage, 1024)["ok"]
    hotter = SamplingParams(temperature=1.3)
    monkeypatch.setattr(properties, "probabilities", lambda logits, params: probabilities(logits, hotter))
    assert not properties.honest_draws(stage, 1024)["ok"]


@pytest.mark.parametrize("name", DRAWS)
def test_surprise_is_small_for_the_right_distribution_alone(name):
    logits = np.random.default_rng(0).normal(scale=2, size=2048).astype(np.float32)
    rng = np.random.default_rng(1)
    exact = probabilities(logits, DRAWS[name])
    assert exact.sum() == pytest.approx(1)
    right = [surprise(rng.choice(2048, 4000, p=exact), exact) for _ in range(40)]
    assert max(map(abs, right)) < 4 and abs(np.mean(right)) < 1
    other = probabilities(logits, dataclasses.replace(DRAWS[name], temperature=DRAWS[name].temperature * 1.4))
    other = np.where(exact > 0, other, 0)
    assert surprise(rng.choice(2048, 4000, p=other / other.sum()), exact) > 4


def test_a_token_that_is_excluded_is_an_infinite_surprise():
    exact = np.array([0.5, 0.5, 0.0])
    assert surprise(np.array([0, 1, 2]), exact) == math.inf


def test_exact_probabilities_are_those_of_the_definition():
    logits = np.log(np.array([4, 3, 2, 1], np.float32))
    np.testing.assert_allclose(probabilities(logits, SamplingParams(temperature=1)), [0.4, 0.3, 0.2, 0.1], rtol=1e-6)
    np.testing.assert_allclose(
        probabilities(logits, SamplingParams(temperature=1, top_k=3, top_p=0.7)), [4 / 7, 3 / 7, 0, 0], rtol=1e-6
    )
    np.testing.assert_allclose(
        probabilities(logits, SamplingParams(temperature=1, min_p=0.49)), [4 / 9, 3 / 9, 2 / 9, 0], rtol=1e-6
    )
    np.testing.assert_allclose(
        probabilities(logits, SamplingParams(temperature=0.5, top_k=2)), [16 / 25, 9 / 25, 0, 0], rtol=1e-6
    )

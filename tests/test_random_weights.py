"""Weights of benchmarks: experts are as popular as asked, text does not fall into a cycle, nothing grows."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_config

from north_jax.config import Config
from north_jax.forward_pass import forward_with_taps
from north_jax.megakernel.timing.load import distinct_experts
from north_jax.model import param_shapes
from north_jax.random_weights.popularity import TOLERANCE, biases, distinct, shares
from north_jax.random_weights.weights import MODERATE, random_params, residual_rms, truncated, with_routing


def router_sized(**changes) -> Config:
    """North's router at its true size; everything else as small as it may be."""
    small = {
        "hidden_size": 2048,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "intermediate_size": 4,
        "prefix_dense_intermediate_size": 256,
        "vocab_size": 2048,
        "num_hidden_layers": 6,
    }
    return tiny_config(**small | changes)


def mean_distinct(chosen: np.ndarray, rows: int) -> float:
    """Of chosen [tokens, k], by groups of `rows` tokens."""
    groups = chosen[: len(chosen) // rows * rows].reshape(-1, rows * chosen.shape[1])
    return float(np.mean([len(np.unique(group)) for group in groups]))


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_shares_give_the_known_numbers_of_experts(rows):
    """Another calculation of the same draw agrees, and so do the figures that vLLM was measured with."""
    assert distinct(128, 8, "uniform", rows) == pytest.approx({1: 8, 2: 15.5, 4: 29.1, 8: 51.6}[rows], abs=0.05)
    assert distinct(128, 8, "skewed", rows) == pytest.approx(distinct_experts(128, 8, rows, "skewed"), rel=0.01)


@pytest.mark.parametrize("experts, chosen", [(128, 8), (16, 2), (8, 8)])
def test_biases_choose_each_expert_as_often_as_asked(experts, chosen):
    logits = np.random.default_rng(0).standard_normal((20_000, experts)) + biases(experts, chosen, "skewed")
    best = np.argsort(-logits, axis=1)[:, :chosen]
    found = np.bincount(best.reshape(-1), minlength=experts) / len(logits)
    np.testing.assert_allclose(found, shares(experts, chosen, "skewed"), atol=0.015)


def test_an_unknown_routing_is_refused():
    with pytest.raises(ValueError, match="not zipf"):
        shares(128, 8, "zipf")


GAINS = dataclasses.replace(MODERATE, attention=0.05)  # what is left of attention in a context of 1,000


@pytest.fixture(scope="module")
def model():
    config = router_sized()
    return config, random_params(config, gains=GAINS, dtype="float32")


@pytest.fixture(scope="module")
def run(model):
    """Routing → (logits, taps) of 320 tokens in sequences of 8."""
    config, params = model
    tokens = np.arange(320).reshape(40, 8)

    @functools.cache
    def of(routing: str):
        routed = with_routing(config, params, routing, gains=GAINS)
        return jax.jit(forward_with_taps, static_argnums=0)(config, routed, tokens)

    return of


@pytest.mark.parametrize("routing", ["uniform", "skewed"])
def test_the_models_own_router_meets_as_many_experts(model, run, routing):
    _, taps = run(routing)
    chosen = [np.asarray(taps[f"layers.{layer}.experts"]) for layer in range(1, model[0].num_hidden_layers)]
    for rows in (2, 4, 8):
        found = np.mean([mean_distinct(layer.transpose(1, 0, 2).reshape(-1, 8), rows) for layer in chosen])
        assert found == pytest.approx(distinct(128, 8, routing, rows), rel=TOLERANCE)
    popular = {int(np.bincount(layer.reshape(-1), minlength=128).argmax()) for layer in chosen}
    assert len(popular) > 1, "the same expert is the most popular in every layer"


def test_the_residual_grows_as_expected(model, run):
    _, taps = run("uniform")
    deviation = 2 * model[0].hidden_size ** -0.5
    for layer in (1, 3, 5):
        found = jnp.sqrt(jnp.mean(taps[f"layers.{layer - 1}.output"] ** 2)) / deviation
        assert found == pytest.approx(residual_rms(model[0], layer, GAINS), rel=0.03)


def test_a_token_hardly_ever_predicts_itself_or_its_predecessor(run):
    logits, _ = run("uniform")
    tokens, following = np.arange(320), np.asarray(logits.argmax(-1)).reshape(-1)
    assert np.mean(following == tokens) < 0.02
    seen = following < 320  # of the vocabulary: these predict a token that was run too
    assert np.mean(following[following[seen]] == tokens[seen]) < 0.2
    assert len(np.unique(following)) > 200


def test_a_truncated_model_shares_its_arrays():
    config = tiny_config()
    params = random_params(config)
    short, part = truncated(config, params, 2)
    assert short.num_hidden_layers == 2 and short.layer_types == config.layer_types[:2]
    assert part["layers"][1]["qkv"] is params["layers"][1]["qkv"] and set(part["layers"]) == {0, 1}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_tree_is_the_models(dtype):
    config = tiny_config()
    params = random_params(config, dtype=dtype)
    found = jax.tree.map(lambda a: (a.shape, a.dtype.name), params)
    assert found == jax.tree.map(lambda a: (a.shape, a.dtype.name), param_shapes(config, dtype))

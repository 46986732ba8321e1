"""backend="warp": whole models decode through warp_decode as they do in pure JAX, and what it cannot take is named."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_config, tiny_params
from support.experts import as_format
from support.quantum import start

import north_jax
from north_jax.decoding import BackendError, make_decoder
from north_jax.generation import generate

CONFIG = tiny_config(intermediate_size=32, num_hidden_layers=3)


@pytest.fixture(scope="module")
def params():
    return tiny_params(CONFIG, dtype=jnp.bfloat16)


def in_eight_bits(params, scheme):
    layers = {}
    for number, layer in params["layers"].items():
        mlp = dict(layer["mlp"])
        if "router" in mlp:
            mlp["gate_up"], mlp["down"] = as_format(mlp["gate_up"], scheme, 2), as_format(mlp["down"], scheme, 1)
        layers[number] = layer | {"mlp": mlp}
    return params | {"layers": layers}


@pytest.mark.parametrize("scheme", [None, "mxfp8"])
def test_logits_of_a_step_agree(params, scheme):
    """Three slots of different length, and an idle one."""
    weights = params if scheme is None else in_eight_bits(params, scheme)
    batch = start(CONFIG, [50, 1, None, 17], room=1, dtype=jnp.bfloat16)
    tokens, positions, active = np.zeros(4, np.int32), np.zeros(4, np.int32), np.zeros(4, bool)
    for row in batch.rows:
        tokens[row.slot], positions[row.slot], active[row.slot] = row.token, row.position, True
    step = jax.jit(north_jax.decode_step, static_argnums=(0, 7))
    arguments = (CONFIG, weights, batch.cache(), batch.tables, tokens, positions, active)
    _, expected = step(*arguments, "dense")
    _, found = step(*arguments, "warp")
    difference = np.asarray(found - expected)[active]
    assert np.isfinite(np.asarray(found)).all()  # the idle slot too
    assert np.linalg.norm(difference) < 0.02 * np.linalg.norm(np.asarray(expected)[active])


@pytest.mark.slow
def test_it_generates_what_pure_jax_does():
    """North Nano in bfloat16, greedily: a text whose choices are clear."""
    model = north_jax.load()
    prompt = model.tokenizer().encode_text("def add(a, b):")
    texts = [list(generate(model.config, model.params, prompt, 12, backend=name)) for name in ("jax", "warp")]
    assert texts[0] == texts[1]
    assert len(texts[0]) > 4


def refusal(config, params, slots=2):
    with pytest.raises(BackendError) as error:
        make_decoder(config, params, backend="warp", slots=slots, max_context=64)
    return str(error.value)


def test_what_it_cannot_take_is_named(params):
    assert refusal(CONFIG, tiny_params(CONFIG)) == "the warp backend needs bfloat16 weights, not float32"
    assert refusal(CONFIG, params, slots=65) == "the warp backend decodes at most 64 slots together, not 65"
    narrow = tiny_config(intermediate_size=16)
    assert "intermediate_size to be a multiple of 32, not 16" in refusal(narrow, params)
    many = tiny_config(num_experts=32, num_experts_per_tok=17, intermediate_size=32)
    assert "num_experts_per_tok up to 16, not 17" in refusal(many, params)
    dense = tiny_config(first_k_dense_replace=5)
    assert "for models with experts" in refusal(dense, params)


def test_it_says_what_it_is(params):
    decoder = make_decoder(CONFIG, params, backend="warp", slots=3, max_context=64)
    assert (decoder.backend, decoder.max_rows) == ("warp", 3)

"""The forward pass in its several forms: they agree, and they differentiate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import tiny_config, tiny_params

import north_jax
from north_jax import moe
from north_jax.attention import attention, blocked_attention
from north_jax.model import North, param_axes, param_shapes, split_params

CONFIG = tiny_config()
forward = jax.jit(north_jax.forward, static_argnums=0, static_argnames=("method", "remat"))


@pytest.fixture(scope="module")
def params():
    return tiny_params(CONFIG)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(1).integers(0, CONFIG.vocab_size, (2, 90)).astype(np.int32)


def relative(a, b):
    a, b = (np.asarray(values, np.float64) for values in (a, b))  # in NumPy: it compiles nothing for each shape
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("selection", ["sigmoid", "softmax"])
@pytest.mark.parametrize("tokens_count", [1, 7, 130])
def test_expert_methods_agree(selection, tokens_count):
    config = tiny_config(expert_selection_fn=selection)
    mlp = tiny_params(config, seed=tokens_count)["layers"][1]["mlp"]
    h = jax.random.normal(jax.random.key(tokens_count), (tokens_count, config.hidden_size))
    # Skewed routing: some experts get many tokens, most get none.
    mlp["router"] = mlp["router"] * jnp.linspace(0.1, 3, config.num_experts)[:, None]
    run = jax.jit(moe.moe, static_argnums=(0, 3))
    dense, gathered, tiled = (run(config, mlp, h, method) for method in ("dense", "gathered", "tiled"))
    assert relative(gathered, dense) < 1e-6
    assert relative(tiled, dense) < 1e-6
    experts, weights, _ = moe.route(config, mlp["router"], h)
    by_hand = np.zeros(h.shape)
    gate_up, down = (np.asarray(mlp[name], np.float64) for name in ("gate_up", "down"))
    for t in range(tokens_count):
        for expert, weight in zip(np.asarray(experts[t]), np.asarray(weights[t]), strict=True):
            gate, up = np.split(gate_up[expert] @ np.asarray(h[t], np.float64), 2)
            by_hand[t] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    assert relative(dense, by_hand) < 1e-5


def test_router_ties_take_the_lowest_index():
    config = tiny_config()
    router = jnp.ones((config.num_experts, config.hidden_size))
    experts, _, _ = moe.route(config, router, jnp.ones((3, config.hidden_size)))
    assert experts.tolist() == [[0, 1]] * 3


def test_module_equals_function(params, tokens):
    model = North(CONFIG, params)
    graph, state = nnx.split(model)
    logits = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))(state, tokens)
    assert relative(logits, forward(CONFIG, params, tokens)) < 1e-5
    for leaf, expected in zip(jax.tree.leaves(split_params(model)), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(leaf, expected)


def test_module_states_shapes_and_axes():
    model = nnx.eval_shape(lambda: North(CONFIG, rngs=nnx.Rngs(0)))
    shapes = jax.tree.map(lambda leaf: leaf.shape, split_params(model))
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, param_shapes(CONFIG))
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model, nnx.Param)))
    axes = param_axes(CONFIG)
    assert specs["embed"] == jax.sharding.PartitionSpec(*axes["embed"])
    assert specs["layers"][1]["mlp"]["down"] == jax.sharding.PartitionSpec("expert", "embed", "expert_mlp")


def test_wrong_shape_is_named(params):
    broken = params | {"final_norm": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"final_norm has shape \(3,\)"):
        North(CONFIG, broken)


@pytest.mark.parametrize("length", [1, 69, 70, 71, 90])
def test_causality(params, tokens, length):
    """A prefix's logits do not change when the text goes on, on either side of the window."""
    whole = forward(CONFIG, params, tokens)[:, :length]
    assert relative(forward(CONFIG, params, tokens[:, :length]), whole) < 1e-5


def test_query_blocks_change_nothing(params, tokens, monkeypatch):
    monkeypatch.setattr("north_jax.attention.QUERY_BLOCK", 16)
    blocked = jax.jit(lambda p, t: north_jax.forward(CONFIG, p, t))(params, tokens)
    assert relative(blocked, forward(CONFIG, params, tokens)) < 1e-5


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN needs a GPU")
@pytest.mark.parametrize("window", [None, 100])
def test_cudnn_attention_equals_blocked(window):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (2, 512, heads, 32), jnp.bfloat16) for key, heads in zip(keys, (8, 2, 2), strict=True)
    )

    def loss(attend, *arrays):
        return jnp.sum(jnp.sin(attend(*arrays, window).astype(jnp.float32)))

    for argument in range(3):
        ours = jax.grad(loss, argnums=argument + 1)(blocked_attention, q, k, v)
        assert relative(jax.grad(loss, argnums=argument + 1)(attention, q, k, v), ours) < 2e-2
    assert relative(attention(q, k, v, window), blocked_attention(q, k, v, window)) < 1e-2


@pytest.mark.slow
def test_gradients_agree_with_differences(params, tokens):
    def loss(p, method="dense", remat=False):
        logits = north_jax.forward(CONFIG, p, tokens[:, :40], method=method, remat=remat)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, :40, None], axis=-1))

    value_and_gradient = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))
    params = jax.tree.map(np.asarray, params)
    gradient = jax.tree.map(np.asarray, value_and_gradient(params)[1])
    direction = jax.tree.map(lambda g: g / np.sqrt(np.mean(g * g) + 1e-20), gradient)
    step = np.float32(1e-5)
    plus, _ = value_and_gradient(jax.tree.map(lambda p, d: p + step * d, params, direction))
    minus, _ = value_and_gradient(jax.tree.map(lambda p, d: p - step * d, params, direction))
    slope = sum(np.vdot(g, d) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True))
    assert abs((plus - minus) / (2 * step) / slope - 1) < 2e-2
    _, tiled = value_and_gradient(params, "tiled", True)
    for a, b in zip(jax.tree.leaves(tiled), jax.tree.leaves(gradient), strict=True):
        assert relative(a, b) < 1e-4


def test_taps_name_every_tensor(params, tokens):
    logits, taps = jax.jit(north_jax.forward_with_taps, static_argnums=0)(CONFIG, params, tokens)
    assert relative(logits, forward(CONFIG, params, tokens)) < 1e-5
    assert taps["layers.4.output"].shape == (2, 90, CONFIG.hidden_size)
    assert taps["layers.1.experts"].shape == (2, 90, CONFIG.num_experts_per_tok)
    assert "layers.0.experts" not in taps
    x = taps["layers.3.output"] + taps["layers.4.attention"] + taps["layers.4.mlp"]
    assert relative(x, taps["layers.4.output"]) < 1e-6


def test_bfloat16_stays_close(params, tokens):
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    rounded = jax.tree.map(lambda a: a.astype(jnp.float32), low)
    logits = forward(CONFIG, low, tokens)
    assert logits.dtype == jnp.float32
    expected = forward(CONFIG, rounded, tokens)
    error = jnp.linalg.norm(logits - expected, axis=-1) / jnp.linalg.norm(expected, axis=-1)  # [B, T]
    assert float(jnp.median(error)) < 0.05  # rounding may send a few tokens to another expert


def test_token_outside_the_vocabulary_is_visible(params):
    """Its own logits are NaN, and another row never sees it."""
    for token in (CONFIG.vocab_size, -1):
        logits = forward(CONFIG, params, np.array([[1, token], [1, 2]], np.int32))
        assert bool(jnp.isnan(logits[0, 1]).all())
        assert not bool(jnp.isnan(logits[1]).any())


@pytest.mark.parametrize("shape", [(4,), (2, 0)])
def test_tokens_of_another_shape_are_named(params, shape):
    with pytest.raises(ValueError, match=r"expected \[B, T\]"):
        forward(CONFIG, params, np.zeros(shape, np.int32))

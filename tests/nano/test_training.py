"""The training code computes what the product computes, and learns."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import north_jax.nano
from examples.train_north_nano import evaluate, network, train
from north_jax.attention import attention
from north_jax.config import DENSE, FULL, SLIDING, SPARSE, Config
from north_jax.forward_pass import hidden_states
from north_jax.model import param_shapes
from north_jax.text import Tokenizer


@pytest.fixture(autouse=True, scope="module")
def _quick_compilation() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def config() -> Config:
    tokenizer = Tokenizer.from_dir(Path(north_jax.nano.__file__).parent)
    return dataclasses.replace(
        network.geometry(tokenizer),
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        head_dim=8,
        layer_types=(FULL, SLIDING),
        mlp_layer_types=(DENSE, SPARSE),
        sliding_window=8,
        intermediate_size=16,
        dense_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
    )


def test_forward_is_that_of_the_product(config: Config) -> None:
    rng = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * leaf.shape[-1] ** -0.5, leaf.dtype)  # noqa: E731
    params = jax.tree.map(draw, param_shapes(config))
    tokens = jnp.asarray(rng.integers(config.vocab_size, size=(2, 40)))
    x, router_logits = jax.jit(network.hidden_states, static_argnums=(0, 3))(config, params, tokens, attention)
    product = jax.jit(hidden_states, static_argnums=0, static_argnames="method")
    expected = product(config, params, tokens, method="dense")
    np.testing.assert_allclose(x.astype(jnp.float32), expected.astype(jnp.float32), rtol=0.02, atol=0.02)
    assert [logits.shape for logits in router_logits] == [(2, 40, 4)]


def test_windows_cover_every_stream() -> None:
    lengths = dict.fromkeys(train.MIX, 1000)
    windows = train.Windows(lengths, 16, np.random.default_rng(0))
    starts = np.concatenate([windows.batch(4) for _ in range(200)])
    assert starts.min() >= 0
    assert starts.max() + 16 + 1 <= 3000
    for first, share in zip((0, 1000, 2000), train.MIX.values(), strict=True):
        inside = (starts >= first) & (starts < first + 1000)
        assert abs(inside.mean() - share) < 0.1
        assert np.all(starts[inside] + 17 <= first + 1000)
        assert len(set((starts[inside] - first) // 16)) > 58
    with pytest.raises(ValueError, match="shorter than two windows"):
        train.Windows(dict.fromkeys(train.MIX, 20), 16, np.random.default_rng(0)).batch(4)


def test_learning_rate_rises_stays_and_falls() -> None:
    assert train.learning_rate_factor(0.0) == 0.0
    assert train.learning_rate_factor(train.WARMUP) == train.learning_rate_factor(0.5) == 1.0
    assert train.learning_rate_factor(1.0) == 0.0
    assert train.learning_rate_factor(1 - train.DECAY / 2) == pytest.approx(0.5)


def test_balance_loss_prefers_equal_loads(config: Config) -> None:
    even = jnp.tile(jnp.array([[9.0, 9, -9, -9], [-9, -9, 9, 9]]), (8, 1))[None]
    skewed = jnp.tile(jnp.array([9.0, 9, -9, -9]), (1, 16, 1))
    (even_loss, even_load), (skewed_loss, _) = train.balance(config, [even]), train.balance(config, [skewed])
    np.testing.assert_allclose(even_loss, 1.0, rtol=1e-5)
    np.testing.assert_allclose(even_load, 0.5)
    np.testing.assert_allclose(skewed_loss, 2.0, rtol=1e-3)


@pytest.mark.slow
def test_training_learns_a_repeated_text(config: Config) -> None:
    trainer = train.Trainer(config, train.optimizer(0.02, 0.01), context=32, seed=0)
    stream = jnp.array(np.tile(np.arange(40, 60, dtype=np.uint16), 20))
    losses = [float(trainer.step(stream, np.arange(4, dtype=np.int32) * 7, 1.0)[0][0]) for _ in range(30)]
    assert losses[0] > 7  # log of the vocabulary is 8.3
    assert losses[-1] < 1
    tokens = np.asarray(stream[:33], np.int32)[None]
    np.testing.assert_allclose(trainer.losses(tokens).mean(), losses[-1], atol=0.5)


def test_windows_score_every_token_once() -> None:
    for length in (2, 15, 16, 17, 18, 40, 100):
        ids = np.arange(length)
        scored = []
        for window, count in evaluate.windows(ids, context=16, stride=8):
            assert 1 < len(window) <= 17
            assert len(window) == window[-1] + 1 or len(window) == 17  # as much context as there is
            scored += window[len(window) - count :].tolist()
        assert scored == list(range(1, length))


def test_bits_per_byte_of_a_known_model() -> None:
    """A model that gives each next token the probability 2^-(token mod 5)."""

    def losses(tokens: np.ndarray) -> np.ndarray:
        return (tokens[:, 1:] % 5) * np.log(2)

    ids = np.arange(1000, dtype=np.int32)
    expected = float(np.sum(ids[1:] % 5)) / 50
    found = evaluate.bits_per_byte(losses, [ids], [50], context=64, stride=32, batch=3)
    assert found == [pytest.approx(expected)]

"""The compiled decode against JAX's in float32: batches 1–8, ragged and idle rows, window edges, wave orders.

Runs on what the platform has: the CPU executor, or the kernel on a GPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_config, tiny_params
from support.quantum import Quanta, Start, start

import ffi
from north_jax.decoding import make_decoder
from north_jax.inference import decode_step
from north_jax.megakernel.decoder import MegakernelDecoder
from north_jax.megakernel.orders import ORDERS
from north_jax.sampling import SamplingParams

PLATFORM = {"cpu": "cpu", "gpu": "cuda"}.get(jax.default_backend(), "")
pytestmark = pytest.mark.skipif(not ffi.available(PLATFORM), reason=str(ffi.build_info()))

WINDOW = 70  # of tiny_config
POSITIONS = (130, 0, WINDOW - 1, 63, WINDOW, 64, 1, WINDOW - 2)
TOLERANCE = 1e-5  # of the norm of a row's logits
VARIANTS = {
    "north": {},
    "one KV head": {"num_key_value_heads": 1},
    "softmax": {"expert_selection_fn": "softmax"},
    "renormalised": {"norm_topk_prob": True},
    "layer norm": {"rms_norm_eps": None, "layer_norm_eps": 1e-5},
    "logit scale": {"logit_scale": 0.25},
    "odd sizes": {"vocab_size": 1031, "intermediate_size": 24, "prefix_dense_intermediate_size": 40, "head_dim": 12},
    "all dense": {"first_k_dense_replace": 5},
    "all experts": {"first_k_dense_replace": 0},
}
step = jax.jit(decode_step, static_argnums=0)


def batch_of(config, positions, room, seed=0) -> Start:
    sampling = [SamplingParams(temperature=t, seed=seed + 5) for t in (0, 0, 1.0, 0, 0, 0.7, 0, 0)]
    return start(config, positions, room=room, seed=seed, sampling=sampling)


def compiled(config, params, batch: Start, **options) -> MegakernelDecoder:
    decoder = MegakernelDecoder(config, params, slots=batch.slots, max_context=batch.max_context, **options)
    decoder.compile(batch.cache(), batch.tables)
    return decoder


def errors(config, params, batch: Start, decoder: MegakernelDecoder) -> np.ndarray:
    """Relative error of each row's logits after one step, and of the keys and values that it wrote."""
    mine = Quanta(decoder, batch).run(1)
    rows = batch.rows
    active = np.zeros(batch.slots, bool)
    tokens, lengths = np.zeros((2, batch.slots), np.int32)
    for row in rows:
        active[row.slot], tokens[row.slot], lengths[row.slot] = True, row.token, row.position
    cache, logits = step(config, params, batch.cache(), batch.tables, tokens, lengths, active)
    expected = np.asarray(logits)[[row.slot for row in rows]]
    for ours, theirs in zip(mine.cache, cache, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)  # NaN in pages that nobody owns
    return np.linalg.norm(decoder.logits() - expected, axis=1) / np.linalg.norm(expected, axis=1)


@pytest.mark.parametrize(
    "variant",
    [name if name in ("north", "odd sizes") else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS],
)
def test_logits_and_cache_agree(variant):
    config = tiny_config(**VARIANTS[variant])
    params = tiny_params(config, seed=1)
    batch = batch_of(config, POSITIONS, room=4, seed=2)
    assert errors(config, params, batch, compiled(config, params, batch)).max() < TOLERANCE


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sms", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_every_order_agrees(order, sms):
    config = tiny_config()
    params = tiny_params(config)
    batch = batch_of(config, (200, None, 3, WINDOW), room=4, seed=3)
    decoder = compiled(config, params, batch, order=ORDERS[order], sms=sms)
    assert errors(config, params, batch, decoder).max() < TOLERANCE


@pytest.mark.parametrize("steps", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_tokens_agree_at_every_batch(steps):
    """Greedy and drawn tokens of 1 to 8 rows; window edges and pages are crossed, and one slot more is always idle."""
    config = tiny_config()
    params = tiny_params(config, seed=1)
    batch = batch_of(config, (*POSITIONS, None), room=200, seed=1)
    ours = compiled(config, params, batch)
    theirs = make_decoder(config, params, backend="jax", slots=batch.slots, max_context=batch.max_context)
    theirs.compile(batch.cache(), batch.tables)
    for rows in range(1, 9):
        some = batch.rows[-rows:]
        assert Quanta(ours, batch).run(steps, some).steps == Quanta(theirs, batch).run(steps, some).steps


class Seeded:
    """An engine whose quanta run in the interleaving of a seed; counters begin just below their wrap-around."""

    def __init__(self, engine, seed: int) -> None:
        self._engine, self._seed = engine, seed

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def queue(self, schedule: int, steps: int, **options) -> int:
        chosen = {"threads": 1 + self._seed % 3, "seed": self._seed, "counter_origin": 2**32 - 50}
        return self._engine.queue(schedule, steps, **options | chosen)


@pytest.mark.skipif(PLATFORM != "cpu", reason="interleavings are the executor's")
@pytest.mark.parametrize("order", ["streamed-2", "tuned"])
def test_100_interleavings_give_the_same_bits(order):
    config = tiny_config(num_hidden_layers=3)
    params = tiny_params(config)
    batch = batch_of(config, (100, 0, None, WINDOW), room=8, seed=4)
    decoder = compiled(config, params, batch, order=ORDERS[order], sms=7)
    engine = decoder._engine
    results = []
    for seed in range(100):
        decoder._engine = Seeded(engine, seed)
        run = Quanta(decoder, batch).run(4)
        results.append((run.steps, decoder.logits().tobytes(), [np.asarray(pages).tobytes() for pages in run.cache]))
    assert all(result == results[0] for result in results)


def test_counters_may_wrap():
    """Wherever they begin, in every quantum anew: the same tokens, logits and pages."""
    config = tiny_config(num_hidden_layers=3)
    params = tiny_params(config)
    batch = batch_of(config, (100, 0, None, WINDOW), room=8, seed=4)
    results = set()
    for origin in (0, 2**32 - 1, 2**32 - 50, 2**31 - 50):
        decoder = compiled(config, params, batch, sms=7, counter_origin=origin)
        run = Quanta(decoder, batch).run(3)
        run.run(2, run.following(batch.rows, 3))
        results.add((str(run.steps), decoder.logits().tobytes(), *(np.asarray(pages).tobytes() for pages in run.cache)))
    assert len(results) == 1


def test_bfloat16_is_nearer_to_float32_than_jax_is():
    config = tiny_config()
    rounded = tiny_params(config, dtype=jnp.bfloat16)
    exact = jax.tree.map(lambda a: a.astype(jnp.float32), rounded)
    batch = start(config, POSITIONS, room=2, seed=6, dtype=jnp.bfloat16)
    decoder = compiled(config, rounded, batch)
    Quanta(decoder, batch).run(1)
    tokens = np.array([row.token for row in batch.rows], np.int32)
    live = np.ones(len(POSITIONS), bool)
    cache32 = tuple(pages.astype(jnp.float32) for pages in batch.cache())
    _, expected = step(config, exact, cache32, batch.tables, tokens, np.array(POSITIONS, np.int32), live)
    _, theirs = step(config, rounded, batch.cache(), batch.tables, tokens, np.array(POSITIONS, np.int32), live)

    def error(logits):
        return np.linalg.norm(np.asarray(logits) - expected) / np.linalg.norm(expected)

    assert error(decoder.logits()) < min(error(theirs), 0.02)

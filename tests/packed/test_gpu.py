"""Packed prefill on a GPU at the model's full width: every chunk size, boundaries at every offset of a page.

What is held against the float32 forward pass is the last layer's output of every token. bfloat16 alone is off by some,
more where it tips a router's choice: the measure is what JAX's own bfloat16 pass is off by.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from north_jax.config import Config
from north_jax.forward_pass import hidden_states
from north_jax.geometries import NORTH
from north_jax.kv_cache import PAGE_SIZE, PagedRows, init_cache, pages_for, ring_entries
from north_jax.packed import PackedPrefill, Piece, buckets
from north_jax.packed.packing import TOKEN_ALIGN
from north_jax.random_weights.weights import random_params

pytestmark = pytest.mark.gpu
CHUNK = 8192
CONTEXT = 2 * CHUNK
MARGIN = 1.5  # of the error of JAX's own bfloat16 pass, which rounds each expert's part once less


@pytest.fixture(scope="module")
def config():
    """Five layers hold every kind; a small vocabulary keeps the head out of the way."""
    small = {"num_hidden_layers": 5, "vocab_size": 4096, "eos_token_id": 3}
    return Config.from_dict(json.loads(NORTH.read_text()) | small)


@pytest.fixture(scope="module")
def params(config):
    return random_params(config)


@pytest.fixture(scope="module")
def tokens(config):
    return np.random.default_rng(0).integers(0, config.vocab_size, CONTEXT).astype(np.int32)


@pytest.fixture(scope="module")
def references(config, params, tokens, tmp_path_factory, request):
    """Hidden states [T, D] of the first CHUNK tokens: of the float32 pass, and of the bfloat16 one.

    They are computed once for all processes that share the work: the float32 pass takes much of the GPU's memory.
    """
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if hasattr(request.config, "workerinput") else shared
    path = shared / "references.npz"
    with (shared / "references.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            run = jax.jit(hidden_states, static_argnums=0)
            precise = run(config, jax.tree.map(lambda a: a.astype(jnp.float32), params), tokens[None, :CHUNK])[0]
            rounded = run(config, params, tokens[None, :CHUNK])[0].astype(jnp.float32)
            np.savez(path, precise=precise, rounded=rounded)
    held = np.load(path)
    return held["precise"], held["rounded"]


class Model:
    """A packed prefill, its cache, and one prompt."""

    def __init__(self, config, params):
        ring = ring_entries(config, CONTEXT, CHUNK)
        pages = {"full_pages": pages_for(CONTEXT), "sliding_pages": ring}
        self.rows = PagedRows(config, rows=1, max_context=CONTEXT, max_chunk=CHUNK, **pages)
        self.cache = init_cache(config, **pages, dtype=jnp.bfloat16)
        entries = pages_for(CONTEXT), ring
        self.prefill = PackedPrefill(config, params, rows=2, most=CHUNK, entries=entries)

    def feed(self, tokens, start):
        """Appends tokens to the prompt; gives their hidden states."""
        self.rows.grow(0, start, start + len(tokens))
        tables, pieces = self.rows.snapshot(), [Piece(tokens, start)]
        self.cache, x, logits = self.prefill.run_whole(self.cache, tables, pieces)
        assert jnp.isfinite(x.astype(jnp.float32)).all() and jnp.isfinite(logits[0]).all()
        self.cache, alone = self.prefill.run(self.cache, tables, pieces)
        difference = jnp.abs(alone[0] - logits[0]).max()
        assert difference < 0.05 * jnp.abs(logits[0]).max(), "of the last layer for the last token alone"
        return np.asarray(x[: len(tokens)], np.float32)


@pytest.fixture
def model(config, params):
    return Model(config, params)


def errors(found, references, part):
    """Root mean square errors of what was found and of the bfloat16 pass."""
    precise, rounded = (reference[part] for reference in references)
    return tuple(float(np.sqrt(np.mean((x - precise) ** 2))) for x in (found, rounded))


@pytest.mark.parametrize("length", reversed(buckets(CHUNK)))
def test_every_chunk_size(model, tokens, references, length):
    model.prefill.compile(length, model.cache)
    count = length - 5  # some padding
    found, allowed = errors(model.feed(tokens[:count], 0), references, slice(count))
    print(f"{length} tokens: error {found:.4g}, of JAX's own bfloat16 pass {allowed:.4g}")
    assert found < MARGIN * allowed


@pytest.mark.parametrize("around", [0, 4096])
def test_boundaries_at_every_offset_of_a_page(model, tokens, references, around):
    """Two chunks with the boundary at each place modulo the page size, at the beginning and at the window's edge."""
    for length in (256, 6144) if around else (256,):
        model.prefill.compile(length, model.cache)
    for boundary in range(around + 1, around + PAGE_SIZE + 1):
        first = model.feed(tokens[:boundary], 0)
        second = model.feed(tokens[boundary : boundary + 200], boundary)
        model.rows.release(0)
        part = slice(max(boundary - 200, 0), boundary + 200)
        found, allowed = errors(np.concatenate([first, second])[part], references, part)
        assert found < MARGIN * allowed, boundary


def test_two_prompts_of_a_chunk_do_not_see_each_other(config, params, tokens):
    """Each has the bits that it has alone in a chunk of the same size."""
    ring = ring_entries(config, 1024, 1024)
    pages = {"full_pages": 2 * pages_for(1024), "sliding_pages": 2 * ring}
    prefill = PackedPrefill(config, params, rows=2, most=1024, entries=(pages_for(1024), ring))
    cache = init_cache(config, **pages, dtype=jnp.bfloat16)
    prefill.compile(1024, cache)
    rows = PagedRows(config, rows=2, max_context=1024, max_chunk=1024, **pages)
    rows.grow(0, 0, 500)
    rows.grow(1, 0, 300)
    one, other = Piece(tokens[:500], 0), Piece(tokens[600:900], 0)
    cache, x, _ = prefill.run_whole(cache, rows.snapshot(), [one, other])
    at = -(-500 // TOKEN_ALIGN) * TOKEN_ALIGN
    tables = rows.snapshot()
    for row, (piece, found) in enumerate(((one, x[:500]), (other, x[at : at + 300]))):
        alone = type(tables)(tables.full[[row]], tables.sliding[[row]])
        cache, again, _ = prefill.run_whole(cache, alone, [piece])
        assert (again[: len(piece.tokens)] == found).all()


def test_a_float32_model_runs_too(config):
    """No kernel takes it: JAX's own code runs."""
    small = dataclasses.replace(
        config, num_hidden_layers=2, layer_types=config.layer_types[:2], mlp_layer_types=config.mlp_layer_types[:2]
    )
    weights = random_params(small, dtype=jnp.float32)
    ring = ring_entries(small, 256, 256)
    pages = {"full_pages": 4, "sliding_pages": ring}
    cache = init_cache(small, **pages, dtype=jnp.float32)
    prefill = PackedPrefill(small, weights, rows=1, most=256, entries=(4, ring))
    prefill.compile(256, cache)
    rows = PagedRows(small, rows=1, max_context=256, max_chunk=256, **pages)
    rows.grow(0, 0, 200)
    tokens = np.arange(200, dtype=np.int32)
    _, x, _ = prefill.run_whole(cache, rows.snapshot(), [Piece(tokens, 0)])
    expected = hidden_states(small, weights, tokens[None])[0]
    np.testing.assert_allclose(np.asarray(x[:200]), np.asarray(expected), atol=1e-3)

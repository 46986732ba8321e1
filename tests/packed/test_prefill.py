"""Packed prefill against the whole-sequence forward pass: several prompts a chunk, boundaries anywhere, poison."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_config, tiny_params

import north_jax
from north_jax.forward_pass import hidden_states
from north_jax.kv_cache import PAGE_SIZE, PagedRows, PageTables, init_cache, pages_for, ring_entries
from north_jax.layers import rotate
from north_jax.packed import PackedPrefill, Piece, pack
from north_jax.packed.chunk import begin, kinds, programs
from north_jax.packed.projections import rotated

CONFIG = tiny_config()  # window 70
LENGTH = 330
CHUNK = 128
ROWS = 3
PAGES = {"full_pages": 18, "sliding_pages": 18}
TOLERANCE = 3e-5


@pytest.fixture(scope="module")
def params():
    return tiny_params(CONFIG)


@pytest.fixture(scope="module")
def sequences():
    return np.random.default_rng(2).integers(0, CONFIG.vocab_size, (ROWS, LENGTH)).astype(np.int32)


@pytest.fixture(scope="module")
def expected(params, sequences):
    return np.asarray(jax.jit(north_jax.forward, static_argnums=0)(CONFIG, params, sequences))


def new_cache():
    """Every page starts as NaN, so reading an unwritten one shows."""
    return tuple(jnp.full_like(p, jnp.nan) for p in init_cache(CONFIG, **PAGES, dtype=jnp.float32))


@pytest.fixture(scope="module")
def prefill(params):
    entries = pages_for(LENGTH), ring_entries(CONFIG, LENGTH, CHUNK)
    made = PackedPrefill(CONFIG, params, rows=ROWS, most=CHUNK, entries=entries)
    made.compile(CHUNK, new_cache())
    return made


class Prompts:
    """Three prompts, fed from `sequences`."""

    def __init__(self, prefill, sequences, expected):
        self.prefill, self.sequences, self.expected = prefill, sequences, expected
        self.paged = PagedRows(CONFIG, rows=ROWS, max_context=LENGTH, max_chunk=CHUNK, **PAGES)
        self.cache = new_cache()
        self.position = [0] * ROWS

    def feed(self, *counts):
        """Appends counts[i] tokens to prompt i; gives the largest error of the logits after the last ones."""
        rows = [row for row, count in enumerate(counts) if count]
        for row in rows:
            self.paged.grow(row, self.position[row], self.position[row] + counts[row])
        pieces = [
            Piece(self.sequences[row, self.position[row] : self.position[row] + counts[row]], self.position[row])
            for row in rows
        ]
        tables = PageTables(*(np.asarray(table)[rows] for table in self.paged.snapshot()))
        self.cache, logits = self.prefill.run(self.cache, tables, pieces)
        for row in rows:
            self.position[row] += counts[row]
        right = np.stack([self.expected[row, self.position[row] - 1] for row in rows])
        return np.abs(np.asarray(logits)[: len(rows)] - right).max() / np.abs(self.expected).max()


def test_several_prompts_a_chunk(prefill, sequences, expected):
    prompts = Prompts(prefill, sequences, expected)
    for counts in [(64, 1, 0), (5, 64, 0), (0, 64, 60), (100, 3, 2), (64, 48, 0), (3, 64, 9), (90, 0, 30), (1, 1, 1)]:
        assert prompts.feed(*counts) < TOLERANCE, counts


@pytest.mark.parametrize("first", [1, 5, 6, 7, 31, 63])
def test_boundaries_at_window_and_page_edges(prefill, sequences, expected, first):
    prompts = Prompts(prefill, sequences, expected)
    assert prompts.feed(first, 0, 0) < TOLERANCE
    while prompts.position[0] + 64 <= LENGTH:
        assert prompts.feed(64, 0, 0) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, PAGE_SIZE + 1))
def test_boundaries_at_every_offset_of_a_page(prefill, sequences, expected, first):
    prompts = Prompts(prefill, sequences, expected)
    assert prompts.feed(first, 0, 0) < TOLERANCE
    assert prompts.feed(71, 0, 0) < TOLERANCE  # one more than the window
    assert prompts.feed(CHUNK, 0, 0) < TOLERANCE


def test_what_a_page_s_former_owner_left_behind_the_end_is_cleared(prefill, sequences, expected):
    """A kernel multiplies it by weights of 0: it has to be finite."""
    prompts = Prompts(prefill, sequences, expected)
    prompts.feed(70, 5, 0)
    full = np.asarray(prompts.paged.snapshot().full)
    pages = np.asarray(prompts.cache[0])
    for row, count in ((0, 70), (1, 5)):
        last = pages[full[row, (count - 1) // PAGE_SIZE]]
        assert np.isfinite(last).all()
        assert not last[:, :, count % PAGE_SIZE :].any() and last[:, :, : count % PAGE_SIZE].any()


def test_other_rows_pages_are_left_alone(prefill, sequences, expected):
    prompts = Prompts(prefill, sequences, expected)
    prompts.feed(64, 63, 0)
    mine = [np.asarray(prompts.paged.snapshot().full)[1, :1], np.asarray(prompts.paged.snapshot().sliding)[1, :1]]
    before = [
        np.asarray(pages)[mine[CONFIG.layer_types[i] != "full_attention"]] for i, pages in enumerate(prompts.cache)
    ]
    prompts.feed(60, 0, 3)
    for i, pages in enumerate(prompts.cache):
        np.testing.assert_array_equal(before[i], np.asarray(pages)[mine[CONFIG.layer_types[i] != "full_attention"]])


@pytest.mark.parametrize("kind", ["full", "sliding", "dense"])
def test_the_last_layer_for_last_tokens_alone(kind):
    """It gives the logits of the whole one, which gives every token's hidden state too; both write the same pages."""
    layer_types = ("full_attention", "sliding_attention" if kind == "sliding" else "full_attention")
    mlp_types = ("dense", "dense" if kind == "dense" else "sparse")
    config = dataclasses.replace(CONFIG, num_hidden_layers=2, layer_types=layer_types, mlp_layer_types=mlp_types)
    params = tiny_params(config)
    tokens = np.random.default_rng(3).integers(0, config.vocab_size, (2, 100)).astype(np.int32)
    hidden = hidden_states(config, params, tokens)
    logits = np.asarray(north_jax.forward(config, params, tokens))
    prefill = PackedPrefill(
        config, params, rows=ROWS, most=CHUNK, entries=(pages_for(LENGTH), ring_entries(config, LENGTH, CHUNK))
    )
    caches = []
    for run in (prefill.run, prefill.run_whole):
        cache = tuple(jnp.full_like(p, jnp.nan) for p in init_cache(config, **PAGES, dtype=jnp.float32))
        prefill.compile(CHUNK, cache)
        paged = PagedRows(config, rows=2, max_context=LENGTH, max_chunk=CHUNK, **PAGES)
        for starts, ends in (((0, 0), (80, 9)), ((80, 9), (100, 20))):
            pieces = []
            for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
                paged.grow(row, start, end)
                pieces.append(Piece(tokens[row, start:end], start))
            cache, *x, found = run(cache, paged.snapshot(), pieces)
            right = logits[[0, 1], [end - 1 for end in ends]]
            assert np.abs(found[:2] - right).max() < TOLERANCE * np.abs(logits).max()
        caches.append(cache)
    np.testing.assert_allclose(x[0][:20], hidden[0, 80:], atol=TOLERANCE * float(jnp.abs(hidden).max()))
    for alone, whole in zip(*caches, strict=True):
        np.testing.assert_allclose(alone, whole, atol=TOLERANCE)


def test_the_cache_is_updated_in_place(prefill, sequences, expected):
    prompts = Prompts(prefill, sequences, expected)
    before = [pages.unsafe_buffer_pointer() for pages in prompts.cache]
    prompts.feed(64, 1, 0)
    assert [pages.unsafe_buffer_pointer() for pages in prompts.cache] == before


def test_the_shortest_compiled_chunk_is_taken(params):
    entries = pages_for(LENGTH), ring_entries(CONFIG, LENGTH, 256)
    made = PackedPrefill(CONFIG, params, rows=ROWS, most=256, entries=entries)
    assert made.needed == made.shapes[:2] == (64, 256)
    assert sorted(made.shapes) == list(made.lengths)
    with pytest.raises(ValueError, match="chunk of 5 tokens exceeds what is compiled"):
        made.shape_of([Piece([1] * 5, 0)])
    made._programs |= dict.fromkeys((128, 64))  # as if compiled
    assert made.shape_of([Piece([1] * 64, 0)]) == 64
    assert made.shape_of([Piece([1] * 3, 0), Piece([1] * 60, 7)]) == 128
    with pytest.raises(ValueError, match="136 tokens"):
        made.shape_of([Piece([1] * 100, 0), Piece([1] * 32, 0)])


def test_layers_of_a_kind_share_a_program_and_a_period_is_one():
    assert kinds(CONFIG) == [0, 1, 1, 1, 4]
    assert programs(kinds(CONFIG)) == [(0, 1, 1, 1, 4)]
    assert programs([0] + 12 * [1, 1, 1, 4]) == [(0,), *12 * [(1, 1, 1, 4)]]
    assert programs([0, 0] + 6 * [2, 3] + [2]) == [(0,), (0,), *6 * [(2, 3)], (2,)]
    assert programs([0, 1, 2, 3, 1, 1, 2, 3, 2, 1]) == [(kind,) for kind in (0, 1, 2, 3, 1, 1, 2, 3, 2, 1)]
    assert programs([0]) == [(0,)]


def test_rotation_is_that_of_the_layers():
    packed = pack([Piece([1] * 60, 1000)], tokens=64, rows=1)
    table = np.zeros((1, 20), np.int32)
    embedding = jnp.ones((CONFIG.vocab_size, CONFIG.hidden_size))
    _, chunk = jax.jit(begin, static_argnums=0)(CONFIG, embedding, packed, PageTables(table, table))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(60, 4, CONFIG.head_dim)), jnp.float32)
    expected = rotate(CONFIG, x, jnp.arange(1000, 1060, dtype=jnp.int32))
    np.testing.assert_allclose(rotated(x, chunk.cosine[:60], chunk.sine[:60]), expected, atol=2e-4)  # angles to 1000

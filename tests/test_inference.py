"""Prefill and decode over pages against the whole-sequence forward pass: ragged rows, chunks, window edges, poison."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_config, tiny_params

import north_jax
from north_jax.decoding import BackendError
from north_jax.decoding.jax_decoder import JaxDecoder
from north_jax.generation import generate, generate_with_logprobs
from north_jax.kv_cache import PagedRows, init_cache
from north_jax.sampling import SamplingParams

CONFIG = tiny_config()  # window 70
LENGTH = 330  # the ring wraps, the window slides
PAGES = {"full_pages": 17, "sliding_pages": 13}
forward = jax.jit(north_jax.forward, static_argnums=0)
prefill = jax.jit(north_jax.prefill, static_argnums=0, donate_argnums=2)
decode_step = jax.jit(north_jax.decode_step, static_argnums=0, donate_argnums=2)


@pytest.fixture(scope="module")
def params():
    return tiny_params(CONFIG)


@pytest.fixture(scope="module")
def sequences():
    return np.random.default_rng(2).integers(0, CONFIG.vocab_size, (3, LENGTH)).astype(np.int32)


@pytest.fixture(scope="module")
def expected(params, sequences):
    return np.asarray(forward(CONFIG, params, sequences))


class Rows:
    """Three rows fed from `sequences`; every page starts as NaN, so reading an unwritten one shows."""

    def __init__(self, params, sequences, dtype=jnp.float32):
        self.params, self.sequences = params, sequences
        self.paged = PagedRows(CONFIG, rows=3, max_context=LENGTH, max_chunk=64, **PAGES)
        self.cache = tuple(jnp.full_like(p, jnp.nan) for p in init_cache(CONFIG, **PAGES, dtype=dtype))
        self.position = np.zeros(3, np.int32)

    def feed(self, counts):
        """Appends counts[i] tokens to row i; returns logits [3, V]."""
        tokens = np.zeros((3, max(max(counts), 1)), np.int32)
        for row, count in enumerate(counts):
            start = self.position[row]
            if count:
                self.paged.grow(row, start, start + count)
            tokens[row, :count] = self.sequences[row, start : start + count]
        arguments = (CONFIG, self.params, self.cache, self.paged.snapshot())
        if tokens.shape[1] == 1:
            active = np.array(counts, bool)
            self.cache, logits = decode_step(*arguments, tokens[:, 0], self.position.copy(), active)
        else:
            padded = np.zeros((3, 64), np.int32)
            padded[:, : tokens.shape[1]] = tokens
            self.cache, logits = prefill(*arguments, padded, self.position.copy(), np.array(counts, np.int32))
        self.position += np.array(counts, np.int32)
        return np.asarray(logits)


def worst(rows, logits, expected, counts):
    scale = np.abs(expected).max()
    return max(
        np.abs(logits[row] - expected[row, rows.position[row] - 1]).max() / scale
        for row, count in enumerate(counts)
        if count
    )


def test_ragged_chunks_then_ragged_decode(params, sequences, expected):
    rows = Rows(params, sequences)
    for counts in [(64, 1, 0), (5, 64, 0), (0, 64, 63), (64, 3, 2), (64, 60, 0), (3, 64, 0)]:
        assert worst(rows, rows.feed(counts), expected, counts) < 2e-5
    for step in range(80):
        counts = (int(rows.position[0] < LENGTH), int(step % 3 != 0), int(step > 40))
        assert worst(rows, rows.feed(counts), expected, counts) < 2e-5


@pytest.mark.parametrize("offset", [0, 1, 5, 6, 31, 63])
def test_chunk_boundaries_at_window_and_page_edges(params, sequences, expected, offset):
    """The window is 70 and pages are 64: boundaries around both, and around the ring's wrap."""
    rows = Rows(params, sequences)
    if offset:
        rows.feed((offset, 0, 0))
    while rows.position[0] + 64 <= 260:
        assert worst(rows, rows.feed((64, 0, 0)), expected, (1, 0, 0)) < 2e-5
    for _ in range(8):
        assert worst(rows, rows.feed((1, 0, 0)), expected, (1, 0, 0)) < 2e-5


def test_a_reused_page_does_not_leak(params, sequences, expected):
    """A row that ends gives its pages to the next; the newcomer reads only its own."""
    rows = Rows(params, sequences)
    for _ in range(4):
        rows.feed((64, 64, 0))
    rows.paged.release(0)
    rows.position[0] = 0
    assert worst(rows, rows.feed((3, 0, 64)), expected, (1, 0, 1)) < 2e-5


def test_neighbours_do_not_matter(params, sequences):
    """Given equal KV, a row's logits have the same bits whatever its neighbours do."""
    alone, crowded = Rows(params, sequences), Rows(params, sequences)
    for _ in range(2):
        alone.feed((64, 0, 0))
        crowded.feed((64, 31, 64))
    for _ in range(5):
        a, b = alone.feed((1, 0, 0)), crowded.feed((1, 1, 1))
        assert (a[0] == b[0]).all()


def test_idle_rows_write_nothing(params, sequences):
    rows = Rows(params, sequences)
    rows.feed((64, 64, 64))
    before = [np.asarray(pages) for pages in rows.cache]
    rows.feed((0, 0, 0))
    for a, b in zip(before, rows.cache, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))


def test_the_cache_is_updated_in_place(params, sequences):
    rows = Rows(params, sequences)
    rows.feed((64, 64, 64))
    rows.feed((1, 1, 1))  # both shapes are compiled now
    before = [pages.unsafe_buffer_pointer() for pages in rows.cache]
    rows.feed((64, 64, 64))
    rows.feed((1, 0, 1))
    assert [pages.unsafe_buffer_pointer() for pages in rows.cache] == before


def test_generate_is_greedy_decoding(params, sequences):
    prompt = [int(token) for token in sequences[0][:150]]
    out = list(generate(CONFIG, params, prompt, 40, stop_token_ids=()))
    logits = forward(CONFIG, params, np.array([prompt + out], np.int32))[0, len(prompt) - 1 : -1]
    best = np.sort(np.asarray(logits), axis=-1)
    clear = best[:, -1] - best[:, -2] > 1e-3
    assert clear.sum() > 30
    assert (np.argmax(logits, axis=-1) == np.array(out))[clear].all()
    assert list(generate(CONFIG, params, np.array(prompt), 3, stop_token_ids=())) == out[:3]
    stop = out[10]
    assert list(generate(CONFIG, params, prompt, 40, stop_token_ids={stop})) == out[: out.index(stop)]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "named"),
    [([], 1, "prompt is empty"), ([199], 1, "token 199"), ([-1], 1, "token -1"), ([1] * 1000, 25, "context of 1024")],
)
def test_generate_refuses(params, prompt, max_tokens, named):
    with pytest.raises(ValueError, match=named):
        next(generate(CONFIG, params, prompt, max_tokens))


def test_generate_draws_as_many_as_asked(params, sequences):
    """Whatever part of a quantum that is, with every kind of stop."""
    prompt = [int(token) for token in sequences[1][:70]]
    sampling = SamplingParams(temperature=3, top_p=0.95, seed=5)
    out = list(generate(CONFIG, params, prompt, 19, sampling, stop_token_ids=()))
    assert len(set(out)) > 5
    for count in (0, 1, 2, 8, 9, 10, 17, 18):
        assert list(generate(CONFIG, params, prompt, count, sampling, stop_token_ids=())) == out[:count]
    for stop in (out[0], out[1], out[9], out[18]):
        assert list(generate(CONFIG, params, prompt, 19, sampling, stop_token_ids={stop})) == out[: out.index(stop)]


def test_generate_penalises_and_reports(params, sequences):
    """Against the forward pass: greedy tokens under a repetition penalty of prompt and text, and their logprobs."""
    prompt = [int(token) for token in sequences[1][:70]]
    sampling = SamplingParams(temperature=0, repetition_penalty=1.5, logprobs=2)
    out = list(generate_with_logprobs(CONFIG, params, prompt, 20, sampling, stop_token_ids=()))
    tokens = [token for token, _ in out]
    assert list(generate(CONFIG, params, prompt, 20, sampling, stop_token_ids=())) == tokens
    assert tokens != list(generate(CONFIG, params, prompt, 20, stop_token_ids=()))
    logits = np.array(forward(CONFIG, params, np.array([prompt + tokens], np.int32))[0, len(prompt) - 1 : -1])
    for step, (token, logprobs) in enumerate(out):
        row, seen = logits[step], sorted({*prompt, *tokens[:step]})
        row[seen] = np.where(row[seen] > 0, row[seen] / 1.5, row[seen] * 1.5)
        row -= np.log(np.exp(row - row.max()).sum()) + row.max()
        assert token == np.argmax(row)
        assert [one for one, _ in logprobs.top] == np.argsort(-row)[:2].tolist()
        np.testing.assert_allclose([logprobs.logprob, logprobs.top[0][1]], row[token], atol=2e-4)


def test_generate_decodes_no_further_than_it_is_read(params, monkeypatch):
    taken = []
    monkeypatch.setattr(
        JaxDecoder, "decode", lambda self, cache, tables, rows, steps, deliver: taken.append(rows) or cache
    )
    assert len(list(itertools.islice(generate(CONFIG, params, [5, 6], 40, stop_token_ids=()), 1))) == 1
    assert taken == []


def test_generate_names_the_position_of_logits_that_are_not_finite(params):
    broken = params | {"final_norm": params["final_norm"] * jnp.nan}
    with pytest.raises(FloatingPointError, match="position 3 "):
        next(generate(CONFIG, broken, [5, 6, 7], 4))


def test_generate_takes_a_backend(params):
    with pytest.raises(BackendError, match="'torch'"):
        next(generate(CONFIG, params, [5], 4, backend="torch"))


def test_generate_without_sliding_layers():
    """A prompt longer than a page, with no page of the sliding group."""
    config = tiny_config(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    params = tiny_params(config)
    out = list(generate(config, params, list(range(100)), 3, stop_token_ids=()))
    logits = forward(config, params, np.array([[*range(100), *out]], np.int32))[0, 99:-1]
    assert np.argmax(logits, axis=-1).tolist() == out


def test_nan_among_visible_keys_reaches_the_logits(params, sequences):
    """A damaged page must end a request with an error, not be read as if it held nothing."""
    rows = Rows(params, sequences)
    rows.feed([5, 5, 5])
    pages = rows.paged.snapshot().full
    layer = CONFIG.layer_types.index("full_attention")
    damaged = rows.cache[layer].at[pages[1, 0], 0, :, 2].set(jnp.nan)
    rows.cache = (*rows.cache[:layer], damaged, *rows.cache[layer + 1 :])
    logits = np.asarray(rows.feed([1, 1, 1]))
    assert np.isnan(logits[1]).all()
    assert np.isfinite(logits[[0, 2]]).all()

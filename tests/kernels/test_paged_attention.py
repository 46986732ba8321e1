"""Attention over pages: the kernel itself on a CPU, in the interpreter, and on a GPU at full size."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from north_jax.attention import paged_attention
from north_jax.kernels.paged_attention import AttentionSizes, Spread, paged_attention_kernel
from north_jax.kernels.query_tiles import NOTHING, TILE, TOKEN_ALIGN, query_tiles, tile_count
from north_jax.kv_cache import PAGE_SIZE

_reference = jax.jit(paged_attention, static_argnums=5)
_compiled = jax.jit(paged_attention_kernel, static_argnames=("window", "blocks"))


class Prompts:
    """Packed queries of several prompts over shuffled pages, whose tables are rings that the positions may wrap."""

    def __init__(self, prompts, *, heads, kv_heads, d, entries, seed=0):
        rng = np.random.default_rng(seed)
        lengths = [length for _, length in prompts]
        ends = np.cumsum([-(-length // TOKEN_ALIGN) * TOKEN_ALIGN for length in lengths])
        self.offset = jnp.asarray([0, *ends[:-1]], jnp.int32)
        self.start, self.length = (jnp.asarray(values, jnp.int32) for values in zip(*prompts, strict=True))
        self.tokens = -(-int(ends[-1]) // PAGE_SIZE) * PAGE_SIZE
        count = len(prompts) * entries
        self.table = jnp.asarray(rng.permutation(count).reshape(len(prompts), entries), jnp.int32)
        keys = jax.random.split(jax.random.key(seed))
        self.pages = jax.random.normal(keys[0], (count, 2, kv_heads, PAGE_SIZE, d), jnp.bfloat16)
        self.q = jax.random.normal(keys[1], (self.tokens, heads, d), jnp.bfloat16) * 1.5

    def kernel(self, window, **options):
        tiles, count = query_tiles(self.offset, self.start, self.length, tokens=self.tokens, window=window)
        return paged_attention_kernel(self.q, self.pages, self.table, tiles, count, window=window, **options)

    def differences(self, result, window, queries=slice(None)):
        """For each prompt the largest difference from the reference in float32, of some of its queries."""
        pages = self.pages.astype(jnp.float32)
        for i, (first, length) in enumerate(zip(self.offset.tolist(), self.length.tolist(), strict=True)):
            if not length:
                continue
            rows = slice(first, first + length)
            one = (a[i : i + 1] for a in (self.table, self.start, self.length))
            expected = _reference(self.q[None, rows].astype(jnp.float32), pages, *one, window)[0]
            yield float(jnp.max(jnp.abs(result[rows].astype(jnp.float32) - expected)[queries]))


def test_tiles_cover_every_query_once_and_come_longest_first():
    offset, start, length = np.array([0, 136, 144, 144]), np.array([0, 500, 9, 130]), np.array([130, 3, 0, 300])
    arrays = (jnp.asarray(a, jnp.int32) for a in (offset, start, length))
    tiles, count = map(np.asarray, query_tiles(*arrays, tokens=448, window=100))
    assert len(tiles) == tile_count(448, 4)
    assert int(count[0]) == 6 and (tiles[6:, 0] == NOTHING).all() and (tiles[6:, 5] == 0).all()
    assert (np.diff(tiles[:, 5]) <= 0).all()
    seen = np.zeros(448, int)
    for prompt, first, position, queries, first_page, blocks in tiles[:6]:
        assert 0 < queries <= TILE
        assert position - start[prompt] == first - offset[prompt]
        assert first_page == max(position - 99, 0) // PAGE_SIZE
        assert first_page + 2 * blocks > (position + queries - 1) // PAGE_SIZE >= first_page + 2 * (blocks - 1)
        seen[first : first + queries] += 1
    expected = np.zeros(448, int)
    for prompt in range(4):
        expected[offset[prompt] : offset[prompt] + length[prompt]] = 1
    np.testing.assert_array_equal(seen, expected)


@pytest.mark.parametrize(
    ("prompts", "window", "sizes"),
    [
        ([(0, 70), (100, 20)], None, AttentionSizes()),
        ([(0, 130), (190, 40), (7, 0)], 100, AttentionSizes()),
        ([(63, 65)], 64, AttentionSizes(take_turns=False)),
    ],
)
def test_the_kernel_in_the_interpreter(prompts, window, sizes):
    case = Prompts(prompts, heads=2, kv_heads=1, d=64, entries=4)
    interpret = plgpu.InterpretGPUParams(out_of_bounds_reads="uninitialized")
    result = case.kernel(window, sizes=sizes, blocks=2, interpret=interpret)
    assert max(case.differences(result, window)) < 0.02


def test_rows_are_moved_meanwhile():
    case = Prompts([(0, 70), (100, 20)], heads=2, kv_heads=1, d=64, entries=4)
    rng = np.random.default_rng(2)
    tokens, top, rows = 11, 3, 40
    h = jnp.asarray(rng.normal(size=(tokens, 512)), jnp.bfloat16)
    row = rng.permutation(rows)[: tokens * top].astype(np.int32)
    row[2 * top : 3 * top] = rows  # a token without rows
    interpret = plgpu.InterpretGPUParams(out_of_bounds_reads="uninitialized")
    spread = Spread(h, jnp.asarray(row), rows)
    result, moved = case.kernel(None, blocks=2, spread=spread, interpret=interpret)
    assert max(case.differences(result, None)) < 0.02
    held = row < rows
    np.testing.assert_array_equal(np.asarray(moved)[row[held]], np.asarray(h)[np.arange(tokens * top)[held] // top])


def test_what_does_not_fit_is_refused():
    case = Prompts([(0, 8)], heads=2, kv_heads=1, d=32, entries=1)
    with pytest.raises(ValueError, match="d of 64 or 128"):
        case.kernel(None, blocks=2)
    case = Prompts([(0, 8)], heads=2, kv_heads=1, d=64, entries=1)
    case.pages = case.pages.astype(jnp.float32)
    with pytest.raises(ValueError, match="pages are float32"):
        case.kernel(None, blocks=2)


@pytest.mark.parametrize("sizes", [AttentionSizes(), AttentionSizes(cluster=2)])
def test_it_lowers_for_cuda_without_a_gpu(sizes):
    case = Prompts([(0, 300)], heads=8, kv_heads=1, d=128, entries=5)
    tiles = query_tiles(case.offset, case.start, case.length, tokens=case.tokens, window=128)
    f = jax.jit(partial(paged_attention_kernel, window=128, blocks=132, sizes=sizes))
    assert "mosaic_gpu" in f.trace(case.q, case.pages, case.table, *tiles).lower(lowering_platforms=("cuda",)).as_text()


def on_a_gpu(case, window):
    tiles = query_tiles(case.offset, case.start, case.length, tokens=case.tokens, window=window)
    return _compiled(case.q, case.pages, case.table, *tiles, window=window, blocks=132)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 128, 4096])
def test_chunks_that_begin_at_every_offset_of_a_page_on_a_gpu(window):
    """Chunks of 100 tokens from each of 64 positions modulo the page size, around the window's edge, at once."""
    base = 4096 if window == 4096 else 192
    prompts = [(base + i, 100) for i in range(PAGE_SIZE)]
    case = Prompts(prompts, heads=32, kv_heads=4, d=128, entries=(base + 256) // PAGE_SIZE)
    worst = list(case.differences(on_a_gpu(case, window), window))
    assert len(worst) == PAGE_SIZE and max(worst) < 0.02, worst


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 4096])
def test_long_chunks_on_a_gpu(window):
    case = Prompts([(8192, 4096), (0, 1), (5000, 999)], heads=32, kv_heads=4, d=128, entries=192)
    result = on_a_gpu(case, window)
    assert max(case.differences(result, window)) < 0.02
    again = on_a_gpu(case, window)
    valid = np.concatenate([np.arange(4096), [4096], 4104 + np.arange(999)])
    assert (result[valid] == again[valid]).all(), "not the same bits twice"

"""Pages: nobody owns two, none leaks, and a row always holds what its window needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_config

from north_jax.config import FULL, SLIDING
from north_jax.kv_cache import (
    NO_PAGE,
    PAGE_SIZE,
    OutOfPages,
    PageAllocator,
    PagedRows,
    cache_bytes,
    init_cache,
    pages_for,
    ring_entries,
)

CONFIG = tiny_config()  # window 70


def paged_rows(rows=3, max_context=600, max_chunk=100, full_pages=20, sliding_pages=9):
    return PagedRows(
        CONFIG,
        rows=rows,
        max_context=max_context,
        max_chunk=max_chunk,
        full_pages=full_pages,
        sliding_pages=sliding_pages,
    )


def test_allocator():
    allocator = PageAllocator(3)
    assert allocator.allocate(2) == [0, 1]
    with pytest.raises(OutOfPages, match="2 pages needed, 1 of 3 are free"):
        allocator.allocate(2)
    assert allocator.free == 1
    allocator.release([0])
    with pytest.raises(ValueError, match="page 0 is not in use"):
        allocator.release([0])
    assert allocator.allocate(2) == [0, 2]
    with pytest.raises(ValueError, match="at least one page"):
        PageAllocator(0)


def test_ring_has_room_for_window_and_chunk_at_every_offset():
    for chunk in (1, 2, 63, 64, 65, 100):
        entries = ring_entries(CONFIG, 10_000, chunk)
        for start in range(200, 200 + PAGE_SIZE):
            first = max(start - CONFIG.sliding_window + 1, 0) // PAGE_SIZE
            assert pages_for(start + chunk) - first <= entries
    assert ring_entries(CONFIG, 64, 100) == 1


def test_init_cache_counts_its_bytes():
    cache = init_cache(CONFIG, full_pages=3, sliding_pages=2, dtype="float32")
    assert [len(pages) for pages in cache] == [3, 2, 2, 2, 3]
    assert sum(pages.nbytes for pages in cache) == cache_bytes(CONFIG, full_pages=3, sliding_pages=2, itemsize=4)


def test_growth_is_atomic():
    rows = paged_rows(full_pages=3, sliding_pages=9)
    rows.grow(0, 0, 100)
    before = rows.free, *rows.snapshot()
    with pytest.raises(OutOfPages, match="2 more full pages"):
        rows.grow(1, 0, 100)
    assert rows.free == before[0]
    assert all((now == then).all() for now, then in zip(rows.snapshot(), before[1:], strict=True))


def test_a_snapshot_does_not_follow_the_rows():
    rows = paged_rows()
    rows.grow(0, 0, 70)
    before = rows.snapshot()
    held = [table.copy() for table in before]
    rows.grow(0, 70, 170)
    rows.release(0)
    assert all((table == then).all() for table, then in zip(before, held, strict=True))


def test_limits_are_named():
    rows = paged_rows()
    with pytest.raises(ValueError, match="max_context is 600"):
        rows.grow(0, 590, 601)
    with pytest.raises(ValueError, match="max_chunk is 100"):
        rows.grow(0, 0, 101)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100), st.booleans()), max_size=60))
def test_random_lives(steps):
    """Rows grow, run out and end at random; after each step the tables tell the truth."""
    rows = paged_rows()
    length = [0, 0, 0]
    for row, count, end in steps:
        if end:
            rows.release(row)
            length[row] = 0
        else:
            if length[row] + count > 600:
                continue
            before = rows.free, *rows.snapshot()
            try:
                rows.grow(row, length[row], length[row] + count)
            except OutOfPages:
                assert rows.free == before[0]
                assert all((now == then).all() for now, then in zip(rows.snapshot(), before[1:], strict=True))
                continue
            length[row] += count
            check_row(rows, row, length[row] - count, length[row])
        for table, free, total in zip(rows.snapshot(), rows.free, (20, 9), strict=True):
            owned = table[table != NO_PAGE]
            assert len(owned) == len(set(owned)) == total - free


def check_row(rows, row, start, end):
    """Every position that a query in [start, end) sees has a page in both groups."""
    full, sliding = rows.snapshot()
    for position in range(end):
        assert full[row, position // PAGE_SIZE] != NO_PAGE
    for position in range(max(start - CONFIG.sliding_window + 1, 0), end):
        assert sliding[row, position // PAGE_SIZE % sliding.shape[1]] != NO_PAGE
    first = max(start - CONFIG.sliding_window + 1, 0) // PAGE_SIZE
    assert np.count_nonzero(sliding[row] != NO_PAGE) == pages_for(end) - first


@pytest.mark.parametrize("kind", [FULL, SLIDING])
def test_a_group_without_layers_holds_no_pages(kind):
    config = tiny_config(layer_types=[kind] * 5)
    rows = PagedRows(config, rows=1, max_context=600, max_chunk=100, full_pages=10, sliding_pages=10)
    for start in range(0, 600, 100):
        rows.grow(0, start, start + 100)
    used = [10 - free for free in rows.free]
    assert used == ([10, 0] if kind == FULL else [0, 4])  # positions 431 to 599: pages 6 to 9
    rows.release(0)
    assert rows.free == (10, 10)

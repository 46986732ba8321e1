"""The paged KV cache: device arrays of pages, and the host's account of who owns which page.

A page holds the keys and values of 64 positions of one layer, `[2 (k, v), K, 64, d]`, so one head's part is
contiguous. Layers form two groups with page numbers of their own: *full* layers keep every position, *sliding* layers a
window, in a ring of table entries. Position p of a row lies in entry `(p // 64) % entries` of the row's table in both
groups; −1 is "no page".
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .config import FULL, SLIDING, Config

PAGE_SIZE = 64  # positions a page holds
NO_PAGE = -1

type KVCache = tuple[jax.Array, ...]  # one array a layer: [pages of its group, 2, K, PAGE_SIZE, d]


class PageTables(NamedTuple):
    """Page numbers of N rows, int32, NO_PAGE where there is none: device or host arrays."""

    full: jax.Array | np.ndarray  # [N, entries]
    sliding: jax.Array | np.ndarray  # [N, ring]

    def of_layer(self, config: Config, layer: int) -> jax.Array | np.ndarray:
        """The table of the group that `layer` belongs to."""
        return self.full if config.layer_types[layer] == FULL else self.sliding


class OutOfPages(RuntimeError):
    """A group has fewer free pages than a row needs; nothing was changed."""


def pages_for(positions: int) -> int:
    """Pages that hold `positions` positions from a page's start on."""
    return -(-positions // PAGE_SIZE)


def ring_entries(config: Config, max_context: int, max_chunk: int) -> int:
    """Table entries a sliding row needs: its window and a chunk of `max_chunk` new tokens, wherever they begin."""
    if SLIDING not in config.layer_types:
        return 1
    return min(pages_for(config.sliding_window - 1 + max_chunk) + 1, pages_for(max_context))


def init_cache(config: Config, *, full_pages: int, sliding_pages: int, dtype: jnp.dtype | str) -> KVCache:
    """Allocates the pages of all layers, zeroed.

    Args:
      config: the model's configuration.
      full_pages: pages of every full layer.
      sliding_pages: pages of every sliding layer.
      dtype: of keys and values.
    """
    shape = (2, config.num_key_value_heads, PAGE_SIZE, config.head_dim)
    counts = {FULL: full_pages, SLIDING: sliding_pages}
    return tuple(jnp.zeros((counts[kind], *shape), dtype) for kind in config.layer_types)


def cache_bytes(config: Config, *, full_pages: int, sliding_pages: int, itemsize: int) -> int:
    """Bytes that `init_cache` allocates."""
    per_page = 2 * config.num_key_value_heads * PAGE_SIZE * config.head_dim * itemsize
    full = config.layer_types.count(FULL)
    return per_page * (full * full_pages + (config.num_hidden_layers - full) * sliding_pages)


class PageAllocator:
    """Who uses which page of one group: pages are numbers from 0 to `count` − 1.

    A page may have several users. One that is *kept*, because somebody remembers what it holds, becomes idle instead of
    free when its last user leaves; an idle page may be used again as it is, or dropped, which frees it.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"a page group needs at least one page, got {count}")
        self.count = count
        self._free = list(range(count - 1, -1, -1))  # the lowest number is handed out first
        self._users = [0] * count
        self._kept = [False] * count
        self._idle: dict[int, None] = {}  # in the order in which they became idle

    @property
    def free(self) -> int:
        """Pages nobody uses or keeps."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Pages that are kept and that nobody uses."""
        return len(self._idle)

    @property
    def oldest_idle(self) -> int:
        """The page that has been idle for longest; there must be one."""
        return next(iter(self._idle))

    def users(self, page: int) -> int:
        return self._users[page]

    def is_kept(self, page: int) -> bool:
        return self._kept[page]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free pages, for one user each. Raises OutOfPages, without effect, when fewer are free."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages needed, {len(self._free)} of {self.count} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, page: int) -> None:
        """Adds a user to a page that has one or is idle. Raises ValueError for a free page."""
        if not (self._users[page] or self._kept[page]):
            raise ValueError(f"page {page} is free")
        self._idle.pop(page, None)
        self._users[page] += 1

    def release(self, pages: list[int]) -> None:
        """Takes one user from each page. Raises ValueError for a page that is not in use."""
        for page in pages:
            if not 0 <= page < self.count or not self._users[page]:
                raise ValueError(f"page {page} is not in use")
            self._users[page] -= 1
            if self._users[page]:
                continue
            if self._kept[page]:
                self._idle[page] = None
            else:
                self._free.append(page)

    def keep(self, page: int) -> None:
        """Marks a page that is in use as one to become idle. Raises ValueError for a page that is not in use."""
        if not self._users[page]:
            raise ValueError(f"page {page} is not in use")
        self._kept[page] = True

    def drop(self, page: int) -> None:
        """Ends the keeping of a page; an idle one is free then. Raises ValueError for a page that is not kept."""
        if not self._kept[page]:
            raise ValueError(f"page {page} is not kept")
        self._kept[page] = False
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)


@dataclasses.dataclass
class Group:
    """One group's allocator and tables, and the half-open range of logical pages that each row holds."""

    has_layers: bool  # a model may lack full or sliding layers: then rows hold no pages of the group
    allocator: PageAllocator
    table: np.ndarray  # [rows, entries] int32
    held: list[range]

    def plan(self, row: int, first: int, end: int) -> tuple[range, range]:
        """Logical pages to drop and to add so that the row holds [first, end)."""
        if not self.has_layers:
            return range(0), range(0)
        held = self.held[row]
        keep_from = min(max(first, held.start), held.stop)
        return range(held.start, keep_from), range(max(held.stop, first), max(end, held.stop))

    def apply(self, row: int, drop: range, add: range) -> None:
        """Drops first, so that what a row gives up serves its own growth."""
        for logical in drop:
            self.leave(row, logical)
        for logical, page in zip(add, self.allocator.allocate(len(add)), strict=True):
            self.table[row, logical % self.table.shape[1]] = page
        self.held[row] = _joined(self.held[row], drop, add)

    def adopt(self, row: int, keep_from: int, first: int, pages: list[int]) -> None:
        """Makes the row share `pages` as logical pages first, first + 1, …, and drops those before keep_from."""
        held = self.held[row]
        drop = range(held.start, min(max(keep_from, held.start), held.stop))
        for page in pages:
            self.allocator.share(page)
        for logical in drop:
            self.leave(row, logical)
        for logical, page in enumerate(pages, start=first):
            self.table[row, logical % self.table.shape[1]] = page
        self.held[row] = _joined(held, drop, range(first, first + len(pages)))

    def page(self, row: int, logical: int) -> int:
        """The number of a logical page that the row holds, else NO_PAGE."""
        return int(self.table[row, logical % self.table.shape[1]]) if logical in self.held[row] else NO_PAGE

    def exchange(self, row: int, logical: int, page: int) -> None:
        """Puts a page of the same content in the place of the row's own."""
        self.allocator.share(page)
        self.allocator.release([self.page(row, logical)])
        self.table[row, logical % self.table.shape[1]] = page

    def leave(self, row: int, logical: int) -> None:
        """Takes the row from a page's users. The table forgets the page, `held` is the caller's to change."""
        entry = logical % self.table.shape[1]
        self.allocator.release([int(self.table[row, entry])])
        self.table[row, entry] = NO_PAGE

    def freed(self, row: int, drop: range) -> int:
        """How many of the pages to drop are free then."""
        pages = [self.page(row, logical) for logical in drop]
        return sum(self.allocator.users(page) == 1 and not self.allocator.is_kept(page) for page in pages)


def _joined(held: range, drop: range, add: range) -> range:
    """The range held after `drop`, from its beginning, and `add`, at its end."""
    start = drop.stop if drop.stop < held.stop else (add.start if add else drop.stop)
    return range(start, add.stop if add else max(held.stop, start))


class PagedRows:
    """Who owns which page: tables for a fixed number of rows over two groups of pages."""

    def __init__(
        self, config: Config, *, rows: int, max_context: int, max_chunk: int, full_pages: int, sliding_pages: int
    ) -> None:
        """Sizes the tables.

        Args:
          config: the model's configuration.
          rows: rows of the tables, one a slot.
          max_context: most positions a row may hold.
          max_chunk: most tokens appended at once; the ring of a sliding row has room for them.
          full_pages: pages of the full group.
          sliding_pages: pages of the sliding group.
        """
        self._window = config.sliding_window
        self.max_context = max_context
        self.max_chunk = max_chunk

        def group(kind: str, entries: int, pages: int) -> Group:
            table = np.full((rows, entries), NO_PAGE, np.int32)
            return Group(kind in config.layer_types, PageAllocator(pages), table, [range(0)] * rows)

        self._full = group(FULL, pages_for(max_context), full_pages)
        self._sliding = group(SLIDING, ring_entries(config, max_context, max_chunk), sliding_pages)

    def snapshot(self) -> PageTables:
        """A copy of the tables as they stand, [rows, entries] of host arrays: a device call may keep it."""
        return PageTables(self._full.table.copy(), self._sliding.table.copy())

    @property
    def groups(self) -> tuple[Group, Group]:
        """The full and the sliding group."""
        return self._full, self._sliding

    @property
    def free(self) -> tuple[int, int]:
        """Free pages of the full and of the sliding group."""
        return self._full.allocator.free, self._sliding.allocator.free

    def grow(self, row: int, start: int, end: int) -> None:
        """Makes room for positions [start, end) of a row and frees sliding pages that left the window.

        Raises:
          ValueError: end exceeds max_context, or the range exceeds max_chunk.
          OutOfPages: a group has too few free pages; nothing was changed.
        """
        if end > self.max_context:
            raise ValueError(f"row {row} would hold {end} positions, max_context is {self.max_context}")
        if end - start > self.max_chunk:
            raise ValueError(f"{end - start} tokens at once, max_chunk is {self.max_chunk}")
        full = self._full.plan(row, 0, pages_for(end))
        sliding = self._sliding.plan(row, self.first_seen(start), pages_for(end))
        for name, group, (drop, add) in (("full", self._full, full), ("sliding", self._sliding, sliding)):
            need = len(add) - group.freed(row, drop)
            if need > group.allocator.free:
                raise OutOfPages(
                    f"row {row} needs {need} more {name} pages for {end} positions, "
                    f"{group.allocator.free} of {group.allocator.count} are free"
                )
        self._full.apply(row, *full)
        self._sliding.apply(row, *sliding)

    def first_seen(self, position: int) -> int:
        """The first logical page of a sliding layer that a query at `position` sees."""
        return max(position - self._window + 1, 0) // PAGE_SIZE

    def trim(self, row: int, start: int) -> None:
        """Gives up the sliding pages that no query from position `start` on sees."""
        drop, _ = self._sliding.plan(row, self.first_seen(start), 0)
        self._sliding.apply(row, drop, range(0))

    def missing(self, row: int, end: int) -> tuple[int, int]:
        """How many more pages of the full and of the sliding group a trimmed row needs to hold `end` positions."""
        full, sliding = (
            max(pages_for(end) - group.held[row].stop, 0) if group.has_layers else 0 for group in self.groups
        )
        return full, sliding

    def release(self, row: int) -> None:
        """Takes the row from the users of all its pages, the last ones first."""
        for group in self.groups:
            for logical in reversed(group.held[row]):
                group.leave(row, logical)
            group.held[row] = range(0)

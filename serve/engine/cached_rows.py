"""The rows of the KV cache with a memory: pages of finished blocks stay for requests that begin with the same tokens.

A *block* is the 64 tokens of one page. Blocks form a tree: a block is known by its tokens and the block before it, so a
path from the root is a prefix that some request had. Each block names a page of the full group, and one of the sliding
group as long as that exists. A new row takes over the pages of the longest path that its tokens follow and that leaves
the sliding layers what they see: all pages of the window before its end. What lies beyond is computed anew.

Pages that no row uses are evicted, the longest idle first, when a row needs room. Two rules keep the tree whole: a row
uses the pages of all blocks on its path (where it has computed a known block itself, it exchanges its page for the
known one), and it leaves the last ones first. So a block is never idle for longer than those that follow it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from north_jax.config import FULL, Config
from north_jax.kv_cache import NO_PAGE, PAGE_SIZE, Group, OutOfPages, PagedRows, PageTables

from .memory import CachePlan


class _Block:
    """A node of the tree. A root stands for the empty prefix of a salt, its `tokens`, and has no page."""

    __slots__ = ("following", "full", "parent", "sliding", "tokens")

    def __init__(self, parent: _Block | None, tokens: bytes, full: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.full = full
        self.sliding = NO_PAGE  # none, or evicted
        self.following: dict[bytes, _Block] = {}


class CachedRows:
    """Pages for the slots of an engine; the methods say for each slot how its row grows, ends, and what it holds."""

    def __init__(self, config: Config, plan: CachePlan, *, reuse: bool) -> None:
        """Sizes the tables.

        Args:
          config: the model's configuration.
          plan: slots, context, chunk and pages.
          reuse: whether finished blocks are remembered. (A model without full layers has none to remember.)
        """
        self._rows = PagedRows(
            config,
            rows=plan.slots,
            max_context=plan.max_context,
            max_chunk=plan.chunk,
            full_pages=plan.full_pages,
            sliding_pages=plan.sliding_pages,
        )
        self._full, self._sliding = self._rows.groups
        self._reuse = reuse and FULL in config.layer_types
        self._forget_all(plan.slots)

    def _forget_all(self, slots: int) -> None:
        self._root = _Block(None, b"", NO_PAGE)
        self._roots = {b"": self._root}  # by salt
        self._at = [(self._root, 0)] * slots  # the last block on each row's path, and how many there are
        self._of_full: dict[int, _Block] = {}  # page → block
        self._of_sliding: dict[int, _Block] = {}

    def snapshot(self) -> PageTables:
        """A copy of the tables as they stand; see `PagedRows.snapshot`."""
        return self._rows.snapshot()

    @property
    def available(self) -> tuple[int, int]:
        """Pages of the full and of the sliding group that a row can get: free or idle."""
        full, sliding = (group.allocator.free + group.allocator.idle for group in self._rows.groups)
        return full, sliding

    @property
    def idle(self) -> tuple[int, int]:
        """Pages of the full and of the sliding group that are remembered and that no row uses."""
        return self._full.allocator.idle, self._sliding.allocator.idle

    def begin(self, slot: int, salt: str) -> None:
        """An empty row begins: it shares blocks with rows of the same salt alone."""
        key = salt.encode(errors="replace")
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = _Block(None, key, NO_PAGE)
        self._at[slot] = (root, 0)

    def missing(self, slot: int, start: int, end: int) -> tuple[int, int]:
        """Pages of both groups that a row needs further to append positions [start, end)."""
        self._rows.trim(slot, start)
        return self._rows.missing(slot, end)

    def grow(self, slot: int, start: int, end: int) -> None:
        """Makes room for positions [start, end) of a row. Raises OutOfPages, or ValueError as `PagedRows.grow` does."""
        for group, need in zip(self._rows.groups, self.missing(slot, start, end), strict=True):
            self._evict(group, need)
        self._rows.grow(slot, start, end)

    def release(self, slot: int) -> None:
        """Ends a row. Its finished blocks stay as long as nobody needs the room."""
        self._rows.release(slot)
        block, count = self._at[slot]
        if count == 0:
            self._forget_empty(block)
        self._at[slot] = (self._root, 0)

    def forget(self) -> None:
        """Forgets every block: the device has lost the pages' contents. No row may hold pages."""
        for group, blocks in ((self._full, self._of_full), (self._sliding, self._of_sliding)):
            for page in blocks:
                group.allocator.drop(page)
        self._forget_all(len(self._at))

    def place(self, slot: int) -> object:
        """Stands for the tokens of a row's blocks: equal for rows that begin with the same ones."""
        return id(self._at[slot][0])

    def take_known(self, slot: int, tokens: Sequence[int], position: int) -> int:
        """Continues a row with remembered blocks.

        Args:
          slot: whose row holds `position` positions.
          tokens: what the row is to hold. At least one of them is left to compute.
          position: nothing happens within a block.

        Returns:
          the position that the row has reached.
        """
        block, count = self._at[slot]
        if not self._reuse or position != count * PAGE_SIZE:
            return position
        path: list[_Block] = []
        usable = 0  # blocks of the path after which the sliding layers have all they see
        unbroken = 0  # blocks at the path's end that have their sliding page; the row itself has those before
        for number in range(count, (len(tokens) - 1) // PAGE_SIZE):
            following = block.following.get(_block_tokens(tokens, number))
            if following is None:
                break
            block = following
            path.append(block)
            unbroken = unbroken + 1 if block.sliding != NO_PAGE else 0
            first = max(self._rows.first_seen((number + 1) * PAGE_SIZE), count)
            if not self._sliding.has_layers or unbroken >= number + 1 - first:
                usable = len(path)
        if not usable:
            return position
        path = path[:usable]
        end = count + usable
        self._full.adopt(slot, 0, count, [block.full for block in path])
        if self._sliding.has_layers:
            seen = self._rows.first_seen(end * PAGE_SIZE)
            first = max(seen, count)
            self._sliding.adopt(slot, seen, first, [block.sliding for block in path[first - count :]])
        self._at[slot] = (path[-1], end)
        return end * PAGE_SIZE

    def remember(self, slot: int, tokens: Sequence[int], position: int) -> None:
        """Notes the blocks that a row has finished. `tokens` are all of the row's, of which `position` are computed."""
        block, count = self._at[slot]
        if not self._reuse or position < (count + 1) * PAGE_SIZE:
            return
        for number in range(count, position // PAGE_SIZE):
            contents = _block_tokens(tokens, number)
            own = self._full.page(slot, number)
            following = block.following.get(contents)
            if following is None:
                following = block.following[contents] = _Block(block, contents, own)
                self._of_full[own] = following
                self._full.allocator.keep(own)
            elif following.full != own:
                self._full.exchange(slot, number, following.full)
            self._remember_sliding(slot, number, following)
            block = following
        self._at[slot] = (block, position // PAGE_SIZE)

    def _remember_sliding(self, slot: int, number: int, block: _Block) -> None:
        own = self._sliding.page(slot, number)
        if own == NO_PAGE or own == block.sliding:
            return
        if block.sliding == NO_PAGE:
            block.sliding = own
            self._of_sliding[own] = block
            self._sliding.allocator.keep(own)
        else:
            self._sliding.exchange(slot, number, block.sliding)

    def _evict(self, group: Group, need: int) -> None:
        """Frees idle pages until `need` are free. Raises OutOfPages, without effect, when there are too few."""
        allocator = group.allocator
        if need > allocator.free + allocator.idle:
            raise OutOfPages(f"{need} pages needed, {allocator.free + allocator.idle} of {allocator.count} are free")
        while allocator.free < need:
            page = allocator.oldest_idle
            if group is self._sliding:
                self._drop_sliding(self._of_sliding[page])
            else:
                self._drop(self._of_full[page])

    def _drop(self, block: _Block) -> None:
        assert not block.following and block.parent is not None, "a block was idle for longer than one after it"
        del block.parent.following[block.tokens]
        self._forget_empty(block.parent)
        del self._of_full[block.full]
        self._full.allocator.drop(block.full)
        self._drop_sliding(block)

    def _forget_empty(self, block: _Block) -> None:
        """Forgets a salt of which no block is left. (A row that still begins at its root only finds nothing later.)"""
        if block.parent is None and block is not self._root and not block.following:
            self._roots.pop(block.tokens, None)

    def _drop_sliding(self, block: _Block) -> None:
        if block.sliding != NO_PAGE:
            del self._of_sliding[block.sliding]
            self._sliding.allocator.drop(block.sliding)
            block.sliding = NO_PAGE


def _block_tokens(tokens: Sequence[int], number: int) -> bytes:
    """A block's tokens as a key: small, and its hash is computed once."""
    return array("i", tokens[number * PAGE_SIZE : (number + 1) * PAGE_SIZE]).tobytes()

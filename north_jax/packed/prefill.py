"""Packed prefill as compiled programs: a few a chunk size, each of a few layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from ..config import Config
from ..kv_cache import KVCache, PageTables
from ..layers import Array, Params
from .buckets import buckets
from .chunk import Chunk, begin, kinds, layers, programs
from .ending import finish, last_logits
from .packing import Packed, Piece, pack, packed_length

# Of the module, so that engines of one model compile them once.
_begin = jax.jit(begin, static_argnums=0)
_layers = jax.jit(layers, static_argnums=(0, 1), donate_argnums=(3, 4))
_finish = jax.jit(finish, static_argnums=0, donate_argnums=4)
_last_logits = jax.jit(last_logits, static_argnums=0)

_LOWERING = threading.Lock()  # it is Python's work, and the kernels' is not said to be thread-safe


class _Programs(NamedTuple):
    begin: Callable[..., Any]
    layers: dict[tuple[int, ...], Callable[..., Any]]  # by the kinds of their layers
    finish: Callable[..., Any]


class PackedPrefill:
    """Prefill of packed chunks. One thread runs chunks; any may compile."""

    def __init__(self, config: Config, params: Params, *, rows: int, most: int, entries: tuple[int, int]) -> None:
        """Nothing is compiled yet.

        Args:
          config: the model's configuration.
          params: DESIGN.md, "Parameters".
          rows: N, the most pieces of a chunk.
          most: tokens of the longest chunk, a multiple of 64.
          entries: of a row of the full and of the sliding page table.
        """
        self.lengths = buckets(most)
        self._config, self._params = config, params
        self._rows, self._entries = rows, entries
        *before, self._last = kinds(config)
        self._runs = programs(before)
        self._programs: dict[int, _Programs] = {}
        self._changed = threading.Lock()

    @property
    def needed(self) -> tuple[int, ...]:
        """What to compile first: the shortest and the longest chunk."""
        return tuple(dict.fromkeys((self.lengths[0], self.lengths[-1])))

    @property
    def shapes(self) -> tuple[int, ...]:
        """Lengths of all chunks that may be compiled: `needed`, then the others from the longest on."""
        needed = self.needed
        return (*needed, *(length for length in reversed(self.lengths) if length not in needed))

    @property
    def compiled(self) -> frozenset[int]:
        """What is compiled so far."""
        with self._changed:
            return frozenset(self._programs)

    def compile(self, length: int, cache: KVCache) -> None:
        """Compiles the programs of one chunk length, unless they are there.

        Args:
          length: of `shapes`.
          cache: pages of the sizes that chunks will have; only looked at.
        """
        if length in self.compiled:
            return
        with _LOWERING:
            start, layers, end = self._lowered(length, cache)
        with ThreadPoolExecutor() as pool:
            first, *middle, last = pool.map(lambda lowered: lowered.compile(), (start, *layers.values(), end))
        programs = _Programs(first, dict(zip(layers, middle, strict=True)), last)
        with self._changed:
            self._programs[length] = programs

    def _lowered(
        self, length: int, cache: KVCache
    ) -> tuple[jax.stages.Lowered, dict[tuple[int, ...], jax.stages.Lowered], jax.stages.Lowered]:
        config, params, rows = self._config, self._params, self._rows
        packed = Packed(np.zeros(length, np.int32), *np.zeros((3, rows), np.int32))
        tables = PageTables(*(np.zeros((rows, entries), np.int32) for entries in self._entries))
        start = _begin.lower(config, params["embed"], packed, tables)
        x, chunk = start.out_info
        layers = {
            run: _layers.lower(
                config,
                run,
                tuple(params["layers"][kind] for kind in run),
                tuple(cache[kind] for kind in run),
                x,
                chunk,
            )
            for run in sorted(set(self._runs))
        }
        # Without the pages' sharding, which would commit the logits to it, and with them all that is made of them.
        pages = jax.ShapeDtypeStruct(cache[-1].shape, cache[-1].dtype)
        return start, layers, _finish.lower(config, *self._ends, params["layers"][self._last], pages, x, chunk)

    def shape_of(self, pieces: Sequence[Piece]) -> int:
        """The shortest compiled length that holds a chunk of these pieces. Raises ValueError where none does."""
        tokens = packed_length([len(piece.tokens) for piece in pieces])
        fitting = [length for length in self.compiled if length >= tokens]
        if not fitting:
            raise ValueError(f"a chunk of {tokens} tokens exceeds what is compiled")
        return min(fitting)

    @property
    def _ends(self) -> tuple[Array, Array]:
        """What the head takes: the tied embedding and the final norm."""
        return self._params["embed"], self._params["final_norm"]

    def run(self, cache: KVCache, tables: PageTables, pieces: Sequence[Piece]) -> tuple[KVCache, Array]:
        """Appends pieces to their prompts.

        Args:
          cache: donated.
          tables: of the pieces' prompts, [pieces, entries], for positions up to their ends.
          pieces: at most `rows`.

        Returns:
          the updated cache, and float32 logits [rows, V] after the last token of each piece.
        """
        programs, updated, x, chunk = self._until_last(cache, tables, pieces)
        last = programs.finish(*self._ends, self._params["layers"][len(updated)], cache[-1], x, chunk)
        return (*updated, last[0]), last[1]

    def run_whole(self, cache: KVCache, tables: PageTables, pieces: Sequence[Piece]) -> tuple[KVCache, Array, Array]:
        """As `run`, with the last layer of all tokens too, which is compiled when it is first asked for.

        Returns:
          the updated cache, the last layer's output [T, D] with each piece at its place in `pack`, and the logits.
        """
        _, updated, x, chunk = self._until_last(cache, tables, pieces)
        last = self._params["layers"][len(updated)]
        pages, x = _layers(self._config, (self._last,), (last,), (cache[-1],), x, chunk)
        return (*updated, *pages), x, _last_logits(self._config, *self._ends, x, chunk)

    def _until_last(
        self, cache: KVCache, tables: PageTables, pieces: Sequence[Piece]
    ) -> tuple[_Programs, list[Array], Array, Chunk]:
        """The programs of a chunk of these pieces, the pages of all layers but the last, what they gave, the chunk."""
        length = self.shape_of(pieces)
        with self._changed:
            programs = self._programs[length]
        packed = pack(pieces, tokens=length, rows=self._rows)
        missing = ((0, self._rows - len(pieces)), (0, 0))
        tables = PageTables(*(np.pad(np.asarray(table, np.int32), missing, constant_values=-1) for table in tables))
        params = self._params
        x, chunk = programs.begin(params["embed"], packed, tables)
        updated: list[Array] = []
        for run in self._runs:
            numbers = range(len(updated), len(updated) + len(run))
            layers = tuple(params["layers"][number] for number in numbers)
            pages, x = programs.layers[run](layers, tuple(cache[number] for number in numbers), x, chunk)
            updated += pages
        return programs, updated, x, chunk

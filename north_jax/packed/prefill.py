"""Packed prefill as compiled programs: a few a chunk size, run layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..config import Config
from ..kernels.device import has_cuda
from ..kv_cache import KVCache, PageTables
from ..layers import Array, Params
from .buckets import buckets
from .chunk import begin, finish, kinds, layer
from .packing import Packed, Piece, pack, packed_length

# Of the module, so that engines of one model compile them once.
_begin = jax.jit(begin, static_argnums=0)
_layer = jax.jit(layer, static_argnums=(0, 1), static_argnames="whole", donate_argnums=(3, 4))
_finish = jax.jit(finish, static_argnums=0)

_LOWERING = threading.Lock()  # it is Python's work, and the kernels' is not said to be thread-safe
LEAST_WHOLE = 1024  # tokens from which on a whole prompt gets a program of its own


class Shape(NamedTuple):
    """What a chunk's programs are compiled for."""

    tokens: int
    whole: bool  # one prompt from its beginning on: it attends to itself by cuDNN instead of to its pages


class _Programs(NamedTuple):
    begin: Callable[..., Any]
    layers: dict[int, Callable[..., Any]]  # by kind
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
        self._kinds = kinds(config)
        self._programs: dict[Shape, _Programs] = {}
        self._changed = threading.Lock()
        self._whole = has_cuda() and jnp.dtype(params["embed"].dtype).itemsize == 2

    @property
    def needed(self) -> tuple[Shape, ...]:
        """What to compile first: the shortest and the longest chunk, and the longest whole prompt."""
        pages, whole = self._all
        return tuple(dict.fromkeys((pages[0], pages[-1], *whole[-1:])))

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Everything that may be compiled: `needed`, then the others from the longest on."""
        pages, whole = self._all
        needed = self.needed
        return (*needed, *(shape for shape in reversed(pages + whole) if shape not in needed))

    @property
    def _all(self) -> tuple[list[Shape], list[Shape]]:
        """Through pages, and of whole prompts, each from the shortest on."""
        pages = [Shape(length, False) for length in self.lengths]
        return pages, [Shape(length, True) for length in self.lengths if self._whole and length >= LEAST_WHOLE]

    @property
    def compiled(self) -> frozenset[Shape]:
        """What is compiled so far."""
        with self._changed:
            return frozenset(self._programs)

    def compile(self, shape: Shape, cache: KVCache) -> None:
        """Compiles the programs of one shape, unless they are there.

        Args:
          shape: of `shapes`.
          cache: pages of the sizes that chunks will have; only looked at.
        """
        if shape in self.compiled:
            return
        with _LOWERING:
            start, layers, end = self._lowered(shape, cache)
        with ThreadPoolExecutor() as pool:
            first, *middle, last = pool.map(lambda lowered: lowered.compile(), (start, *layers.values(), end))
        programs = _Programs(first, dict(zip(layers, middle, strict=True)), last)
        with self._changed:
            self._programs[shape] = programs

    def _lowered(
        self, shape: Shape, cache: KVCache
    ) -> tuple[jax.stages.Lowered, dict[int, jax.stages.Lowered], jax.stages.Lowered]:
        config, params, rows = self._config, self._params, self._rows
        packed = Packed(np.zeros(shape.tokens, np.int32), *np.zeros((3, rows), np.int32))
        tables = PageTables(*(np.zeros((rows, entries), np.int32) for entries in self._entries))
        start = _begin.lower(config, params["embed"], packed, tables)
        x, chunk = start.out_info
        layers = {
            kind: _layer.lower(config, kind, params["layers"][kind], cache[kind], x, chunk, whole=shape.whole)
            for kind in sorted(set(self._kinds))
        }
        return start, layers, _finish.lower(config, params["embed"], params["final_norm"], x, chunk)

    def shape_of(self, pieces: Sequence[Piece]) -> Shape:
        """The compiled shape that a chunk of these pieces runs in. Raises ValueError where none holds it."""
        tokens = packed_length([len(piece.tokens) for piece in pieces])
        whole = len(pieces) == 1 and pieces[0].start == 0
        fitting = [shape for shape in self.compiled if shape.tokens >= tokens and (whole or not shape.whole)]
        if not fitting:
            raise ValueError(f"a chunk of {tokens} tokens exceeds what is compiled")
        return min(fitting, key=lambda shape: (shape.tokens, not shape.whole))

    def run(self, cache: KVCache, tables: PageTables, pieces: Sequence[Piece]) -> tuple[KVCache, Array, Array]:
        """Appends pieces to their prompts.

        Args:
          cache: donated.
          tables: of the pieces' prompts, [pieces, entries], for positions up to their ends.
          pieces: at most `rows`.

        Returns:
          the updated cache, the last layer's output [T, D] with each piece at its place in `pack`, and float32 logits
          [rows, V] after the last token of each piece.
        """
        shape = self.shape_of(pieces)
        with self._changed:
            programs = self._programs[shape]
        packed = pack(pieces, tokens=shape.tokens, rows=self._rows)
        missing = ((0, self._rows - len(pieces)), (0, 0))
        tables = PageTables(*(np.pad(np.asarray(table, np.int32), missing, constant_values=-1) for table in tables))
        params = self._params
        x, chunk = programs.begin(params["embed"], packed, tables)
        updated = list(cache)
        for number, kind in enumerate(self._kinds):
            updated[number], x = programs.layers[kind](params["layers"][number], updated[number], x, chunk)
        return tuple(updated), x, programs.finish(params["embed"], params["final_norm"], x, chunk)

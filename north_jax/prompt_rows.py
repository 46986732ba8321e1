"""Rows of a paged KV cache that hold prompts, for any `Decoder` to go on with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .config import Config
from .inference import prefill
from .kv_cache import KVCache, PagedRows, PageTables, init_cache, pages_for, ring_entries
from .layers import Array, Params

CHUNK = 64  # tokens of a row appended at once


class PromptRows:
    """A cache with room for a fixed number of rows, each of up to `max_context` positions.

    Attributes:
      cache: the pages; a decoder is given them and leaves new ones, which the caller puts here.
      count: of the rows.
      max_context: most positions of a row.
    """

    def __init__(self, config: Config, params: Params, *, rows: int, max_context: int) -> None:
        """Allocates the pages.

        Args:
          config: the model's configuration.
          params: DESIGN.md, "Parameters"; the cache has their type.
          rows: at least 1.
          max_context: positions.
        """
        self._config, self._params, self.count = config, params, rows
        self.max_context = max_context
        pages = {
            "full_pages": rows * pages_for(max_context),
            "sliding_pages": rows * ring_entries(config, max_context, CHUNK),
        }
        self._paged = PagedRows(config, rows=rows, max_context=max_context, max_chunk=CHUNK, **pages)
        self.cache: KVCache = init_cache(config, **pages, dtype=params["embed"].dtype)

    def tables(self) -> PageTables:
        """Page numbers of all rows, host arrays that may be kept."""
        return self._paged.snapshot()

    def grow(self, row: int, start: int, end: int) -> None:
        """Makes room for positions [start, end), at most CHUNK of them. Raises as `PagedRows.grow`."""
        self._paged.grow(row, start, end)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Array:
        """Puts prompts into the rows, in place of what they held.

        Args:
          prompts: token ids of each row; an empty one leaves its row without positions.

        Returns:
          float32 [rows, V], the logits after each prompt's last token (0 for an empty one).

        Raises:
          ValueError: there are fewer or more prompts than rows, or one exceeds `max_context`.
        """
        if len(prompts) != self.count:
            raise ValueError(f"{len(prompts)} prompts for {self.count} rows")
        for row in range(self.count):
            self._paged.release(row)
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        last = jnp.zeros((self.count, self._config.vocab_size), jnp.float32)
        for first in range(0, int(lengths.max()), CHUNK):
            tokens = np.zeros((self.count, CHUNK), np.int32)
            count = np.clip(lengths - first, 0, CHUNK)
            for row, prompt in enumerate(prompts):
                tokens[row, : count[row]] = prompt[first : first + CHUNK]
                if count[row]:
                    self.grow(row, first, first + int(count[row]))
            start = np.where(count > 0, first, 0).astype(np.int32)
            arguments = (self._config, self._params, self.cache, self.tables(), tokens, start, count)
            self.cache, logits = _prefill(*arguments)
            last = logits if self.count == 1 else jnp.where((count > 0)[:, None], logits, last)
        return last


_prefill = partial(jax.jit, static_argnums=0, donate_argnums=2)(prefill)  # of the module, so that rows share it

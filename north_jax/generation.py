"""Generation for research code: one prompt, one row, the same prefill and decode that the server batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .config import Config
from .inference import decode_step, prefill
from .kv_cache import PAGE_SIZE, KVCache, PagedRows, PageTables, init_cache, pages_for, ring_entries
from .layers import Array, Params
from .sampling import SamplingBatch, SamplingParams, sample

CHUNK = 64  # prompt tokens appended at once
_LEAST_PAGES = 8  # of a cache; a longer text takes the next power of two


def generate(
    config: Config,
    params: Params,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: SamplingParams | None = None,
    stop_token_ids: Collection[int] | None = None,
) -> Iterator[int]:
    """Continues a prompt, token by token.

    Args:
      config: the model's configuration.
      params: DESIGN.md, "Parameters".
      prompt: token ids, at least one.
      max_tokens: most tokens to yield.
      sampling: greedy by default.
      stop_token_ids: tokens that end the text, not yielded; by default the configuration's eos tokens.

    Yields:
      token ids.

    Raises:
      FloatingPointError: the logits are not finite.
      ValueError: the prompt is empty, holds a token outside the vocabulary, or leaves the model's context too short.
    """
    if len(prompt) == 0:  # also of a NumPy array, which has no truth value
        raise ValueError("prompt is empty")
    outside = [token for token in prompt if not 0 <= token < config.vocab_size]
    if outside:
        raise ValueError(f"prompt holds token {outside[0]}, the vocabulary has {config.vocab_size}")
    total = len(prompt) + max_tokens
    if total > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise ValueError(f"prompt ({len(prompt)}) and max_tokens ({max_tokens}) exceed the context of {limit}")
    stops = frozenset(config.eos_token_id if stop_token_ids is None else stop_token_ids)
    batch = SamplingBatch.of([sampling or SamplingParams(temperature=0)])
    context = PAGE_SIZE * max(_LEAST_PAGES, 1 << (pages_for(total) - 1).bit_length())  # few shapes to compile
    pages = {"full_pages": pages_for(context), "sliding_pages": ring_entries(config, context, CHUNK)}
    rows = PagedRows(config, rows=1, max_context=context, max_chunk=CHUNK, **pages)
    cache = init_cache(config, **pages, dtype=params["embed"].dtype)
    position = 0
    for first in range(0, len(prompt), CHUNK):
        chunk = prompt[first : first + CHUNK]
        position = first + len(chunk)
        rows.grow(0, first, position)
        padded = np.zeros((1, CHUNK), np.int32)
        padded[0, : len(chunk)] = chunk
        cache, token = _prefill(config, params, cache, _copy(rows.tables), padded, first, len(chunk), batch)
    for count in range(1, max_tokens + 1):
        value = int(token[0])
        if value < 0:
            raise FloatingPointError(f"the logits at position {position} are not finite")
        if value in stops:
            return
        yield value
        if count < max_tokens:
            rows.grow(0, position, position + 1)
            cache, token = _decode(config, params, cache, _copy(rows.tables), token, position, batch)
            position += 1


def _copy(tables: PageTables) -> PageTables:
    """The live tables change while the device may still read them."""
    return PageTables(tables.full.copy(), tables.sliding.copy())


def _one(value: int | Array) -> Array:
    return jnp.reshape(jnp.asarray(value, jnp.int32), (1,))


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefill(
    config: Config,
    params: Params,
    cache: KVCache,
    tables: PageTables,
    tokens: Array,
    start: int,
    length: int,
    batch: SamplingBatch,
) -> tuple[KVCache, Array]:
    cache, logits = prefill(config, params, cache, tables, tokens, _one(start), _one(length))
    return cache, sample(logits, batch, _one(start + length))


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _decode(
    config: Config,
    params: Params,
    cache: KVCache,
    tables: PageTables,
    token: Array,
    start: int,
    batch: SamplingBatch,
) -> tuple[KVCache, Array]:
    active = jnp.ones(1, bool)
    cache, logits = decode_step(config, params, cache, tables, token, _one(start), active)
    return cache, sample(logits, batch, _one(start + 1))

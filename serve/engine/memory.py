"""How many slots, positions and pages fit: planned before the cache is allocated, refused with the numbers."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from north_jax.config import FULL, SLIDING, Config
from north_jax.kv_cache import PAGE_SIZE, cache_bytes, pages_for, ring_entries

_CHUNKS = {"cpu": 256, "gpu": 8192}  # prompt tokens of a prefill, at most
_BUSY_CHUNKS = {"cpu": 256, "gpu": 2048}  # of one that others wait for between two of their tokens
_PREFILL_ROWS = {"cpu": 4, "gpu": 8}
_CHUNK_STEP = 64  # chunks are a multiple of it
_SHARE_OF_RINGS = 0.25  # of the budget: sliding rows have room for a chunk, so a long one takes pages from every slot
_SHARE_OF_SPARE_SLIDING_PAGES = 0.125  # of the budget; the prefix cache keeps windows of past requests in them
HOST_BUDGET = 4 << 30  # bytes of KV cache where the device does not report its memory


class MemoryPlanError(ValueError):
    """The KV cache that was asked for does not fit; the message gives the numbers."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Sizes of an engine's KV cache."""

    slots: int
    max_context: int
    chunk: int  # prompt tokens of a prefill, at most, over all its rows
    busy_chunk: int  # the same while others decode
    prefill_rows: int
    full_pages: int
    sliding_pages: int
    bytes: int

    @property
    def full_tokens(self) -> int:
        """Positions that all slots together can hold."""
        return self.full_pages * PAGE_SIZE


def plan_cache(
    config: Config,
    dtype: jnp.dtype,
    *,
    slots: int,
    max_context: int | None,
    budget: int | None = None,
    chunk: int | None = None,
    busy_chunk: int | None = None,
) -> CachePlan:
    """Chooses the sizes of the KV cache.

    The sliding group always has room for every slot, and up to as much again for the prefix cache. The full group has
    room for every slot where the budget allows; otherwise slots share what there is, and at least one request of
    `max_context` fits.

    Args:
      config: the model's configuration.
      dtype: of keys and values.
      slots: requests that run at once.
      max_context: positions a request may take; None for the most that model and budget allow.
      budget: bytes; by default what suits a host, whose memory belongs to others too.
      chunk: prompt tokens of a prefill, rounded up to a multiple of 64; by default what suits the device, less where
        the room for it in every slot would take more than a quarter of the budget.
      busy_chunk: the same while others decode, at most `chunk`.

    Raises:
      MemoryPlanError: `max_context` exceeds the model's, or one request of that length does not fit.
    """
    limit = config.max_position_embeddings
    if max_context is not None and max_context > limit:
        raise MemoryPlanError(
            f"max_context {max_context} exceeds the model's {limit} positions (max_position_embeddings)"
        )
    budget = HOST_BUDGET if budget is None else budget
    itemsize = jnp.dtype(dtype).itemsize
    wanted = max_context or limit
    platform = _platform()
    chunk = _whole_steps(min(chunk or fitting_chunk(config, default_chunk(), slots, budget, itemsize), wanted))
    busy_chunk = min(_whole_steps(busy_chunk or _BUSY_CHUNKS[platform]), chunk)
    sliding = slots * ring_entries(config, wanted, chunk)
    fixed = cache_bytes(config, full_pages=0, sliding_pages=sliding, itemsize=itemsize)
    a_full_page = cache_bytes(config, full_pages=1, sliding_pages=0, itemsize=itemsize)
    affordable = max(budget - fixed, 0) // a_full_page if FULL in config.layer_types else slots * pages_for(wanted)
    if max_context is None:
        wanted = min(wanted, max(affordable, 1) * PAGE_SIZE)
    if affordable < pages_for(wanted):
        need = fixed + a_full_page * pages_for(wanted)
        raise MemoryPlanError(
            f"one request of {wanted} positions with {slots} slots needs {need / 1e9:.2f} GB of KV cache, "
            f"{max(budget, 0) / 1e9:.2f} GB are free: lower max_context or slots"
        )
    if SLIDING in config.layer_types:
        a_sliding_page = cache_bytes(config, full_pages=0, sliding_pages=1, itemsize=itemsize)
        left = min(budget * _SHARE_OF_SPARE_SLIDING_PAGES, budget - fixed - a_full_page * pages_for(wanted))
        spare = max(min(sliding, int(left / a_sliding_page)), 0)
        sliding, fixed = sliding + spare, fixed + a_sliding_page * spare
        affordable -= -(-a_sliding_page * spare // a_full_page) if a_full_page else 0
    full = min(affordable, slots * pages_for(wanted))
    return CachePlan(
        slots=slots,
        max_context=wanted,
        chunk=chunk,
        busy_chunk=busy_chunk,
        prefill_rows=min(_PREFILL_ROWS[platform], slots),
        full_pages=full,
        sliding_pages=sliding,
        bytes=fixed + a_full_page * full,
    )


def default_chunk() -> int:
    """Prompt tokens of a prefill, at most, where neither command line nor memory say otherwise."""
    return _CHUNKS[_platform()]


def fitting_chunk(config: Config, most: int, slots: int, budget: int, itemsize: int) -> int:
    """The longest chunk, by halves of `most`, whose room in the slots' rings keeps within its share of the budget."""
    while most > _CHUNK_STEP:
        pages = slots * pages_for(most)
        if cache_bytes(config, full_pages=0, sliding_pages=pages, itemsize=itemsize) <= _SHARE_OF_RINGS * budget:
            break
        most //= 2
    return most


def _whole_steps(tokens: int) -> int:
    return -(-tokens // _CHUNK_STEP) * _CHUNK_STEP


def _platform() -> str:
    return "gpu" if jax.devices()[0].platform == "gpu" else "cpu"

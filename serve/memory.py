"""The device's memory: weights, KV pages and workspace, planned before loading, printed, refused if short."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from north_jax.config import Config
from north_jax.decoding import Backend
from north_jax.model import param_shapes

from .engine.memory import HOST_BUDGET, CachePlan, MemoryPlanError, default_chunk, fitting_chunk, plan_cache
from .engine.workspace import loading_bytes, workspace_bytes

_LEAST_CHUNK = 64


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What lies where.

    Attributes:
      available: bytes that this process may use on the device; None where it does not say.
      share: the part of the device's memory that this is.
      weights: bytes.
      workspace: bytes, an upper bound.
      cache: the KV cache.
    """

    available: int | None
    share: float
    weights: int
    workspace: int
    cache: CachePlan

    def table(self) -> str:
        """A line for each part, in GB (10⁹ bytes)."""
        cache = self.cache
        pages = f"{cache.full_pages} full ({cache.full_tokens} tokens), {cache.sliding_pages} sliding"
        rows = [("weights", self.weights, ""), ("KV pages", cache.bytes, pages)]
        if self.available is None:
            together = self.weights + cache.bytes
            return _aligned([*rows, ("together", together, "without workspace; the device does not say what it has")])
        unused = self.available - self.weights - self.workspace - cache.bytes
        return _aligned(
            [
                *rows,
                ("workspace", self.workspace, f"prefill of up to {cache.chunk} tokens, decode, draws"),
                ("unused", unused, ""),
                ("together", self.available, f"--memory-share {self.share:g} of the device"),
            ]
        )


def device_memory() -> int | None:
    """Bytes that this process may use on the default device, and does not use yet; None where it does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))


def plan_memory(
    config: Config,
    dtype: jnp.dtype | str,
    *,
    backend: Backend,
    slots: int,
    max_context: int | None,
    chunk: int | None = None,
    busy_chunk: int | None = None,
    share: float = 1.0,
    available: int | None,
    weights: int | None = None,
) -> MemoryPlan:
    """Divides the device's memory.

    Weights come first. A chunk of prefill takes workspace, and room in every slot: without a wish for one it is the
    longest, by halves, whose room in the slots keeps within a quarter of what the KV cache gets. That is all the rest.

    Args:
      config: the model's configuration.
      dtype: of weights, keys and values.
      backend: what decodes.
      slots, max_context, chunk, busy_chunk: as for `plan_cache`.
      share: of the device's memory that `available` is; to be named.
      available: bytes, from `device_memory`; None plans the cache as for a host.
      weights: bytes of the weights; by default those of all parameters in `dtype`.

    Raises:
      MemoryPlanError: it does not fit; the message gives every number.
    """
    kind = jnp.dtype(dtype)
    if weights is None:
        weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(config, kind))) * kind.itemsize
    wanted = min(max_context or config.max_position_embeddings, config.max_position_embeddings)
    most = chunk or min(default_chunk(), max(wanted, _LEAST_CHUNK))
    while True:
        workspace = workspace_bytes(config, chunk=most, slots=slots, backend=backend, itemsize=kind.itemsize)
        budget = HOST_BUDGET if available is None else available - weights - workspace
        fitting = most if chunk else fitting_chunk(config, most, slots, budget, kind.itemsize)
        if fitting == most or most // 2 < _LEAST_CHUNK:
            break
        most //= 2
    sizes = {"slots": slots, "max_context": max_context, "chunk": most, "busy_chunk": busy_chunk}
    if available is None:
        cache = plan_cache(config, kind, budget=budget, **sizes)  # type: ignore[arg-type]
        return MemoryPlan(None, share, weights, workspace, cache)
    loading = weights + loading_bytes(config, kind.itemsize)
    if loading > available:
        raise _refusal(f"loading {weights / 1e9:.2f} GB of weights takes {loading / 1e9:.2f} GB", available, share)
    try:
        cache = plan_cache(config, kind, budget=budget, **sizes)  # type: ignore[arg-type]
    except MemoryPlanError as error:
        if max_context is not None and max_context > config.max_position_embeddings:
            raise
        parts = f"{weights / 1e9:.2f} GB of weights and {workspace / 1e9:.2f} GB of workspace"
        raise _refusal(f"beside {parts} {error}", available, share) from None
    return MemoryPlan(available, share, weights, workspace, cache)


def _refusal(what: str, available: int, share: float) -> MemoryPlanError:
    return MemoryPlanError(f"{what}; this process may use {available / 1e9:.2f} GB (--memory-share {share:g})")


def _aligned(rows: Sequence[tuple[str, int, str]]) -> str:
    width = max(len(name) for name, _, _ in rows)
    lines = [f"  {name:<{width}}  {size / 1e9:7.2f} GB  {note}".rstrip() for name, size, note in rows]
    return "\n".join(["memory:", *lines])

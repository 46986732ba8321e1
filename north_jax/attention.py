"""Grouped-query attention, causal, full or sliding: over a whole sequence, and over the pages of a KV cache.

Both forms walk the keys in blocks, so memory does not grow with the square of the length. Scores, softmax and sums are
float32; probabilities are rounded to the values' dtype for the second product, as tensor cores want them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .kernels.device import has_cuda
from .kv_cache import PAGE_SIZE
from .layers import Array, contract
from .sharding import on_shards

QUERY_BLOCK = 512  # queries of a block of `attention`
PAGE_BLOCK = 8  # pages that `paged_attention` reads at once
_MASKED = -1e30  # finite, so that a fully masked block leaves the running softmax exactly as it was


def attention(q: Array, k: Array, v: Array, window: int | None) -> Array:
    """Causal self-attention of a whole sequence; differentiable. cuDNN on a GPU where it applies, else blocked.

    Args:
      q: [B, T, H, d], rotated where the layer rotates, not yet scaled.
      k: [B, T, K, d].
      v: [B, T, K, d].
      window: keys a query sees, its own included; None for all before it.

    Returns:
      [B, T, H, d] in q's dtype.
    """
    queries, keys = ("batch", None, "heads", None), ("batch", None, "kv_heads", None)

    def of_heads(q: Array, k: Array, v: Array) -> Array:
        return _attention(q, k, v, window)

    return on_shards(of_heads, (q, k, v), (queries, keys, keys), [(queries, q.shape)])


def _attention(q: Array, k: Array, v: Array, window: int | None) -> Array:
    """`attention` on one device."""

    def blocked(q: Array, k: Array, v: Array) -> Array:
        return blocked_attention(q, k, v, window)

    def cudnn(q: Array, k: Array, v: Array) -> Array:
        span = None if window is None or window >= q.shape[1] else (window - 1, 0)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=span, implementation="cudnn")

    if not _cudnn_applies(q):
        return blocked(q, k, v)
    return jax.lax.platform_dependent(q, k, v, cuda=cudnn, default=blocked)


def _cudnn_applies(q: Array) -> bool:
    """Whole blocks of 16-bit values, in a process with a GPU: even tracing the call needs one.

    Shorter or odd sequences are not worth a special case.
    """
    length, d = q.shape[1], q.shape[3]
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    return half and length % 64 == 0 and d % 8 == 0 and d <= 128 and has_cuda()


def blocked_attention(q: Array, k: Array, v: Array, window: int | None) -> Array:
    """`attention` in plain JAX, block of queries by block of queries."""
    batch, length, heads, d = q.shape
    kv_heads = k.shape[2]
    block = min(QUERY_BLOCK, length)
    blocks = -(-length // block)
    span = length if window is None else min(length, window - 1 + block)  # keys that one block of queries can see
    q = jnp.pad(q, ((0, 0), (0, blocks * block - length), (0, 0), (0, 0)))
    q = q.reshape(batch, blocks, block, kv_heads, heads // kv_heads, d)

    @jax.checkpoint
    def attend(index: Array) -> Array:
        first_key = jnp.clip((index + 1) * block - span, 0, length - span)
        keys = jax.lax.dynamic_slice_in_dim(k, first_key, span, axis=1)
        values = jax.lax.dynamic_slice_in_dim(v, first_key, span, axis=1)
        scores = contract("btkgd,bskd->bkgts", q[:, index], keys) * d**-0.5
        query_position = (index * block + jnp.arange(block))[:, None]
        key_position = (first_key + jnp.arange(span))[None, :]
        visible = key_position <= query_position
        if window is not None:
            visible &= key_position > query_position - window
        probabilities = jax.nn.softmax(jnp.where(visible, scores, _MASKED), axis=-1)
        return contract("bkgts,bskd->btkgd", probabilities.astype(v.dtype), values).astype(q.dtype)

    out = attend(jnp.int32(0))[None] if blocks == 1 else jax.lax.map(attend, jnp.arange(blocks))
    return jnp.moveaxis(out, 0, 1).reshape(batch, blocks * block, heads, d)[:, :length]


def paged_attention(q: Array, pages: Array, table: Array, start: Array, length: Array, window: int | None) -> Array:
    """Attention of newly appended tokens to the cached pages of their rows, themselves included.

    The keys and values of the new tokens must be in their pages already. Each row is read from its own first visible
    page on, in blocks of PAGE_BLOCK pages with a running softmax; what a row computes depends on that row alone.

    Args:
      q: [N, T, H, d]; query t of row i sits at position start[i] + t.
      pages: [pages, 2, K, PAGE_SIZE, d], this layer's keys and values.
      table: [N, P] int32; position p of a row lies in page table[(p // PAGE_SIZE) % P].
      start: [N] int32.
      length: [N] int32; rows of q at or beyond it are padding, and their results meaningless but finite.
      window: keys a query sees, its own included; None for all before it.

    Returns:
      [N, T, H, d] in q's dtype.
    """
    rows, queries, heads, d = q.shape
    kv_heads = pages.shape[2]
    q = q.reshape(rows, queries, kv_heads, heads // kv_heads, d)
    end = start + length  # [N]
    first = jnp.zeros_like(start) if window is None else jnp.maximum(start - window + 1, 0)
    first_page = first // PAGE_SIZE
    page_count = jnp.where(length > 0, -(-end // PAGE_SIZE) - first_page, 0)
    query_position = (start[:, None] + jnp.arange(queries))[:, :, None, None]  # [N, T, 1, 1]

    def step(block: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, out = carry
        entry = first_page[:, None] + block * PAGE_BLOCK + jnp.arange(PAGE_BLOCK)  # [N, B]
        page = jnp.take_along_axis(table, entry % table.shape[1], axis=1)
        chunk = pages[jnp.maximum(page, 0)]  # [N, B, 2, K, S, d], S = PAGE_SIZE
        position = (entry * PAGE_SIZE)[:, :, None] + jnp.arange(PAGE_SIZE)  # [N, B, S]
        written = position < end[:, None, None]
        visible = (position[:, None] <= query_position) & written[:, None]  # [N, T, B, S]
        if window is not None:
            visible &= position[:, None] > query_position - window
        visible = visible[:, None, None]
        # A page beyond the row's end may hold anything, NaN included: select, never multiply.
        values = jnp.where(written[:, :, None, :, None], chunk[:, :, 1], 0)
        scores = contract("ntkgd,nbksd->nkgtbs", q, chunk[:, :, 0]) * d**-0.5
        scores = jnp.where(visible, scores, _MASKED)
        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=(-2, -1)))
        shrink = jnp.exp(maximum - new_maximum)
        p = jnp.where(visible, jnp.exp(scores - new_maximum[..., None, None]), 0)
        total = total * shrink + jnp.sum(p, axis=(-2, -1))
        out = out * shrink[..., None] + contract("nkgtbs,nbksd->nkgtd", p.astype(values.dtype), values)
        return new_maximum, total, out

    shape = (rows, kv_heads, heads // kv_heads, queries)
    carry = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, d)))
    _, total, out = jax.lax.fori_loop(0, jnp.max(-(-page_count // PAGE_BLOCK)), step, carry)
    # Padding saw no key. A total that is NaN must show, not become 0.
    out = jnp.where(total[..., None] == 0, 0, out / jnp.where(total == 0, 1, total)[..., None])
    return jnp.moveaxis(out, 3, 1).reshape(rows, queries, heads, d).astype(q.dtype)

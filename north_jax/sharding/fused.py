"""Products with a matrix whose rows are several parts below one another: q, k and v, or gate and up.

A device has consecutive rows of such a matrix, not its share of every part. So devices gather what their rows gave,
activations of a few thousand values a token, and each goes on with its share of every part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from .activations import on_shards
from .mesh import current_mesh
from .rules import RULES


def kv_head_copies(mesh: Mesh | AbstractMesh, heads: int) -> int:
    """How many devices along `tensor` have the same key-value head: 1 where heads are divided.

    Raises:
      ValueError: `tensor` neither divides the heads nor is a multiple of them.
    """
    return _copies(mesh.shape["tensor"], heads, "key-value heads")


def fused_rows(
    product: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    weight: jax.Array,
    axis: str,
    sizes: Sequence[int],
    unit: int = 1,
) -> list[jax.Array]:
    """`product(x, weight)` [..., rows], split into parts; on a mesh, each divided over `tensor`.

    Args:
      product: of x [..., in] and weight [rows, in].
      x: [..., in].
      weight: the parts' rows below one another.
      axis: logical axis of the rows.
      sizes: rows of each part.
      unit: rows that stay together, such as those of a head. A part of fewer units than there are devices is copied, so
        that each device has one: the result is as much larger.

    Returns:
      [..., size] for each part.
    """
    begins = [0, *itertools.accumulate(sizes)]
    mesh = current_mesh()
    if mesh is None:
        return jnp.split(product(x, weight), begins[1:-1], axis=-1)
    (name,) = RULES[axis]
    devices = mesh.shape[name]
    copies = [_copies(devices, size // unit, "heads" if unit > 1 else "hidden units") for size in sizes]

    def on_device(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
        fused = product(x, weight)
        if devices > 1:
            fused = jax.lax.all_gather(fused, name, axis=x.ndim - 1, tiled=True)
        device = jax.lax.axis_index(name)
        parts = []
        for begin, size, copy in zip(begins, sizes, copies, strict=False):
            own = size * copy // devices
            parts.append(jax.lax.dynamic_slice_in_dim(fused, begin + device // copy * own, own, axis=-1))
        return tuple(parts)

    tokens = ("batch", ...)
    outs = [((*tokens, axis), (*x.shape[:-1], size * copy)) for size, copy in zip(sizes, copies, strict=True)]
    return list(on_shards(on_device, (x, weight), (tokens, (axis, None)), outs))


def _copies(devices: int, count: int, what: str) -> int:
    if count % devices == 0:
        return 1
    if devices % count:
        raise ValueError(f"sharding: {count} {what} can be neither divided over tensor {devices} nor copied evenly")
    return devices // count

"""The table from logical axes, of parameters, activations and pages, to axes of the mesh."""

from __future__ import annotations

import math
from types import EllipsisType

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

type MeshAxes = tuple[str, ...]
type Logical = tuple[str | EllipsisType | None, ...]
"""A name an axis. An ellipsis stands for any number of axes that stay whole, as does None for one."""

RULES: dict[str, MeshAxes] = {
    "batch": ("data",),  # rows of tokens, of hidden states, of page tables
    "pages": ("data",),  # a row's pages are where the row is
    "heads": ("tensor",),  # query heads of activations; rows of "qkv" and columns of "o"
    "kv_heads": ("tensor",),  # copied first where tensor is a multiple of them: `fused.py`
    "mlp": ("tensor",),  # hidden units of a dense layer
    "vocab": ("tensor",),  # rows of the embedding, and logits
    # Whole experts. Were an expert's own rows divided, gate and up rows that belong together would be on different
    # devices, since gate_up holds all gate rows first.
    "expert": ("expert", "tensor"),
    "expert_mlp": (),
    "embed": (),
    "norm": (),
}

WHOLE_WHERE_UNEVEN = frozenset({"batch", "vocab"})
"""Axes that stay whole where the mesh does not divide them; for the others that is an error."""


def mesh_axes(mesh: Mesh | AbstractMesh, name: str, size: int) -> MeshAxes:
    """The axes of the mesh that divide a logical axis of `size`.

    Raises:
      ValueError: they do not divide it, and it is none that may stay whole.
    """
    axes = RULES[name]
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if size % parts == 0:
        return axes
    if name in WHOLE_WHERE_UNEVEN:
        return ()
    sizes = " × ".join(f"{axis} {mesh.shape[axis]}" for axis in axes)
    raise ValueError(f"sharding: {size} {_MEANINGS.get(name, name)} cannot be divided over {sizes}")


_MEANINGS = {"heads": "rows of heads", "expert": "experts", "mlp": "hidden units"}


def partition(mesh: Mesh | AbstractMesh, axes: Logical, shape: tuple[int, ...]) -> PartitionSpec:
    """How an array of `shape` with these logical axes lies on the mesh."""
    if ... in axes:
        cut = axes.index(...)
        axes = (*axes[:cut], *(None,) * (len(shape) - len(axes) + 1), *axes[cut + 1 :])
    if len(axes) != len(shape):
        raise ValueError(f"sharding: {len(axes)} logical axes for an array of shape {list(shape)}")
    spec = [
        mesh_axes(mesh, name, size) or None if isinstance(name, str) else None
        for name, size in zip(axes, shape, strict=True)
    ]
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)

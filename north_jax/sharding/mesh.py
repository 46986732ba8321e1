"""The mesh: three axes of devices, of any number of hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

AXES = ("data", "expert", "tensor")  # the last one's devices are the nearest to each other


def make_mesh(*, data: int = 1, tensor: int = 1, expert: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of data × expert × tensor devices.

    Args:
      data: parts of the batch; weights are the same in each.
      tensor: parts of heads, of the vocabulary and of dense layers; it divides the experts too.
      expert: parts of the experts.
      devices: what to take; by default the first ones of `jax.devices()`, and all of them where there are several
        hosts (after `jax.distributed.initialize`), each of which has to take part.

    Raises:
      ValueError: a size is not positive, or there are fewer devices; or more, on several hosts.
    """
    sizes = {"data": data, "expert": expert, "tensor": tensor}
    product = " × ".join(f"{name} {size}" for name, size in sizes.items())
    if min(sizes.values()) < 1:
        raise ValueError(f"make_mesh: {product}: sizes are at least 1")
    count = math.prod(sizes.values())
    there = jax.devices() if devices is None else devices
    if len(there) < count:
        raise ValueError(f"make_mesh: {product} are {count} devices, there are {len(there)}")
    if devices is None and jax.process_count() > 1 and len(there) != count:
        raise ValueError(f"make_mesh: {product} are {count} devices, the {jax.process_count()} hosts have {len(there)}")
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(sizes[name] for name in AXES), AXES, axis_types=types, devices=list(there)[:count])


def current_mesh() -> AbstractMesh | None:
    """The mesh of `jax.set_mesh`, if it is one of `make_mesh`; None within a shard_map, whose code is one device's."""
    mesh = jax.sharding.get_abstract_mesh()
    ours = mesh.axis_names == AXES and all(kind is AxisType.Auto for kind in mesh.axis_types)
    return mesh if ours else None

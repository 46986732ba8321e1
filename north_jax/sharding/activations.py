"""What the model's code says of its activations: where they lie, and what each device computes by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .mesh import current_mesh
from .rules import Logical, partition


def constrain(x: jax.Array, *axes: Any) -> jax.Array:
    """`x`, laid out by its logical axes where there is a mesh: `constrain(logits, "batch", ..., "vocab")`."""
    mesh = current_mesh()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, partition(mesh, axes, x.shape))


def on_shards(
    function: Callable[..., Any],
    operands: Sequence[Any],
    in_axes: Sequence[Logical],
    outs: Sequence[tuple[Logical, tuple[int, ...]]],
    *,
    alike: bool = False,
) -> Any:
    """`function(*operands)`; where there is a mesh, on each device of its own parts of the operands.

    Args:
      function: of arrays; on a mesh it runs within a `shard_map`, so it may add or gather over the mesh's axes.
      operands: arrays, or pytrees of arrays that share their logical axes (and are divided along the first alone).
      in_axes: the logical axes of each operand.
      outs: the logical axes and the whole shape of each result; for a single one, `function` returns it alone.
      alike: operands differ from device to device wherever one of them does. Their derivatives are then summed over
        devices once, at the function's beginning, and not where they are used: a loop would do it in every turn, and
        a branch that some devices do not take would wait for them for ever.
    """
    mesh = current_mesh()
    if mesh is None:
        return function(*operands)
    in_specs = tuple(partition(mesh, axes, operand.shape) for axes, operand in zip(in_axes, operands, strict=True))
    out_specs = tuple(partition(mesh, *out) for out in outs)

    def on_device(*operands: Any) -> Any:
        return function(*(_alike(operands) if alike else operands))

    out_spec = out_specs[0] if len(outs) == 1 else out_specs
    return jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=out_spec)(*operands)


def _alike(operands: Any) -> Any:
    """The operands, all varying over the mesh axes that one of them varies over."""
    varying = [jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(operands)]
    axes = frozenset[str]().union(*varying)

    def wide(leaf: jax.Array) -> jax.Array:
        more = tuple(axes - jax.typeof(leaf).manual_axis_type.varying)
        return jax.lax.pcast(leaf, more, to="varying") if more else leaf

    return jax.tree.map(wide, operands)

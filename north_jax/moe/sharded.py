"""Warp decode on several devices: each has a part of the experts, or of every expert's outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..layers import Array
from .operation import Form
from .quantized import BLOCK, Experts, QuantizedExperts
from .warp import moe_down, moe_gate_up, warp_decode

type Parts = Literal["experts", "outputs"]


def sharded_warp_decode(
    mesh: Mesh, axis: str, *, over: Parts, form: Form = "auto"
) -> Callable[[Array, Array, Array, Experts, Experts], Array]:
    """`warp_decode` over one axis of a mesh; tokens and routing are the same on all devices.

    Args:
      mesh: the devices.
      axis: name of the mesh axis that divides the weights; they are the same along the others.
      over: "experts", each device has whole experts, computes what its own add to every token, and the sums are added
        in float32; "outputs", each device has some neurons and some output values of every expert, as the kernels'
        warps do: intermediate values are gathered, output values stay where they are, and the bits are those of one
        device.
      form: as in `moe_gate_up`.

    Returns:
      (x [T, D], experts [T, k], weights [T, k], gate_up [E, 2I, D], down [E, D, I]) → bfloat16 [T, D], replicated for
      "experts", divided along D for "outputs". To be jitted by the caller. It raises ValueError where the number of
      devices does not divide the experts, or the sizes into what `warp_decode` takes.
    """
    if axis not in mesh.shape:
        raise ValueError(f"sharded_warp_decode: the mesh has axes {', '.join(mesh.shape)}, not {axis}")
    if over == "experts":
        return _over_experts(mesh, axis, form)
    if over == "outputs":
        return _over_outputs(mesh, axis, form)
    raise ValueError(f"sharded_warp_decode: over is {over!r}, expected experts or outputs")


def _over_experts(mesh: Mesh, axis: str, form: Form) -> Callable[..., Array]:
    def on_device(x: Array, experts: Array, weights: Array, gate_up: Experts, down: Experts) -> Array:
        own = experts - jax.lax.axis_index(axis) * gate_up.shape[0]  # outside of [0, E): on another device
        partial = warp_decode(x, own, weights, gate_up, down, form=form, dtype=jnp.float32)
        return jax.lax.psum(partial, axis).astype(x.dtype)

    def run(x: Array, experts: Array, weights: Array, gate_up: Experts, down: Experts) -> Array:
        count = mesh.shape[axis]
        if gate_up.shape[0] % count:
            raise ValueError(f"sharded_warp_decode: {gate_up.shape[0]} experts on {count} devices")
        part, whole = PartitionSpec(axis), PartitionSpec()
        specs = (whole, whole, whole, part, part)
        operands = _placed(mesh, specs, (x, experts, weights, gate_up, down))
        return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=whole)(*operands)

    return run


def _over_outputs(mesh: Mesh, axis: str, form: Form) -> Callable[..., Array]:
    def on_device(x: Array, experts: Array, weights: Array, gate_up: Experts, down: Experts) -> Array:
        own = moe_gate_up(x, experts, _joined(gate_up), form=form)  # [T, k, I / devices]
        hidden = jax.lax.all_gather(own, axis, axis=2, tiled=True)
        return moe_down(hidden, experts, weights, down, form=form)

    def run(x: Array, experts: Array, weights: Array, gate_up: Experts, down: Experts) -> Array:
        count = mesh.shape[axis]
        for name, size, operand in (("I", gate_up.shape[1] // 2, gate_up), ("D", down.shape[1], down)):
            step = BLOCK if isinstance(operand, QuantizedExperts) and operand.scheme == "fp8_block" else 1
            if size % (count * step):
                raise ValueError(f"sharded_warp_decode: {name} = {size} on {count} devices, in steps of {step}")
        whole, rows = PartitionSpec(), PartitionSpec(None, None, axis)
        specs = (whole, whole, whole, rows, PartitionSpec(None, axis))
        operands = _placed(mesh, specs, (x, experts, weights, _split(gate_up), down))
        return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(None, axis))(*operands)

    return run


def _placed(mesh: Mesh, specs: tuple[PartitionSpec, ...], operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands divided as `specs` say, which a mesh of explicit axes wants beforehand."""
    return tuple(
        jax.device_put(operand, NamedSharding(mesh, spec)) for operand, spec in zip(operands, specs, strict=True)
    )


def _split(gate_up: Experts) -> Any:
    """[E, 2I, D] as [E, 2, I, D], so that the same rows of gate and up go to one device."""
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], 2, -1, *leaf.shape[2:]), gate_up)


def _joined(gate_up: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:]), gate_up)

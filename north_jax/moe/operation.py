"""What makes an FFI call with per-token operands a citizen of JAX: where it runs, vmap, derivatives, shard_map.

Operands come in two parts: `rows`, arrays whose first axis are tokens, and `weights`, which all tokens share.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

import ffi

from ..layers import Array
from .quantized import Experts, QuantizedExperts

MAX_TOKENS = 64  # of one call: csrc/warp_decode/operands.h
_PLAIN_TOKENS = 2  # so few tokens seldom choose the same expert

type Form = Literal["auto", "plain", "shared"]

type Rows = tuple[Array, ...]
type Weights = tuple[Experts, ...]


@dataclasses.dataclass(frozen=True)
class Operation(abc.ABC):
    """One FFI target, with all that is static about a call of it.

    Attributes:
      form: "plain", "shared", or "auto", by the number of tokens.
    """

    form: Form

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The target is north_jax.<name>."""

    @abc.abstractmethod
    def reference(self, rows: Rows, weights: Weights) -> Array:
        """The value in pure JAX."""

    @abc.abstractmethod
    def results(self, rows: Rows, weights: Weights) -> Sequence[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of what the call writes: the value, then buffers."""

    def __call__(self, rows: Rows, weights: Weights) -> Array:
        return _differentiable(self, rows, weights)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _differentiable(operation: Operation, rows: Rows, weights: Weights) -> Array:
    return _batched(operation)(rows, weights)


@partial(_differentiable.defjvp, symbolic_zeros=True)
def _jvp(operation: Operation, primals: Any, tangents: Any) -> tuple[Array, Any]:
    """The derivative of the reference; the value is the kernels'."""
    value = _batched(operation)(*primals)
    leaves, tree = jax.tree.flatten(primals)
    slopes = jax.tree.leaves(tangents, is_leaf=lambda node: isinstance(node, SymbolicZero))
    moving = [i for i, slope in enumerate(slopes) if not isinstance(slope, SymbolicZero)]
    for i in moving:
        if jnp.dtype(leaves[i].dtype).itemsize == 1 or _is_scale(primals, leaves[i]):
            raise ValueError(
                f"{operation.name}: quantised weights have no derivative; dequantise them first, or differentiate the "
                "other operands"
            )
    if not moving:
        return value, SymbolicZero(jax.typeof(value).to_tangent_aval())

    def of_moving(*some: Array) -> Array:
        whole = list(leaves)
        for i, leaf in zip(moving, some, strict=True):
            whole[i] = leaf
        rows, weights = jax.tree.unflatten(tree, whole)
        return operation.reference(rows, weights)

    _, slope = jax.jvp(of_moving, [leaves[i] for i in moving], [slopes[i] for i in moving])
    return value, slope


def _is_scale(primals: tuple[Rows, Weights], leaf: Array) -> bool:
    return any(isinstance(experts, QuantizedExperts) and experts.scales is leaf for experts in primals[1])


def _batched(operation: Operation) -> Callable[[Rows, Weights], Array]:
    """The call with a rule for vmap: batches of tokens become more tokens, batches of weights one call each."""

    @jax.custom_batching.custom_vmap
    def call(rows: Rows, weights: Weights) -> Array:
        return _dispatch(operation, rows, weights)

    @call.def_vmap
    def rule(size: int, batched: Any, rows: Rows, weights: Weights) -> tuple[Array, bool]:
        rows_batched, weights_batched = batched
        rows = tuple(
            row if is_batched else jnp.broadcast_to(row, (size, *row.shape))
            for row, is_batched in zip(rows, rows_batched, strict=True)
        )
        if any(jax.tree.leaves(weights_batched)):
            whole, split = _partition(weights, weights_batched)

            def one(operands: tuple[Rows, list[Array]]) -> Array:
                return call(operands[0], whole(operands[1]))

            return jax.lax.map(one, (rows, split)), True
        tokens = rows[0].shape[1]
        if size * tokens <= MAX_TOKENS:
            folded = call(tuple(row.reshape(-1, *row.shape[2:]) for row in rows), weights)
            return folded.reshape(size, tokens, *folded.shape[1:]), True
        at_once = max(1, MAX_TOKENS // tokens)
        return jax.lax.map(lambda some: call(some, weights), rows, batch_size=at_once), True

    return call


def _partition(weights: Weights, batched: Any) -> tuple[Callable[[list[Array]], Weights], list[Array]]:
    """The leaves with a batch axis, and how to put one batch's leaves among the others."""
    leaves, tree = jax.tree.flatten(weights)
    flags = jax.tree.leaves(batched)

    def whole(some: list[Array]) -> Weights:
        taken = iter(some)
        return jax.tree.unflatten(
            tree, [next(taken) if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]
        )

    return whole, [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]


def _dispatch(operation: Operation, rows: Rows, weights: Weights) -> Array:
    """The compiled form where there is one for the platform, else the reference."""

    compiled = {name: partial(_compiled, operation) for name in ("cpu", "cuda") if ffi.available(name)}
    if not compiled:
        return operation.reference(rows, weights)
    return jax.lax.platform_dependent(rows, weights, default=operation.reference, **compiled)


def _compiled(operation: Operation, rows: Rows, weights: Weights) -> Array:
    operands = [*rows]
    for experts in weights:
        if isinstance(experts, QuantizedExperts):
            operands += [experts.values, experts.scales]
        else:
            operands += [experts, jnp.zeros(0, jnp.float32)]
    operands = _equally_varying(operands)
    results = [_result(shape, dtype, like=operands[0]) for shape, dtype in operation.results(rows, weights)]
    call = jax.ffi.ffi_call(f"north_jax.{operation.name}", results)
    shared = operation.form == "shared" or (operation.form == "auto" and rows[0].shape[0] > _PLAIN_TOKENS)
    return call(*operands, form=np.int64(shared))[0]


def _equally_varying(operands: list[Array]) -> list[Array]:
    """Within a shard_map, the operands as values that vary over the same mesh axes, as its check demands."""
    varying = [jax.typeof(operand).manual_axis_type.varying for operand in operands]
    axes = frozenset[str]().union(*varying)
    return [
        jax.lax.pcast(operand, tuple(axes - own), to="varying") if axes - own else operand
        for operand, own in zip(operands, varying, strict=True)
    ]


def _result(shape: tuple[int, ...], dtype: Any, *, like: Array) -> jax.ShapeDtypeStruct:
    """What a call writes; within a shard_map it varies as its operands do."""
    kind = jax.typeof(like)
    if kind.sharding.mesh.empty:
        return jax.ShapeDtypeStruct(shape, dtype)
    sharding = NamedSharding(kind.sharding.mesh, PartitionSpec(*(None,) * len(shape)))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=kind.manual_axis_type)

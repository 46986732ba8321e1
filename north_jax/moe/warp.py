"""Experts for few tokens, organised by outputs: `warp_decode`, and the two products that it is made of.

On a GPU each value of the output is the work of one warp (csrc/warp_decode), which streams the rows of weights that it
needs; nothing is padded, sorted, gathered or scattered, and the intermediate vector is the only buffer. Elsewhere the
same functions run in C++ or in pure JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

import jax.numpy as jnp

from ..layers import Array
from .operation import MAX_TOKENS, Form, Operation, Rows, Weights
from .quantized import MX_SCALES, VALUES, Experts, QuantizedExperts, scales_shape
from .reference import down_reference, gate_up_reference

NO_EXPERT = -1
"""An id that chooses none; any outside [0, E) does."""

MAX_TOP_K = 16
SIZE_STEP = 32
_OUTPUT_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


def moe_gate_up(x: Array, experts: Array, gate_up: Experts, *, form: Form = "auto") -> Array:
    """silu(gate · x) · (up · x) of each token with each of its experts; sums and activation in float32.

    Args:
      x: bfloat16 [T, D], 1 to 64 tokens; D is a multiple of 32.
      experts: int32 [T, k], k up to 16. An id outside [0, E) is no expert: its values are 0.
      gate_up: [E, 2I, D], gate rows first; bfloat16 or `QuantizedExperts` of two parts. I is a multiple of 32.
      form: "plain", one warp an output value and expert; "shared", tokens that chose the same expert share its weights'
        way from memory; "auto" chooses by the number of tokens. A form gives the same bits for the same input, and a
        token's bits do not depend on its neighbours.

    Returns:
      bfloat16 [T, k, I].

    Raises:
      ValueError: a shape or dtype does not fit; the message names the operand.
    """
    name = "moe_gate_up"
    _check_tokens(name, x, experts)
    _check_experts(name, "gate_up", gate_up, rows=None, columns=x.shape[1], parts=2)
    return _GateUp(_check_form(name, form))((x, experts), (gate_up,))


def moe_down(
    hidden: Array, experts: Array, weights: Array, down: Experts, *, form: Form = "auto", dtype: Any = jnp.bfloat16
) -> Array:
    """The experts' outputs times the router's weights, summed over each token's experts in float32.

    Args:
      hidden: bfloat16 [T, k, I], of `moe_gate_up`.
      experts: int32 [T, k]. An id outside [0, E) is no expert: it adds nothing.
      weights: float32 [T, k], the router's.
      down: [E, D, I]; bfloat16 or `QuantizedExperts` of one part.
      form: as in `moe_gate_up`.
      dtype: of the result, bfloat16 or float32: sums that are to be added to others should not be rounded before.

    Returns:
      [T, D].

    Raises:
      ValueError: a shape or dtype does not fit; the message names the operand.
    """
    name = "moe_down"
    if hidden.ndim != 3 or hidden.dtype != jnp.bfloat16:
        raise ValueError(f"{name}: hidden is {_describe(hidden)}, expected bfloat16[T, k, I]")
    _check_sizes(name, tokens=hidden.shape[0], top_k=hidden.shape[1], intermediate_size=hidden.shape[2])
    _check_routing(name, experts, weights, hidden.shape[:2])
    _check_experts(name, "down", down, rows=None, columns=hidden.shape[2], parts=1)
    return _Down(_check_form(name, form), _output_dtype(name, dtype))((hidden, experts, weights), (down,))


def warp_decode(
    x: Array,
    experts: Array,
    weights: Array,
    gate_up: Experts,
    down: Experts,
    *,
    form: Form = "auto",
    dtype: Any = jnp.bfloat16,
) -> Array:
    """A mixture's experts on few tokens: `moe_down` of `moe_gate_up`, in one call.

    >>> experts, weights, _ = north_jax.moe.route(config, mlp["router"], h)
    >>> out = north_jax.moe.warp_decode(h, experts, weights, mlp["gate_up"], mlp["down"])  # [T, D]

    Args:
      x: bfloat16 [T, D], 1 to 64 tokens; D is a multiple of 32.
      experts: int32 [T, k], k up to 16; an id outside [0, E) adds nothing.
      weights: float32 [T, k], the router's.
      gate_up: [E, 2I, D], gate rows first; bfloat16 or `QuantizedExperts` of two parts. I is a multiple of 32.
      down: [E, D, I]; bfloat16 or `QuantizedExperts` of one part.
      form: as in `moe_gate_up`.
      dtype: of the result, bfloat16 or float32.

    Returns:
      [T, D]. Derivatives with respect to x, weights and unquantised experts are those of the pure-JAX form. Under vmap,
      batches of tokens become more tokens of one call, as far as 64 go.

    Raises:
      ValueError: a shape or dtype does not fit; the message names the operand.
    """
    name = "warp_decode"
    _check_tokens(name, x, experts)
    _check_routing(name, experts, weights, experts.shape)
    _check_experts(name, "gate_up", gate_up, rows=None, columns=x.shape[1], parts=2)
    _check_experts(name, "down", down, rows=x.shape[1], columns=gate_up.shape[1] // 2, parts=1)
    if down.shape[0] != gate_up.shape[0]:
        raise ValueError(f"{name}: down has {down.shape[0]} experts, gate_up {gate_up.shape[0]}")
    return _Both(_check_form(name, form), _output_dtype(name, dtype))((x, experts, weights), (gate_up, down))


class _GateUp(Operation):
    name = "moe_gate_up"

    def reference(self, rows: Rows, weights: Weights) -> Array:
        return gate_up_reference(*rows, *weights)

    def results(self, rows: Rows, weights: Weights) -> Sequence[tuple[tuple[int, ...], Any]]:
        return [((*rows[1].shape, weights[0].shape[1] // 2), jnp.bfloat16)]


@dataclasses.dataclass(frozen=True)
class _Down(Operation):
    name = "moe_down"
    dtype: Any

    def reference(self, rows: Rows, weights: Weights) -> Array:
        return down_reference(*rows, *weights, dtype=self.dtype)

    def results(self, rows: Rows, weights: Weights) -> Sequence[tuple[tuple[int, ...], Any]]:
        return [((rows[0].shape[0], weights[0].shape[1]), self.dtype)]


@dataclasses.dataclass(frozen=True)
class _Both(Operation):
    name = "warp_decode"
    dtype: Any

    def reference(self, rows: Rows, weights: Weights) -> Array:
        x, experts, factors = rows
        gate_up, down = weights
        return down_reference(gate_up_reference(x, experts, gate_up), experts, factors, down, dtype=self.dtype)

    def results(self, rows: Rows, weights: Weights) -> Sequence[tuple[tuple[int, ...], Any]]:
        hidden = ((*rows[1].shape, weights[0].shape[1] // 2), jnp.bfloat16)
        return [(rows[0].shape, self.dtype), hidden]


def _check_tokens(name: str, x: Array, experts: Array) -> None:
    if x.ndim != 2 or x.dtype != jnp.bfloat16:
        raise ValueError(f"{name}: x is {_describe(x)}, expected bfloat16[T, D]")
    if experts.ndim != 2 or experts.dtype != jnp.int32 or experts.shape[0] != x.shape[0]:
        raise ValueError(f"{name}: experts is {_describe(experts)}, expected int32[{x.shape[0]}, k]")
    _check_sizes(name, tokens=x.shape[0], top_k=experts.shape[1], hidden_size=x.shape[1])


def _check_sizes(name: str, **sizes: int) -> None:
    most = {"tokens": MAX_TOKENS, "top_k": MAX_TOP_K}
    for size_name, size in sizes.items():
        if size_name in most:
            if not 1 <= size <= most[size_name]:
                raise ValueError(f"{name}: {size_name} is {size}, expected 1 to {most[size_name]}")
        elif size < 1 or size % SIZE_STEP:
            raise ValueError(f"{name}: {size_name} is {size}, expected a multiple of {SIZE_STEP}")


def _check_routing(name: str, experts: Array, weights: Array, shape: tuple[int, ...]) -> None:
    for operand_name, operand, dtype in (("experts", experts, jnp.int32), ("weights", weights, jnp.float32)):
        if operand.shape != shape or operand.dtype != dtype:
            raise ValueError(
                f"{name}: {operand_name} is {_describe(operand)}, expected {jnp.dtype(dtype).name}{list(shape)}"
            )


def _check_experts(
    name: str, operand_name: str, experts: Experts, *, rows: int | None, columns: int, parts: int
) -> None:
    """rows: None where any number will do that the parts divide into multiples of SIZE_STEP."""
    quantized = isinstance(experts, QuantizedExperts)
    dtype = VALUES if quantized else jnp.dtype(jnp.bfloat16)
    expected = f"{dtype.name}[E, {rows or ('2I' if parts == 2 else 'D')}, {columns}]"
    fits = experts.ndim == 3 and experts.dtype == dtype and experts.shape[2] == columns
    if not fits or rows not in (None, experts.shape[1]) or experts.shape[0] < 1:
        raise ValueError(f"{name}: {operand_name} is {_describe(experts)}, expected {expected}")
    part = experts.shape[1] / parts
    if part < 1 or part % SIZE_STEP:
        size_name = "intermediate_size" if parts == 2 else "hidden_size"
        raise ValueError(f"{name}: {size_name} of {operand_name} is {part:g}, expected a multiple of {SIZE_STEP}")
    if isinstance(experts, QuantizedExperts):
        _check_scales(name, operand_name, experts, parts)


def _check_scales(name: str, operand_name: str, experts: QuantizedExperts, parts: int) -> None:
    if experts.parts != parts:
        raise ValueError(f"{name}: {operand_name} is quantised as {experts.parts} projections, expected {parts}")
    scheme = experts.scheme
    dtype = MX_SCALES if scheme == "mxfp8" else jnp.dtype(jnp.float32)
    shape = scales_shape(scheme, experts.shape, parts)
    if experts.scales.shape != shape or experts.scales.dtype != dtype:
        found = _describe(experts.scales)
        raise ValueError(f"{name}: the scales of {operand_name} are {found}, expected {dtype.name}{list(shape)}")


def _check_form(name: str, form: Form) -> Form:
    if form not in get_args(Form.__value__):
        raise ValueError(f"{name}: form is {form!r}, expected one of {', '.join(get_args(Form.__value__))}")
    return form


def _output_dtype(name: str, dtype: Any) -> Any:
    if jnp.dtype(dtype) not in _OUTPUT_DTYPES:
        raise ValueError(f"{name}: dtype is {jnp.dtype(dtype).name}, expected bfloat16 or float32")
    return jnp.dtype(dtype)


def _describe(operand: Any) -> str:
    return f"{jnp.dtype(operand.dtype).name}{list(operand.shape)}"

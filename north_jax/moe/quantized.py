"""Experts' weights in eight bits: the formats, quantisers and dequantisers.

All store e4m3 values and differ in what a scale covers:

* `fp8_channel`: one float32 scale a row (an output channel), as compressed-tensors' "channel" strategy has it.
* `fp8_block`: one float32 scale for 128 × 128 weights, as in DeepSeek's and Qwen's FP8 checkpoints.
* `mxfp8`: one e8m0 scale, a power of two, for 32 weights of a row (OCP Microscaling Formats, version 1.0).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from ..layers import Array

type Scheme = Literal["fp8_channel", "fp8_block", "mxfp8"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme.__value__)

VALUES = jnp.dtype(jnp.float8_e4m3fn)
MX_SCALES = jnp.dtype(jnp.float8_e8m0fnu)
BLOCK = 128  # rows and columns of a block; columns that four scales of mxfp8 cover
GROUP = 32  # values that share a scale of mxfp8
LARGEST = 448.0  # of e4m3
_MX_BIAS = 127  # e8m0 is the exponent of float32, NaN for 255


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedExperts:
    """The weights of all experts of a layer, [E, rows, columns], in eight bits.

    Attributes:
      values: e4m3 [E, rows, columns].
      scales: what values are multiplied with. fp8_channel: float32 [E, rows]. fp8_block: float32 [E, parts · ⌈rows /
        parts / 128⌉, ⌈columns / 128⌉]. mxfp8: e8m0 [E, rows, 4 · ⌈columns / 128⌉], of which the first columns / 32 of a
        row count: every row begins at a whole 32-bit word.
      parts: projections stacked in the rows, each with blocks of its own: 2 for gate_up, 1 for down.
    """

    values: Array
    scales: Array
    parts: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def scheme(self) -> Scheme:
        """The format, which the scales' type and rank tell."""
        if self.scales.dtype == MX_SCALES:
            return "mxfp8"
        return "fp8_channel" if self.scales.ndim == 2 else "fp8_block"

    @property
    def shape(self) -> tuple[int, ...]:
        """[E, rows, columns]."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """3."""
        return self.values.ndim

    @property
    def dtype(self) -> Any:
        """The type of the values."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return int(self.values.nbytes + self.scales.nbytes)

    def __getitem__(self, experts: Array) -> Array:
        """The weights of some experts as float32: index [...] → [..., rows, columns]."""
        return _dequantize(self.values[experts], _as_bits(self.scales)[experts], self.scheme, self.parts)


type Experts = Array | QuantizedExperts
"""Weights [E, rows, columns] of all experts of a layer, in bfloat16 or in eight bits."""


def scales_shape(scheme: Scheme, shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Shape of the scales of weights of `shape` [..., rows, columns]."""
    *rest, rows, columns = shape
    match scheme:
        case "fp8_channel":
            return (*rest, rows)
        case "fp8_block":
            return (*rest, parts * -(-rows // parts // BLOCK), -(-columns // BLOCK))
        case "mxfp8":
            return (*rest, rows, -(-columns // BLOCK) * (BLOCK // GROUP))
        case _:
            raise ValueError(f"scheme is {scheme!r}, expected one of {', '.join(SCHEMES)}")


def quantize(weights: Array, scheme: Scheme, *, parts: int = 1) -> QuantizedExperts:
    """Rounds weights to eight bits; the largest of those that share a scale stays in range.

    Args:
      weights: [E, rows, columns]; columns are a multiple of 32.
      scheme: the format.
      parts: projections stacked in the rows: 2 for gate_up, 1 for down.

    Raises:
      ValueError: a shape or the scheme does not fit; the message names it.
    """
    if weights.ndim != 3 or weights.shape[1] % parts or weights.shape[2] % GROUP:
        raise ValueError(
            f"quantize: weights is {list(weights.shape)}, expected [E, rows, columns] with rows a multiple of {parts} "
            f"and columns one of {GROUP}"
        )
    wide = weights.astype(jnp.float32)
    shape = scales_shape(scheme, wide.shape, parts)
    largest = _largest(jnp.abs(wide), scheme, parts)
    if scheme == "mxfp8":
        # The least power of two that brings the largest value into range: 448 is 0.875 · 2^9.
        mantissa, exponent = jnp.frexp(largest)
        exponent = jnp.where(mantissa <= 0.875, exponent - 9, exponent - 8)
        bits = (jnp.clip(exponent, -126, 127) + _MX_BIAS).astype(jnp.uint8)
        scales = jax.lax.bitcast_convert_type(bits, MX_SCALES)
    else:
        scales = jnp.where(largest > 0, largest / LARGEST, 1.0)
    assert scales.shape == shape
    divided = wide / _spread(scales, wide.shape, scheme, parts)
    values = jnp.clip(divided, -LARGEST, LARGEST).astype(VALUES)  # beyond its range the type has only NaN
    return QuantizedExperts(values, scales, parts)


def dequantize(experts: QuantizedExperts, dtype: Any = jnp.bfloat16) -> Array:
    """The weights [E, rows, columns] as `dtype`."""
    return _dequantize(experts.values, experts.scales, experts.scheme, experts.parts).astype(dtype)


def _dequantize(values: Array, scales: Array, scheme: Scheme, parts: int) -> Array:
    """values [..., rows, columns] times their scales, float32."""
    return values.astype(jnp.float32) * _spread(scales, values.shape, scheme, parts)


def _spread(scales: Array, shape: tuple[int, ...], scheme: Scheme, parts: int) -> Array:
    """Each value's scale: float32 [..., rows, columns], or a shape that broadcasts to it."""
    *rest, rows, columns = shape
    if scheme == "mxfp8":
        return jnp.repeat(_powers(_as_bits(scales)), GROUP, axis=-1)[..., :columns]
    wide = scales.astype(jnp.float32)
    if scheme == "fp8_channel":
        return wide[..., None]
    blocks = wide.reshape(*rest, parts, -1, wide.shape[-1])
    rows_of_blocks = jnp.repeat(blocks, BLOCK, axis=-2)[..., : rows // parts, :]
    return jnp.repeat(rows_of_blocks, BLOCK, axis=-1)[..., :columns].reshape(shape)


def _as_bits(scales: Array) -> Array:
    """Scales of e8m0 as bytes, others as they are: not every operation of every backend knows the type."""
    return jax.lax.bitcast_convert_type(scales, jnp.uint8) if scales.dtype == MX_SCALES else scales


def _powers(bits: Array) -> Array:
    """The float32 values of e8m0 bytes."""
    exponents = jnp.where(bits == 0, 1 << 22, bits.astype(jnp.int32) << 23)  # 2^-127 is subnormal
    return jnp.where(bits == 255, jnp.nan, jax.lax.bitcast_convert_type(exponents, jnp.float32))


def _largest(sizes: Array, scheme: Scheme, parts: int) -> Array:
    """The largest of the values that share a scale, in the shape of the scales; 0 where there are none."""
    *rest, rows, _ = sizes.shape
    if scheme == "fp8_channel":
        return jnp.max(sizes, axis=-1)
    padded = _pad(sizes, -1)
    if scheme == "mxfp8":
        return jnp.max(padded.reshape(*rest, rows, -1, GROUP), axis=-1)
    stacked = _pad(padded.reshape(*rest, parts, rows // parts, -1), -2)
    blocks = stacked.reshape(*rest, parts, stacked.shape[-2] // BLOCK, BLOCK, -1, BLOCK)
    return jnp.max(blocks, axis=(-3, -1)).reshape(scales_shape(scheme, sizes.shape, parts))


def _pad(array: Array, axis: int) -> Array:
    """With zeros to a multiple of BLOCK."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % BLOCK)
    return jnp.pad(array, widths)

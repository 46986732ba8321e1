"""Checkpoints whose linear layers are e4m3 with scales, as the compressed-tensors library writes them.

A quantised matrix `x.weight` [out, in] is F8_E4M3 beside a tensor `x.weight_scale`, whose shape the strategy says:
tensor [1]; channel [out, 1]; block [⌈out / 128⌉, ⌈in / 128⌉]; group [out, in / 32], e8m0 as bytes (MXFP8). What the
file says of activations does not concern us: they stay in bfloat16. Experts are kept in eight bits, as `moe` takes
them; other matrices, a small part of the model, are multiplied out when they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ..moe import QuantizedExperts
from ..moe.quantized import BLOCK, GROUP, MX_SCALES, scales_shape
from .errors import CheckpointError, enumerate_names
from .layout import Parameter, ParamPath, Piece
from .safetensors_file import Tensor

type Strategy = Literal["tensor", "channel", "block", "group"]

_VALUES = "F8_E4M3"
_BYTES = ("U8", "F8_E8M0")  # safetensors' types of e8m0 scales
_FORMATS = ("float-quantized", "mxfp8-quantized", "naive-quantized")
_SCALES = "scales"  # last key of the path of a parameter's scales while they are read


def strategy_of(where: str, details: Mapping[str, Any]) -> Strategy:
    """The strategy of a `quantization_config`.

    Args:
      where: what the messages begin with.
      details: the field's value.

    Raises:
      CheckpointError: the method, format or scheme is another one; the message names it.
    """
    method, form = details.get("quant_method"), details.get("format")
    if method != "compressed-tensors" or form not in _FORMATS:
        named = " ".join(str(value) for value in (method, form) if value is not None)
        raise CheckpointError(f"{where}: quantised checkpoints are not supported yet ({named})")
    groups = details.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise CheckpointError(f"{where}: config_groups must have one group")
    (group,) = groups.values()
    scheme = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(scheme, Mapping):
        raise CheckpointError(f"{where}: the group has no weights")
    strategy: Any = scheme.get("strategy")
    fixed: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    if strategy == "block":
        fixed["block_structure"] = [BLOCK, BLOCK]
    if strategy == "group":
        fixed["group_size"] = GROUP
    for name, only in fixed.items():
        if scheme.get(name, only) != only:
            raise CheckpointError(f"{where}: weights.{name} = {scheme[name]!r} is not supported (only {only!r} is)")
    if strategy not in get_args(Strategy.__value__):
        raise CheckpointError(f"{where}: weights.strategy = {strategy!r} is not supported")
    return cast(Strategy, strategy)


def scale_parameters(
    parameters: Sequence[Parameter], tensors: Mapping[str, Tensor], strategy: Strategy
) -> list[Parameter]:
    """The scales of the parameters that are quantised, as parameters of their own at (*path, "scales").

    Raises:
      CheckpointError: a parameter is quantised in part, or lies on disk in a form whose scales are not known.
    """
    return [_scales_of(parameter, tensors, strategy) for parameter in parameters if _is_quantised(parameter, tensors)]


def join(
    parameters: Sequence[Parameter],
    tensors: Mapping[str, Tensor],
    arrays: dict[ParamPath, jax.Array],
    strategy: Strategy,
    dtype: np.dtype | None,
) -> dict[ParamPath, Any]:
    """Arrays and their scales as the params tree has them.

    Args:
      parameters: without scales.
      tensors: by name.
      arrays: parameters and scales as they were read; emptied.
      strategy: of the scales.
      dtype: of what is not kept in eight bits; None leaves arrays as they are and takes bfloat16 for dequantised ones.
    """
    joined: dict[ParamPath, Any] = {}
    for parameter in parameters:
        values = arrays.pop(parameter.path)
        if not _is_quantised(parameter, tensors):
            joined[parameter.path] = values if dtype is None else values.astype(dtype)
            continue
        scales = arrays.pop((*parameter.path, _SCALES))
        if values.ndim == 3:
            joined[parameter.path] = _experts(parameter, values, scales, strategy)
        else:
            whole = values.astype(jnp.float32) * _spread(parameter, scales, strategy)
            joined[parameter.path] = whole.astype(dtype or jnp.bfloat16)
    return joined


def _is_quantised(parameter: Parameter, tensors: Mapping[str, Tensor]) -> bool:
    quantised = [piece.name for piece in parameter.pieces if tensors[piece.name].dtype == _VALUES]
    if quantised and len(quantised) < len(parameter.pieces):
        rest = [piece.name for piece in parameter.pieces if piece.name not in quantised]
        raise CheckpointError(f"{parameter.name} is quantised in part: not {enumerate_names(rest)}")
    return bool(quantised)


def _matrices(parameter: Parameter) -> Iterator[tuple[tuple[int, ...], list[Piece]]]:
    """The pieces of each matrix, from the first row on: () for a matrix, (expert,) for one of many."""
    matrices: dict[tuple[int, ...], list[Piece]] = {}
    for piece in parameter.pieces:
        matrices.setdefault(piece.start[:-2], []).append(piece)
    for index, pieces in matrices.items():
        yield index, sorted(pieces, key=lambda piece: piece.start[-2])


def _scales_of(parameter: Parameter, tensors: Mapping[str, Tensor], strategy: Strategy) -> Parameter:
    pieces = []
    rows_of_scales = 0
    for index, matrix in _matrices(parameter):
        row = 0
        for piece in matrix:
            if len(piece.shape) != 2 or not piece.name.endswith(".weight"):
                raise CheckpointError(f"{piece.name}: quantised, and not a matrix of one linear layer")
            shape = _shape(piece, f"{piece.name}_scale", tensors, strategy)
            pieces.append(Piece(f"{piece.name}_scale", shape, (*index, row, 0)))
            row += shape[0] if len(shape) == 2 else 1
        rows_of_scales = row
    columns = pieces[0].shape[1] if len(pieces[0].shape) == 2 else 1
    shape = (*parameter.shape[:-2], rows_of_scales, columns)
    return Parameter((*parameter.path, _SCALES), shape, tuple(pieces))


def _shape(piece: Piece, name: str, tensors: Mapping[str, Tensor], strategy: Strategy) -> tuple[int, ...]:
    """Shape of a piece's scales."""
    rows, columns = piece.shape
    match strategy:
        case "tensor":  # both are written
            return () if name in tensors and tensors[name].shape == () else (1,)
        case "channel":
            return rows, 1
        case "block":
            return -(-rows // BLOCK), -(-columns // BLOCK)
        case "group":
            return rows, columns // GROUP


def _rows_of(parameter: Parameter, strategy: Strategy) -> np.ndarray:
    """For every row of a matrix, the row of its scales."""
    _, pieces = next(iter(_matrices(parameter)))
    row, indices = 0, []
    for piece in pieces:
        rows = piece.shape[0]
        within = {"tensor": np.zeros(rows, int), "block": np.arange(rows) // BLOCK}.get(strategy, np.arange(rows))
        indices.append(row + within)
        row = int(indices[-1][-1]) + 1
    return np.concatenate(indices)


def _spread(parameter: Parameter, scales: jax.Array, strategy: Strategy) -> jax.Array:
    """The scale of every value of a matrix [rows, columns], or a shape that broadcasts to it."""
    wide = _as_e8m0(scales) if strategy == "group" else scales
    of_rows = wide.astype(jnp.float32)[_rows_of(parameter, strategy)]
    step = {"block": BLOCK, "group": GROUP}.get(strategy)
    return of_rows if step is None else jnp.repeat(of_rows, step, axis=1)[:, : parameter.shape[-1]]


def _experts(parameter: Parameter, values: jax.Array, scales: jax.Array, strategy: Strategy) -> QuantizedExperts:
    _, pieces = next(iter(_matrices(parameter)))
    parts = len(pieces)
    match strategy:
        case "tensor" | "channel":
            of_rows = scales[..., 0].astype(jnp.float32)[:, _rows_of(parameter, strategy)]
            return QuantizedExperts(values, of_rows, parts)
        case "block":
            return QuantizedExperts(values, scales.astype(jnp.float32), parts)
        case "group":
            padding = scales_shape("mxfp8", values.shape, parts)[-1] - scales.shape[-1]
            one = jnp.asarray(127, jnp.uint8)
            padded = jnp.pad(_as_bytes(scales), ((0, 0), (0, 0), (0, padding)), constant_values=one)
            return QuantizedExperts(values, _as_e8m0(padded), parts)


def _as_bytes(scales: jax.Array) -> jax.Array:
    return scales if scales.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(scales, jnp.uint8)


def _as_e8m0(scales: jax.Array) -> jax.Array:
    return scales if scales.dtype == MX_SCALES else jax.lax.bitcast_convert_type(scales, MX_SCALES)


def readable(tensor: Tensor, strategy: Strategy) -> bool:
    """Whether a tensor has a type that only quantised checkpoints have."""
    return tensor.dtype == _VALUES or (strategy == "group" and tensor.dtype in _BYTES)

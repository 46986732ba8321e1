"""The safetensors container: a header that is checked before any data is read, and bytes read or written as a stream.

Format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length n; n bytes of JSON, a map from
name to {dtype, shape, data_offsets: [begin, end]} with an optional `__metadata__`; then the tensors, row-major, back to
back. The `safetensors` package maps whole files into memory, so that every page touched counts as resident, and needs
all tensors of a file in memory to write it; neither suits a checkpoint of 61 GB.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .errors import CheckpointError, enumerate_names

DTYPES: Mapping[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
"""The weight types that are read and written, by their safetensors name."""

READABLE_DTYPES: Mapping[str, np.dtype] = {
    **DTYPES,
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U8": np.dtype(np.uint8),
}
"""Those, and the types of quantised checkpoints, which are read alone."""

DTYPE_NAMES: Mapping[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def weight_dtype(dtype: Any, context: str = "dtype") -> np.dtype:
    """The NumPy type of a weight type given by name or as a NumPy or JAX type.

    Raises:
      CheckpointError: the type is none of bfloat16, float16 and float32; the message begins with `context`.
    """
    try:
        result = np.dtype(dtype)
    except TypeError:
        raise CheckpointError(f"{context}: {dtype!r} is not a type") from None
    if result not in DTYPE_NAMES:
        raise CheckpointError(f"{context}: {result} is not supported, only {', '.join(map(str, DTYPE_NAMES))}")
    return result


TensorTypes = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
"""Name → dtype and shape."""

# Bits per element of every type the format knows: sizes can be checked even where the values cannot be read.
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
    "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

_MAX_HEADER = 100_000_000  # the format's own limit, bytes


@dataclass(frozen=True)
class Tensor:
    """Where one tensor's bytes lie. `dtype` is the safetensors name, `offset` counts from the start of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def read_header(file: Path) -> dict[str, Tensor]:
    """All tensors of `file` by name, in the order of their bytes.

    Raises:
      CheckpointError: the file is missing, cut off, too long, or its header contradicts itself.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise CheckpointError(f"{file}: not a safetensors file, or cut off within its header ({size} bytes)")
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    try:
        entries = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise CheckpointError(f"{file}: the safetensors header is not valid JSON ({error})") from error
    except _RepeatedKeyError as error:
        raise CheckpointError(f"{file}: the safetensors header names {error} twice") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: the safetensors header is not a JSON object")
    entries.pop("__metadata__", None)

    tensors = sorted((_tensor(file, 8 + length, name, entry) for name, entry in entries.items()), key=_position)
    end = 8 + length
    for tensor in tensors:
        if tensor.offset != end:
            where = f"begins at byte {tensor.offset}, expected {end}"
            raise CheckpointError(f"{file}: {tensor.name} {where} (gap or overlap)")
        end += tensor.nbytes
    if end != size:
        state = "cut off" if size < end else "longer than its header says"
        raise CheckpointError(f"{file}: {state} ({size} bytes, expected {end})")
    return {tensor.name: tensor for tensor in tensors}


def read_bytes(tensor: Tensor, begin: int, out: np.ndarray) -> None:
    """Fill `out` (contiguous) with the tensor's bytes from byte `begin` on. Safe to call from several threads."""
    view = memoryview(out.view(np.uint8).reshape(-1))
    try:
        with tensor.file.open("rb", buffering=0) as stream:
            stream.seek(tensor.offset + begin)
            while view:
                count = stream.readinto(view)  # one call moves at most 2 GB
                if not count:
                    raise CheckpointError(f"{tensor.file}: ended while {tensor.name} was being read")
                view = view[count:]
    except OSError as error:
        raise CheckpointError(f"{tensor.file}: {error.strerror}, while {tensor.name} was being read") from error


def write_file(file: Path, types: TensorTypes, arrays: Iterable[np.ndarray]) -> None:
    """Writes the tensors of `types` with their values from `arrays`, taken one at a time and in the same order.

    Raises:
      CheckpointError: a dtype is not a weight type, an array is not what `types` announced, or the file cannot be
        written (the disk is full).
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # Transformers refuses a file without it
    end = 0
    for name, (dtype, shape) in types.items():
        weight_dtype(dtype, f"cannot write {name}")
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # data starts at a multiple of 8
    with file.open("wb", buffering=0) as stream:
        _write_all(stream, len(raw).to_bytes(8, "little") + raw)
        for (name, (dtype, shape)), array in zip(types.items(), arrays, strict=True):
            if array.dtype != dtype or array.shape != shape:
                raise CheckpointError(f"{name}: {array.dtype} {array.shape} where {dtype} {shape} was announced")
            _write_all(stream, np.ascontiguousarray(array).view(np.uint8).reshape(-1))


def _write_all(stream: Any, data: Any) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[stream.write(view) :]
    except OSError as error:  # such as a full disk; it does not name the file by itself
        raise CheckpointError(f"{stream.name}: {error.strerror}") from error


def _position(tensor: Tensor) -> tuple[int, int]:
    return tensor.offset, tensor.nbytes


def _tensor(file: Path, data_start: int, name: str, entry: Any) -> Tensor:
    """One header entry, checked by itself."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file}: the header entry of {name} lacks dtype, shape or data_offsets") from error
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, begin, end)):
        raise CheckpointError(f"{file}: {name} has an impossible shape {shape} or position [{begin}, {end}]")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointError(f"{file}: {name} has the unknown type {dtype!r}")
    nbytes = math.prod(shape) * _BITS[dtype] // 8
    if end - begin != nbytes:
        raise CheckpointError(f"{file}: {name} takes {end - begin} bytes, but {dtype} {list(shape)} needs {nbytes}")
    return Tensor(name, dtype, shape, file, data_start + begin, nbytes)


class _RepeatedKeyError(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON objects whose keys occur once: a second entry of a tensor would silently replace the first."""
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedKeyError(enumerate_names(sorted({name for name in names if names.count(name) > 1})))
    return result

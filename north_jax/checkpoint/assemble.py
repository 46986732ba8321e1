"""Parameters from tensors on disk to devices, with host memory bounded whatever the size of the checkpoint.

On a CPU a parameter (or the part of it that one device holds) is read into one buffer, straight from the files by a few
threads, and the buffer becomes the array: nothing is copied. An accelerator gets a parameter in chunks of rows, each
written in place into the array on the device while the next one is being read.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from .layout import Parameter, ParamPath, Piece
from .progress import Progress
from .safetensors_file import READABLE_DTYPES, Tensor, read_bytes
from .tree import Shardings, sharding_of

Ranges = tuple[tuple[int, int], ...]
"""First and last + 1 along each axis."""

Placement = SingleDeviceSharding | None
"""One device; None is the default device, without committing the array to it."""

_CHUNK_BYTES = 128 << 20  # what an accelerator is sent at once
_READ_BYTES = 16 << 20  # unit of work of a reading thread
_SCRATCH_BYTES = 4 << 20  # buffer of a reading thread, where values are cast or columns cut out
_THREADS = min(8, os.cpu_count() or 1)
_ALIGNMENT = 64  # bytes; the CPU backend takes a buffer over without copying only if it is aligned so


def load_parameters(
    parameters: Sequence[Parameter],
    tensors: Mapping[str, Tensor],
    *,
    dtype: np.dtype | None,
    shardings: Shardings,
    progress: Progress,
) -> dict[ParamPath, jax.Array]:
    """Reads `parameters` onto devices, in order.

    Args:
      parameters: what to read.
      tensors: the pieces by name, with the shapes that `parameters` announce.
      dtype: the arrays' type; None keeps the tensors' own (pieces of different types are promoted).
      shardings: where each parameter goes.
      progress: called as bytes arrive.

    Raises:
      CheckpointError: a file cannot be read, or a sharding does not fit its parameter (found before anything is read).
    """
    placements = [sharding_of(shardings, parameter.path, parameter.shape) for parameter in parameters]
    meter = _Meter(progress, sum(tensors[piece.name].nbytes for parameter in parameters for piece in parameter.pieces))
    arrays: dict[ParamPath, jax.Array] = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        for parameter, sharding in zip(parameters, placements, strict=True):
            reader = _Reader(parameter, tensors, dtype or _common_dtype(parameter, tensors), threads, meter)
            array = reader.place(sharding)
            if arrays:
                next(reversed(arrays.values())).block_until_ready()  # from here on its host buffers are free
            arrays[parameter.path] = array
    for array in arrays.values():
        array.block_until_ready()
    return arrays


class _Meter:
    """Counts bytes on behalf of a `Progress`."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._done, self._total = progress, 0, total

    def add(self, count: int, name: str) -> None:
        self._done += count
        self._progress(self._done, self._total, name)


@dataclass(frozen=True)
class _Reader:
    """Reads boxes of one parameter and puts them on devices."""

    parameter: Parameter
    tensors: Mapping[str, Tensor]
    dtype: np.dtype
    threads: ThreadPoolExecutor
    meter: _Meter

    def place(self, sharding: Sharding | None) -> jax.Array:
        """The parameter as an array; each distinct shard is read once and holds only its own part of the files."""
        shape = self.parameter.shape
        if sharding is None:
            return self._put(tuple((0, n) for n in shape), [None])[0]
        holders: dict[Ranges, list[Placement]] = defaultdict(list)
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            whole = index if index is not None else (slice(None),) * len(shape)
            box = tuple(s.indices(n)[:2] for s, n in zip(whole, shape, strict=True))
            holders[box].append(SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
        shards = [shard for box, placements in holders.items() for shard in self._put(box, placements)]
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    def _put(self, box: Ranges, placements: Sequence[Placement]) -> list[jax.Array]:
        """The values within `box` on each of the devices."""
        shape = tuple(high - low for low, high in box)
        row_bytes = math.prod(shape[1:]) * self.dtype.itemsize
        step = max(1, _CHUNK_BYTES // row_bytes)
        if shape[0] <= step or _in_host_memory(placements[0]):
            buffer = self.read(box)
            return [jax.device_put(buffer, placement) for placement in placements]
        wholes = [jnp.zeros(shape, self.dtype, device=placement) for placement in placements]
        previous: list[jax.Array] = []
        (low, high), *columns = box
        for row in range(low, high, step):
            buffer = self.read(((row, min(row + step, high)), *columns))
            chunks = [jax.device_put(buffer, placement) for placement in placements]
            wholes = [_write_rows(whole, chunk, row - low) for whole, chunk in zip(wholes, chunks, strict=True)]
            for chunk in previous:
                chunk.block_until_ready()  # from here on its host buffer is free
            previous = chunks
        return wholes

    def read(self, box: Ranges) -> np.ndarray:
        """The values within `box`, in a fresh buffer."""
        buffer = _aligned_empty(tuple(high - low for low, high in box), self.dtype)
        tasks = [task for piece in self.parameter.pieces for task in self._tasks(piece, box)]
        for count in self.threads.map(lambda task: self._run(task[0], task[1], box, buffer), tasks):
            self.meter.add(count, self.parameter.name)
        return buffer

    def _tasks(self, piece: Piece, box: Ranges) -> Iterator[tuple[Piece, Ranges]]:
        """The part of `piece` that lies within `box`, in the parameter's coordinates, cut along the first axis."""
        part = tuple(
            (max(start, low), min(start + size, high))
            for start, size, (low, high) in zip(piece.start, piece.block, box, strict=True)
        )
        if any(low >= high for low, high in part):
            return
        (low, high), *rest = part
        row_bytes = self.tensors[piece.name].nbytes // piece.block[0]
        step = max(1, _READ_BYTES // row_bytes)
        for row in range(low, high, step):
            yield piece, ((row, min(row + step, high)), *rest)

    def _run(self, piece: Piece, part: Ranges, box: Ranges, buffer: np.ndarray) -> int:
        """Fills `part` of the buffer from `piece`; returns the bytes on disk that this stands for."""
        out = buffer[tuple(slice(low - base, high - base) for (low, high), (base, _) in zip(part, box, strict=True))]
        source = tuple((low - start, high - start) for (low, high), start in zip(part, piece.start, strict=True))
        tensor = self.tensors[piece.name]
        _copy(tensor, 0, piece.block, source, out)
        return out.size * READABLE_DTYPES[tensor.dtype].itemsize


def _copy(tensor: Tensor, begin: int, shape: tuple[int, ...], part: Ranges, out: np.ndarray) -> None:
    """Fills `out`, casting, with `part` of the array of `shape` that begins at element `begin` of the tensor."""
    dtype = READABLE_DTYPES[tensor.dtype]
    (low, high), inner = part[0], part[1:]
    row = math.prod(shape[1:])  # elements
    whole_rows = all(span == (0, n) for span, n in zip(inner, shape[1:], strict=True))
    if whole_rows and dtype == out.dtype and out.flags.c_contiguous:
        read_bytes(tensor, (begin + low * row) * dtype.itemsize, out)
    elif inner and (row * dtype.itemsize > _SCRATCH_BYTES or (whole_rows and dtype == out.dtype)):
        for i in range(low, high):
            _copy(tensor, begin + i * row, shape[1:], inner, out[i - low])
    else:
        step = max(1, _SCRATCH_BYTES // (row * dtype.itemsize))
        columns = tuple(slice(*span) for span in inner)
        for i in range(low, high, step):
            rows = min(step, high - i)
            scratch = np.empty((rows, *shape[1:]), dtype)
            read_bytes(tensor, (begin + i * row) * dtype.itemsize, scratch)
            out[i - low : i - low + rows] = scratch[:, *columns]


@partial(jax.jit, donate_argnums=0)
def _write_rows(whole: jax.Array, rows: jax.Array, first: int) -> jax.Array:
    """`whole` with `rows` from row `first` on, in place."""
    return jax.lax.dynamic_update_slice_in_dim(whole, rows, first, axis=0)


def _in_host_memory(placement: Placement) -> bool:
    """Whether an array placed so takes host memory itself, on a CPU or as an accelerator's pinned memory."""
    devices = jax.device_put(np.zeros(0)).devices() if placement is None else placement.device_set
    pinned = placement is not None and placement.memory_kind not in (None, "device")
    return pinned or all(device.platform == "cpu" for device in devices)


def _common_dtype(parameter: Parameter, tensors: Mapping[str, Tensor]) -> np.dtype:
    """The smallest type that holds the values of all pieces exactly."""
    first, *others = {READABLE_DTYPES[tensors[piece.name].dtype] for piece in parameter.pieces}
    return np.dtype(jnp.result_type(first, *others)) if others else first


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array whose first byte lies at a multiple of `_ALIGNMENT`."""
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + nbytes].view(dtype).reshape(shape)

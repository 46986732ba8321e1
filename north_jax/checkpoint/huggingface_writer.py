"""Writing a Hugging Face checkpoint directory: one tensor per expert, in shards, as the published checkpoint has it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from ..config import Config
from ..layers import Params
from .errors import CheckpointError
from .huggingface import INDEX_FILE, SINGLE_FILE
from .layout import Parameter, Piece, parameters
from .safetensors_file import TensorTypes, write_file
from .staging import copy_text_files, staged_directory
from .tree import check_params, host_copy


def export(
    path: str | Path,
    config: Config,
    params: Params,
    *,
    source: str | Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Writes a directory that `load` and Transformers read back to the same values, bit for bit.

    Host memory stays bounded by one parameter. The directory appears under its name only when it is complete.

    Args:
      path: the directory to write.
      config: becomes `config.json`.
      params: arrays of bfloat16, float16 or float32, on any devices; each keeps its type.
      source: a directory to copy tokenizer, chat template and generation configuration from, where it has them.
      max_shard_bytes: size at which a further shard is begun.
      overwrite: replace a checkpoint that is already there.

    Raises:
      CheckpointError: `path` exists; or a parameter is missing, unknown, mis-shaped or of another type.
    """
    arrays = check_params(config, params, "cannot export")
    pieces: dict[str, tuple[Parameter, Piece]] = {}
    types: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for parameter in parameters(config):
        for piece in parameter.pieces:
            pieces[piece.name] = parameter, piece
            types[piece.name] = np.dtype(arrays[parameter.path].dtype), piece.shape

    def values(names: Iterable[str]) -> Iterator[np.ndarray]:
        held, host = None, np.empty(0)
        for name in names:
            parameter, piece = pieces[name]
            if parameter is not held:
                held, host = parameter, host_copy(arrays[parameter.path])
            block = tuple(slice(start, start + size) for start, size in zip(piece.start, piece.block, strict=True))
            yield host[block].reshape(piece.shape)

    write_directory(path, config, types, values, source=source, max_shard_bytes=max_shard_bytes, overwrite=overwrite)


def write_directory(
    path: str | Path,
    config: Config,
    types: TensorTypes,
    values: Callable[[Iterable[str]], Iterator[np.ndarray]],
    *,
    source: str | Path | None = None,
    max_shard_bytes: int,
    overwrite: bool,
) -> None:
    """Writes `config.json` and the tensors of `types`, whose values are asked for in the order they are written."""
    shards = _shards(types, max_shard_bytes)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE_FILE]
    with staged_directory(path, overwrite=overwrite) as directory:
        for file, shard in zip(names, shards, strict=True):
            write_file(directory / file, {name: types[name] for name in shard}, values(shard))
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(map(_nbytes, types.values()))},
                "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard},
            }
            _write_json(directory / INDEX_FILE, index)
        _write_json(directory / "config.json", config.to_dict())
        copy_text_files(source, directory)


def _shards(types: TensorTypes, max_bytes: int) -> list[list[str]]:
    """The tensors in order, cut into shards of at most `max_bytes`; a larger tensor has a shard to itself."""
    if max_bytes < 1:
        raise CheckpointError(f"max_shard_bytes must be positive, found {max_bytes}")
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in types.items():
        nbytes = _nbytes(tensor)
        if shards[-1] and size + nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    # Wider types first, so that every tensor starts at a multiple of its own element size.
    return [sorted(shard, key=lambda name: -types[name][0].itemsize) for shard in shards]


def _nbytes(tensor: tuple[np.dtype, tuple[int, ...]]) -> int:
    dtype, shape = tensor
    return math.prod(shape) * dtype.itemsize


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

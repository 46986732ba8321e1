"""Reading a Hugging Face checkpoint directory: `config.json` and safetensors, in one file or in shards.

Everything that can be wrong with names, shapes and files is found from the headers, before any weight is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config import Config
from ..layers import Params
from .assemble import load_parameters
from .compressed_tensors import Strategy, join, readable, scale_parameters, strategy_of
from .errors import CheckpointError, enumerate_names
from .layout import EMBEDDING, HEAD, Parameter, ParamPath, expert_biases, parameters
from .progress import Progress, silent
from .safetensors_file import DTYPES, Tensor, read_bytes, read_header
from .tree import Shardings, build, mismatches

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_PREFIX = "language_model."  # carried by checkpoints that were cut out of a multimodal model
_QUANTISATION_FIELDS = ("quantization_config", "compression_config", "quantization")
_COMPARED_BYTES = 16 << 20


@dataclass(frozen=True)
class HuggingFaceCheckpoint:
    """A directory whose headers have been checked: every piece of `parameters` is among `tensors`, with its shape.

    Where it is quantised, `scales` are the parameters' scales, in the same way.
    """

    path: Path
    config: Config
    parameters: tuple[Parameter, ...]
    tensors: Mapping[str, Tensor]
    strategy: Strategy | None = None
    scales: tuple[Parameter, ...] = ()


def load_huggingface(
    path: str | Path,
    *,
    dtype: np.dtype | None = None,
    shardings: Shardings = None,
    progress: Progress = silent,
    ignore: Collection[str] = (),
) -> tuple[Config, Params]:
    """Reads configuration and parameters of the checkpoint in directory `path`; see `load` for the arguments.

    Raises:
      ConfigError: `config.json` is missing or not supported.
      CheckpointError: files or tensors are missing, surplus, mis-shaped, damaged or quantised; the message names them.
    """
    checkpoint = open_huggingface(path, ignore=ignore)
    _check_head(checkpoint)
    _check_biases(checkpoint)
    arrays: dict[ParamPath, Any]
    if checkpoint.strategy is None:
        arrays = load_parameters(
            checkpoint.parameters, checkpoint.tensors, dtype=dtype, shardings=shardings, progress=progress
        )
    else:
        if shardings is not None:
            raise CheckpointError(f"{path}: shardings of a quantised checkpoint are not supported")
        everything = (*checkpoint.parameters, *checkpoint.scales)
        read = load_parameters(everything, checkpoint.tensors, dtype=None, shardings=None, progress=progress)
        arrays = join(checkpoint.parameters, checkpoint.tensors, read, checkpoint.strategy, dtype)
    loaded = arrays[("embed",)].dtype.name
    return replace(checkpoint.config, dtype=loaded), build(arrays)


def open_huggingface(path: str | Path, *, ignore: Collection[str] = ()) -> HuggingFaceCheckpoint:
    """Reads `config.json` and all headers, and checks that the tensors are those the configuration asks for.

    Raises:
      ConfigError, CheckpointError: as `load_huggingface`, except for what only the values can show.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory")
    raw, strategy = _read_quantisation(path)
    config = Config.from_json(path, ignore=ignore) if strategy is None else Config.from_dict(raw, ignore=ignore)
    tensors = _canonical(path, _all_tensors(path))
    unreadable = [
        f"{name} ({tensor.dtype})"
        for name, tensor in tensors.items()
        if tensor.dtype not in DTYPES and (strategy is None or not readable(tensor, strategy))
    ]
    if unreadable:
        raise CheckpointError(
            f"{path}: {len(unreadable)} tensors are not {', '.join(DTYPES)}: {enumerate_names(unreadable)}; "
            "quantised checkpoints without a quantization_config are not supported"
        )
    wanted = tuple(parameters(config, tensors.keys()))
    expected = {piece.name: piece.shape for parameter in wanted for piece in parameter.pieces}
    optional = {HEAD: (config.vocab_size, config.hidden_size), **expert_biases(config)}
    expected |= {name: shape for name, shape in optional.items() if name in tensors}
    scales: tuple[Parameter, ...] = ()
    if strategy is not None and expected.keys() <= tensors.keys():
        scales = tuple(scale_parameters(wanted, tensors, strategy))
        expected |= {piece.name: piece.shape for parameter in scales for piece in parameter.pieces}
    report = mismatches(expected, {name: tensor.shape for name, tensor in tensors.items()}, "tensors")
    if report:
        raise CheckpointError(f"{path}: {report}")
    return HuggingFaceCheckpoint(path, config, wanted, tensors, strategy, scales)


def _read_quantisation(path: Path) -> tuple[dict[str, Any], Strategy | None]:
    """config.json without what it says of quantisation, and that; None where it says nothing.

    Raises:
      CheckpointError: the checkpoint is quantised in a way that is not read, named before anything else looks wrong.
    """
    try:
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}, None  # Config.from_json has the better words for it
    given = [field for field in _QUANTISATION_FIELDS if isinstance(raw, dict) and raw.get(field)]
    if not given:
        return {}, None
    details = raw[given[0]]
    if given != [_QUANTISATION_FIELDS[0]] or not isinstance(details, dict):
        bits = details.get("bits") if isinstance(details, dict) else details
        raise CheckpointError(f"{path}: quantised checkpoints are not supported yet ({given[0]}: {bits})")
    strategy = strategy_of(f"{path}: {given[0]}", details)
    return {name: value for name, value in raw.items() if name != given[0]}, strategy


def _all_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of all weight files of the directory, by their name on disk."""
    index = path / INDEX_FILE
    if index.exists():
        return _indexed_tensors(path, _read_index(index))
    single = path / SINGLE_FILE
    if single.exists():
        return read_header(single)
    others = sorted(file.name for file in path.iterdir() if file.suffix in (".safetensors", ".bin", ".pt", ".gguf"))
    found = f"; found {enumerate_names(others)}" if others else ""
    raise CheckpointError(f"{path}: neither {SINGLE_FILE} nor {INDEX_FILE}{found}")


def _read_index(file: Path) -> dict[str, str]:
    """Tensor name → file name."""
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON ({error})") from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{file}: has no weight_map")
    for name, place in places.items():
        if not isinstance(place, str) or place in ("", ".", "..") or "/" in place or "\\" in place:
            raise CheckpointError(f"{file}: {name} lies in {place!r}, which is not a file name")
    return places


def _indexed_tensors(path: Path, places: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of all shards, which must be those of the index, each in the shard it says."""
    shards = sorted(set(places.values()))
    absent = [shard for shard in shards if not os.path.isfile(path / shard)]  # false, too, for an impossible name
    if absent:
        raise CheckpointError(f"{path}: {len(absent)} of {len(shards)} shards are missing: {enumerate_names(absent)}")
    tensors: dict[str, Tensor] = {}
    problems: list[str] = []
    for shard in shards:
        for name, tensor in read_header(path / shard).items():
            if name in tensors:
                problems.append(f"{name} is in {tensors[name].file.name} and in {shard}")
            elif name not in places:
                problems.append(f"{name} is in {shard} and not in the index")
            tensors[name] = tensor
    for name, place in places.items():
        if name not in tensors:
            problems.append(f"{name} is not in {place}, where the index has it")
        elif tensors[name].file.name != place:
            problems.append(f"{name} is in {tensors[name].file.name}, the index has it in {place}")
    if problems:
        raise CheckpointError(f"{path}: index and shards disagree: {enumerate_names(problems)}")
    return tensors


def _canonical(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by the names that `layout` uses."""
    result: dict[str, Tensor] = {}
    twice: list[str] = []
    for tensor in tensors.values():
        name = tensor.name.removeprefix(_PREFIX)
        if name in result:
            twice.append(f"{tensor.name} and {result[name].name}")
        result[name] = tensor
    if twice:
        raise CheckpointError(f"{path}: tensors given twice: {enumerate_names(twice)}")
    return result


def _check_head(checkpoint: HuggingFaceCheckpoint) -> None:
    """An explicit head must be the embedding, bit for bit, since the model ties them."""
    head = checkpoint.tensors.get(HEAD)
    if head is None:
        return
    embedding = checkpoint.tensors[EMBEDDING]
    problem = f"{checkpoint.path}: {head.name} differs from {embedding.name}, and an untied head is not supported"
    if head.dtype != embedding.dtype:
        raise CheckpointError(f"{problem} ({head.dtype} and {embedding.dtype})")
    row_bytes = embedding.shape[1] * DTYPES[embedding.dtype].itemsize
    step = max(1, _COMPARED_BYTES // row_bytes) * row_bytes
    for begin in range(0, embedding.nbytes, step):
        ours, theirs = (np.empty(min(step, embedding.nbytes - begin), np.uint8) for _ in range(2))
        read_bytes(embedding, begin, ours)
        read_bytes(head, begin, theirs)
        if not np.array_equal(ours, theirs):
            row = (begin + int(np.argmax(ours != theirs))) // row_bytes
            raise CheckpointError(f"{problem} (first in row {row})")


def _check_biases(checkpoint: HuggingFaceCheckpoint) -> None:
    """Per-expert biases may be present if they add nothing."""
    nonzero = []
    for name in expert_biases(checkpoint.config):
        tensor = checkpoint.tensors.get(name)
        if tensor is not None:
            values = np.empty(tensor.shape, DTYPES[tensor.dtype])
            read_bytes(tensor, 0, values)
            if values.astype(np.float32).any():
                nonzero.append(tensor.name)
    if nonzero:
        raise CheckpointError(
            f"{checkpoint.path}: {len(nonzero)} expert biases are not zero, and biases are not supported: "
            f"{enumerate_names(nonzero)}"
        )

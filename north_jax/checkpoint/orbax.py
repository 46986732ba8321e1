"""Orbax checkpoints: the params tree as it is, restorable onto any layout of devices.

A directory holds `params/` (Orbax), `config.json` and the text files of the Hugging Face directory it came from.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ..config import Config
from ..layers import Params
from .errors import CheckpointError
from .layout import ParamPath
from .safetensors_file import weight_dtype
from .staging import copy_text_files, staged_directory
from .tree import Shardings, build, check_params, leaves, sharding_of

PARAMS_DIRECTORY = "params"

_CONCURRENT_BYTES = 1_000_000_000  # on the way between disk and devices at once, unless one parameter is larger
_CHUNK_BYTES = 8 << 20  # what is read as a whole, of parameters other than experts


def save(
    path: str | Path,
    config: Config,
    params: Params,
    *,
    source: str | Path | None = None,
    overwrite: bool = False,
) -> None:
    """Writes `config` and `params` to directory `path`, which appears under its name only when it is complete.

    Args:
      path: the directory to write.
      config: the configuration that `params` belong to.
      params: arrays of bfloat16, float16 or float32, on any devices; each keeps its type.
      source: a directory to copy tokenizer, chat template and generation configuration from, where it has them.
      overwrite: replace a checkpoint that is already there.

    Raises:
      CheckpointError: `path` exists; or a parameter is missing, unknown, mis-shaped or of another type.
    """
    # Takes a second to import, which readers of other checkpoints are spared.
    import orbax.checkpoint as ocp  # type: ignore[import-untyped]

    from ..model import param_axes  # imports Flax

    arrays = check_params(config, params, "cannot save")
    for where, array in arrays.items():
        weight_dtype(array.dtype, f"cannot save {'.'.join(map(str, where))}")
    tree = build({_string_keys(where): array for where, array in arrays.items()})
    axes = dict(leaves(param_axes(config)))
    save_args = build({_string_keys(where): ocp.SaveArgs(**_chunks(axes[where])) for where in arrays})
    with staged_directory(path, overwrite=overwrite) as directory:
        with ocp.Checkpointer(_handler(max(array.nbytes for array in arrays.values()))) as checkpointer:
            checkpointer.save(directory / PARAMS_DIRECTORY, args=ocp.args.PyTreeSave(tree, save_args=save_args))
        (directory / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
        copy_text_files(source, directory)


def restore(
    path: str | Path,
    *,
    shardings: Shardings = None,
    dtype: Any = None,
    ignore: Collection[str] = (),
) -> tuple[Config, Params]:
    """Reads what `save` wrote, whatever devices it was saved from.

    Args:
      path: the directory.
      shardings: where each parameter goes; None is the default device.
      dtype: bfloat16, float16 or float32 for all parameters; None keeps the saved types.
      ignore: fields of `config.json` to skip although this code does not know them.

    Raises:
      ConfigError: `config.json` is missing or not supported.
      CheckpointError: the directory holds no Orbax parameters, damaged ones, or others than its configuration asks for.
    """
    import orbax.checkpoint as ocp

    dtype = None if dtype is None else weight_dtype(dtype)
    path = Path(path).resolve()
    if not is_orbax(path):
        raise CheckpointError(f"{path}: no Orbax checkpoint (no {PARAMS_DIRECTORY}/_METADATA)")
    config = Config.from_json(path, ignore=ignore)
    directory = path / PARAMS_DIRECTORY
    with _naming(directory), ocp.Checkpointer(_handler(_CONCURRENT_BYTES)) as checkpointer:
        metadata = checkpointer.metadata(directory).item_metadata
    if metadata is None:
        raise CheckpointError(f"{directory}: Orbax cannot read its metadata")
    saved = metadata.tree
    described = check_params(config, build({_int_keys(where): leaf for where, leaf in leaves(saved)}), str(path))
    restore_args = {}
    for where, leaf in described.items():
        sharding = sharding_of(shardings, where, leaf.shape) or SingleDeviceSharding(jax.devices()[0])
        restore_args[_string_keys(where)] = ocp.ArrayRestoreArgs(sharding=sharding, dtype=dtype or leaf.dtype)
    largest = max(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in described.values())
    with _naming(directory), ocp.Checkpointer(_handler(largest)) as checkpointer:
        tree = checkpointer.restore(directory, args=ocp.args.PyTreeRestore(restore_args=build(restore_args)))
    params = build({_int_keys(where): array for where, array in leaves(tree)})
    return replace(config, dtype=params["embed"].dtype.name), params


@contextlib.contextmanager
def _naming(directory: Path) -> Iterator[None]:
    """Names the directory in what Orbax raises for damaged files, which may be of any type, even plain Exception."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{directory}: Orbax cannot read it: {error}") from error


def is_orbax(path: Path) -> bool:
    """Whether directory `path` was written by `save`."""
    return (path / PARAMS_DIRECTORY / "_METADATA").is_file()


def _handler(largest: int) -> Any:
    """Orbax's handler of trees, with its buffers bounded; `largest` is the size of the largest array in bytes."""
    import orbax.checkpoint as ocp

    # An array larger than the bound would be refused, and Orbax counts in units of 10⁹ bytes.
    gigabytes = math.ceil(max(largest, _CONCURRENT_BYTES) / 1e9)
    return ocp.PyTreeCheckpointHandler(
        use_compression=False,
        save_concurrent_gb=gigabytes,
        save_device_host_concurrent_gb=gigabytes,
        restore_concurrent_gb=gigabytes,
    )


def _chunks(axes: tuple[str | None, ...]) -> dict[str, Any]:
    """How a parameter of these logical axes is cut in its file, so that a host that restores a part reads only that.

    By default Orbax's unit of reading is what one device had when the parameter was saved, all experts of a layer, say.
    """
    return {"shard_axes": (0,)} if axes[0] == "expert" else {"chunk_byte_size": _CHUNK_BYTES}


def _string_keys(path: ParamPath) -> ParamPath:
    """The path as Orbax keeps it: it knows no int keys."""
    return tuple(map(str, path))


def _int_keys(path: ParamPath) -> ParamPath:
    """The path with the numbers of layers as ints again."""
    return tuple(int(key) if isinstance(key, str) and key.isdecimal() else key for key in path)

"""`load`: one call for every kind of checkpoint."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..layers import Params
from .errors import CheckpointError
from .huggingface import load_huggingface
from .orbax import is_orbax, restore
from .progress import Progress, default_progress
from .safetensors_file import weight_dtype
from .tree import Shardings

if TYPE_CHECKING:
    from ..model import North
    from ..text.chat_template import ChatTemplate
    from ..text.tokenizer import Tokenizer

NANO = "north-nano"
"""The id of the model that is part of the package."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model: what to compute (`config`), with what (`params`), and the directory `path` it came from."""

    config: Config
    params: Params = field(repr=False)
    path: Path

    def module(self) -> North:
        """The model as Flax NNX modules around these parameters (shared, not copied)."""
        from ..model import North

        return North(self.config, self.params)

    def tokenizer(self) -> Tokenizer:
        """The checkpoint's own tokenizer."""
        from ..text.tokenizer import Tokenizer

        return Tokenizer.from_dir(self.path)

    def chat_template(self) -> ChatTemplate:
        """The checkpoint's own chat template."""
        from ..text.chat_template import ChatTemplate

        return ChatTemplate.from_dir(self.path, self.tokenizer())


def load(
    path: str | Path = NANO,
    *,
    dtype: Any = None,
    shardings: Shardings = None,
    progress: Progress | None = None,
    ignore: Collection[str] = (),
) -> Checkpoint:
    """Loads a checkpoint onto devices, tensor by tensor.

    >>> model = north_jax.load("north-nano")
    >>> model = north_jax.load("/models/North-Mini-Code-1.0", dtype="bfloat16")

    Args:
      path: a Hugging Face directory, a directory written by `save`, or "north-nano", the embedded model.
      dtype: bfloat16, float16 or float32 for all parameters; None keeps the checkpoint's own types.
      shardings: where parameters go: one `jax.sharding.Sharding` for all, a function of (path, shape) such as
        `("layers", 3, "mlp", "gate_up"), (128, 1536, 2048)`, or a tree like the params tree. None, for all or for one,
        is the default device.
      progress: called with (bytes done, bytes in total, parameter); None draws a bar where standard error is a
        terminal. Reading an Orbax directory reports nothing.
      ignore: fields of `config.json` to skip although this code does not know them.

    Returns:
      A Checkpoint, whose `config.dtype` is the type that the parameters now have.

    Raises:
      ConfigError: `config.json` is missing, malformed, or asks for something unsupported; the message names the field.
      CheckpointError: files or tensors are missing, surplus, mis-shaped, damaged or quantised; the message names them.
    """
    directory = resolve(path)
    wanted = None if dtype is None else weight_dtype(dtype)
    if is_orbax(directory):
        config, params = restore(directory, shardings=shardings, dtype=wanted, ignore=ignore)
    else:
        config, params = load_huggingface(
            directory, dtype=wanted, shardings=shardings, progress=progress or default_progress(), ignore=ignore
        )
    return Checkpoint(config, params, directory)


def resolve(path: str | Path) -> Path:
    """The directory of a checkpoint given by path or id.

    Raises:
      CheckpointError: there is no such directory.
    """
    # os.path, not pathlib, which raises other errors for an unknown ~user and for a name that is too long
    directory = Path(str(files("north_jax") / "nano") if path == NANO else os.path.expanduser(path))
    if not os.path.isdir(directory):
        raise CheckpointError(f"{path}: no such directory (a checkpoint is a local directory, or {NANO!r})")
    return directory

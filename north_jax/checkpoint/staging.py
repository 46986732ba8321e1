"""Directories that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import CheckpointError

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""What stands beside the weights and says how to use them; copied as it is."""


@contextlib.contextmanager
def staged_directory(path: str | Path, *, overwrite: bool) -> Iterator[Path]:
    """A new directory beside `path` that becomes `path` when the block ends, and vanishes when it fails.

    Args:
      path: the directory to make.
      overwrite: replace the checkpoint that `path` already holds, with everything in that directory.

    Raises:
      CheckpointError: `path` exists and is not empty, and `overwrite` is not set, or what exists is no checkpoint.
    """
    path = Path(path).resolve()
    _check_target(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    try:
        new = staging / path.name
        new.mkdir()  # unlike the private directory around it, with the permissions the user's umask asks for
        yield new
        _check_target(path, overwrite)
        _replace(path, new, staging / "replaced")
    finally:
        if path.exists() or not (staging / "replaced").exists():  # else it holds the only copy of the old checkpoint
            shutil.rmtree(staging)


def _replace(path: Path, new: Path, old: Path) -> None:
    """Moves `path`, if there is one, to `old` and `new` to `path`; puts it back if that fails."""
    if not path.exists():
        os.rename(new, path)
        return
    try:
        os.rename(path, old)
        os.rename(new, path)
    except BaseException:
        if old.exists():
            os.rename(old, path)
        raise


def copy_text_files(source: str | Path | None, destination: Path) -> None:
    """Copies those of `TEXT_FILES` that the directory `source` holds.

    Raises:
      CheckpointError: `source` is not a directory.
    """
    if source is not None:
        if not Path(source).is_dir():
            raise CheckpointError(f"source {source}: no such directory")
        for name in TEXT_FILES:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, destination / name)


def _check_target(path: Path, overwrite: bool) -> None:
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(f"{path} exists; overwrite=True replaces it")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} exists and is not a checkpoint (it has no config.json): not replaced")

"""Where a result comes from: when, on which device, with which software, by which command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from . import __version__


def provenance(module: str, device: str | None = None) -> dict[str, Any]:
    """Date (UTC), device, versions, commit and command line.

    The commit is what NORTH_JAX_COMMIT says, for code that runs from a copy, which may lie in another checkout;
    without it the checkout's own, else "unknown".

    Args:
      module: that runs, as for `command_line`.
      device: one that another process has: JAX is not asked then, and takes no memory of it here.
    """
    devices = jax.device_count() if device is None else 1
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": jax.devices()[0].device_kind if device is None else device,
        "devices": devices,
        "north_jax": __version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": sys.version.split()[0],
        "commit": os.environ.get("NORTH_JAX_COMMIT") or _described(),
        "command": command_line(module),
    }


def command_line(module: str) -> str:
    """The command that runs, of `python -m module`, for a shell: of absolute paths, which say something of the machine
    alone, the names are left."""
    return shlex.join(["python", "-m", module, *(_without_place(argument) for argument in sys.argv[1:])])


def _described() -> str:
    """What git says of the checkout that this file lies in."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _without_place(argument: str) -> str:
    """An argument: itself a path, option=path, or a command line with such arguments."""
    if Path(argument).is_absolute():
        return Path(argument).name
    option, equals, value = argument.partition("=")
    if equals and not any(map(str.isspace, option)):
        return f"{option}={_without_place(value)}"
    try:
        parts, quoted = shlex.split(argument), True
    except ValueError:  # a text with an apostrophe, say
        parts, quoted = argument.split(), False
    if parts == [argument]:
        return argument
    kept = [_without_place(part) for part in parts]
    if kept == parts:
        return argument
    return shlex.join(kept) if quoted else " ".join(kept)

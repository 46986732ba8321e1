"""What every measurement is kept with: when, on which device, with which software, by which command."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from north_jax import __version__


def provenance() -> dict[str, Any]:
    """Date (UTC), device, versions, commit and command line.

    The commit is the checkout's own, or what NORTH_JAX_COMMIT says where the code runs from a copy, else "unknown".
    """
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = os.environ.get("NORTH_JAX_COMMIT", "unknown")
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": device.device_kind,
        "devices": jax.device_count(),
        "north_jax": __version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": sys.version.split()[0],
        "commit": commit,
        "command": " ".join(["python", "-m", "north_jax.bench." + Path(sys.argv[0]).stem, *sys.argv[1:]]),
    }


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes {"provenance", "rows"} as JSON; makes the folder where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1) + "\n")

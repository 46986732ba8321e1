"""What every measurement is kept with: when, on which device, with which software, by which command."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from north_jax import __version__


def provenance() -> dict[str, Any]:
    """Date (UTC), device, versions, commit and command line.

    The commit is what NORTH_JAX_COMMIT says, for code that runs from a copy, which may lie in another checkout;
    without it the checkout's own, else "unknown".
    """
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": device.device_kind,
        "devices": jax.device_count(),
        "north_jax": __version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": sys.version.split()[0],
        "commit": os.environ.get("NORTH_JAX_COMMIT") or _described(),
        "command": command_line("north_jax.bench"),
    }


def command_line(module: str) -> str:
    """The command that runs, of `python -m module`: of --out without a place that is the machine's own."""
    return " ".join(["python", "-m", module, *_without_place(sys.argv[1:])])


def _described() -> str:
    """What git says of the checkout that this file lies in."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _without_place(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments; an absolute path of --out, which says something of the machine alone, shortened to its name."""
    before = ""
    for argument in arguments:
        option, _, value = argument.partition("=")
        if before == "--out" and Path(argument).is_absolute():
            yield Path(argument).name
        elif option == "--out" and Path(value).is_absolute():
            yield f"--out={Path(value).name}"
        else:
            yield argument
        before = argument


class ResultsError(ValueError):
    """A file of results cannot be gone on with."""


class Results:
    """Rows of a measurement, each kept in its file as soon as it is there; a second run goes on where one ended."""

    def __init__(self, path: Path | None, keys: Sequence[str]) -> None:
        """Reads the rows that `path` holds already.

        Args:
          path: the JSON file, {"provenance", "rows"}; None to keep nothing.
          keys: fields that tell rows apart.

        Raises:
          ResultsError: the file is of another commit, device or version of JAX.
        """
        self.rows: list[dict[str, Any]] = []
        self._path, self._keys = path, tuple(keys)
        self._provenance = provenance()
        if path is None or not path.exists():
            return
        held = json.loads(path.read_text())
        for name in ("commit", "device", "jax"):
            if held["provenance"][name] != self._provenance[name]:
                raise ResultsError(
                    f"{path} is of {name} {held['provenance'][name]}, this is {self._provenance[name]}: "
                    "move it away or name another file"
                )
        self.rows = held["rows"]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The rows of one measurement: a file may hold several."""
        return [row for row in self.rows if row["kind"] == kind]

    def find(self, **key: Any) -> dict[str, Any] | None:
        """The row with these fields."""
        assert key.keys() == set(self._keys)
        return next((row for row in self.rows if all(row.get(k) == value for k, value in key.items())), None)

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Keeps a row, and gives it back."""
        self.rows.append(row)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            whole = self._path.with_suffix(".part")
            whole.write_text(json.dumps({"provenance": self._provenance, "rows": self.rows}, indent=1) + "\n")
            whole.replace(self._path)
        return row

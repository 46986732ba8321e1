"""The rows of a measurement, kept with their provenance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from north_jax.provenance import provenance


class ResultsError(ValueError):
    """A file of results cannot be gone on with."""


class Results:
    """Rows of a measurement, each kept in its file as soon as it is there; a second run goes on where one ended."""

    def __init__(self, path: Path | None, keys: Sequence[str], *, device: str | None = None) -> None:
        """Reads the rows that `path` holds already.

        Args:
          path: the JSON file, {"provenance", "rows"}; None to keep nothing.
          keys: fields that tell rows apart.
          device: that was measured, where it is not this process's own.

        Raises:
          ResultsError: the file is of another commit, device or version of JAX.
        """
        self.rows: list[dict[str, Any]] = []
        self._path, self._keys = path, tuple(keys)
        self._provenance = provenance("north_jax.bench", device)
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

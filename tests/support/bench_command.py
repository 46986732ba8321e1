"""Commands of `python -m north_jax.bench` that end with a status, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import north_jax.bench.__main__ as bench

from . import RAW_CONFIG


def bench_command(
    name: str, sizes: Mapping[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, list[dict[str, Any]]]]:
    """Runs the command on RAW_CONFIG with `sizes`; gives its exit status and the rows that it has written so far."""
    (folder / "config.json").write_text(json.dumps(RAW_CONFIG | sizes))
    files = ["--config", folder / "config.json", "--out", folder / "r.json"]

    def run(*arguments: object) -> tuple[Any, list[dict[str, Any]]]:
        monkeypatch.setattr("sys.argv", ["bench", name, *map(str, [*files, *arguments])])
        with pytest.raises(SystemExit) as ended:
            bench.main()
        return ended.value.code, json.loads((folder / "r.json").read_text())["rows"]

    return run

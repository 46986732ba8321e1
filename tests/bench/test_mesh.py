"""Meshes beside one device: the command runs, keeps its rows, and notices what is wrong."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import RAW_CONFIG

from north_jax.bench import mesh

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_rows_of_two_meshes(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 2, "intermediate_size": 32, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(RAW_CONFIG | changes))
    sizes = ["--tokens", "70", "--batch", "2", "--steps", "2", "--mesh", "tensor=2", "tensor=2,expert=2"]
    files = ["--config", str(tmp_path / "config.json"), "--out", str(tmp_path / "r.json")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-m", "north_jax.bench", "mesh", *sizes, *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["mesh"] for row in rows] == [m for m in ("one device", "tensor 2", "tensor 2, expert 2") for _ in "fd"]
    for row in rows:
        assert 0 < row["error"] < 0.02 and row["ms"] > 0
        assert (row["from_one_device"] > 0) == (row["mesh"] != "one device") == bool(row["exchanges"])


def test_an_error_beyond_one_devices_is_wrong() -> None:
    row = {"kind": "mesh-decode", "mesh": "tensor 2", "one_device_error": 0.01}
    assert not mesh.disagreements([row | {"error": 0.0124}])
    for error in (0.0126, math.nan):
        (text,) = mesh.disagreements([row | {"error": error}])
        assert "mesh-decode on tensor 2" in text


def test_meshes_are_read() -> None:
    assert mesh.parse_mesh("tensor=2,expert=4") == {"tensor": 2, "expert": 4}
    for text in ("tensor", "tensor=two", "data=2", "tensor=2,tensor=2"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no mesh"):
            mesh.parse_mesh(text)

"""The decode measurement runs on either backend, and what it writes says where it comes from."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support import RAW_CONFIG

import ffi


@pytest.mark.parametrize("backend", [pytest.param("jax", marks=pytest.mark.slow), "megakernel"])
def test_writes_rows_and_provenance(tmp_path, backend):
    if backend == "megakernel" and not ffi.available("cpu"):
        pytest.skip("nothing compiled")
    (tmp_path / "config.json").write_text(json.dumps(RAW_CONFIG | {"num_hidden_layers": 2}))
    arguments = f"--backend {backend} --batch 1 3 --context 100 --steps 4 --quanta 2".split()
    files = ["--config", tmp_path, "--out", tmp_path / "r.json"]
    subprocess.run([sys.executable, "-m", "north_jax.bench.decode", *arguments, *map(str, files)], check=True)
    result = json.loads((tmp_path / "r.json").read_text())
    assert [(row["backend"], row["batch"]) for row in result["rows"]] == [(backend, 1), (backend, 3)]
    assert all(row["ms"] > 0 and row["tok_s"] > 0 for row in result["rows"])
    assert "python -m north_jax.bench.decode --backend" in result["provenance"]["command"]

"""The measurement runs, and what it writes says where it comes from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from support import RAW_CONFIG

import north_jax
from north_jax.bench.pure_jax import measure
from north_jax.config import Config


@pytest.mark.slow
def test_writes_rows_and_provenance(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW_CONFIG | {"num_hidden_layers": 2}))
    arguments = ["--config", tmp_path, "--context", "64", "--chunk", "32", "--steps", "3", "--out", tmp_path / "r.json"]
    subprocess.run([sys.executable, "-m", "north_jax.bench.pure_jax", *map(str, arguments)], check=True)
    result = json.loads((tmp_path / "r.json").read_text())
    assert [row["kind"] for row in result["rows"]] == ["prefill", "decode"]
    assert all(row["ms"] > 0 and row["tok_s"] > 0 for row in result["rows"])
    assert result["provenance"]["command"].startswith("python -m north_jax.bench.pure_jax --config")
    assert result["provenance"]["north_jax"] == north_jax.__version__


def test_uneven_chunks_are_refused():
    with pytest.raises(ValueError, match="multiple of chunk"):
        measure(Config.from_dict(RAW_CONFIG), batch=1, context=100, chunk=30, steps=1)


def test_the_geometry_is_north_mini_code():
    """The published count of parameters."""
    config = Config.from_json(Path(north_jax.__file__).parent / "bench" / "north_mini_code.json")
    assert sum(leaf.size for leaf in jax.tree.leaves(north_jax.param_shapes(config))) == 30_484_303_872

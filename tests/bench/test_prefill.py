"""The prefill measurement runs, and what it writes says where it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
from support import RAW_CONFIG

import north_jax
from north_jax.bench import __main__ as bench
from north_jax.bench.prefill import measure
from north_jax.config import Config


def test_writes_rows_and_provenance(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(RAW_CONFIG | {"num_hidden_layers": 2}))
    arguments = ["prefill", "--config", tmp_path / "config.json", "--context", 64, "--chunk", 32]
    monkeypatch.setattr("sys.argv", ["bench", *map(str, [*arguments, "--out", tmp_path / "r.json"])])
    bench.main()
    result = json.loads((tmp_path / "r.json").read_text())
    assert [row["kind"] for row in result["rows"]] == ["prefill"]
    assert result["rows"][0]["tok_s"] > 0
    assert result["provenance"]["command"].startswith("python -m north_jax.bench prefill --config")
    assert result["provenance"]["north_jax"] == north_jax.__version__


def test_uneven_chunks_are_refused():
    with pytest.raises(ValueError, match="multiple of chunk"):
        measure(Config.from_dict(RAW_CONFIG), batch=1, context=100, chunk=30)


def test_the_geometry_is_north_mini_code():
    """The published count of parameters."""
    config = Config.from_json(Path(north_jax.__file__).parent / "bench" / "north_mini_code.json")
    assert sum(leaf.size for leaf in jax.tree.leaves(north_jax.param_shapes(config))) == 30_484_303_872

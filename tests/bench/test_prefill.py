"""The prefill measurements run, and what they write says where it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from support import RAW_CONFIG, tiny_config

import north_jax
from north_jax.bench import __main__ as bench
from north_jax.bench import grouped_matmul
from north_jax.bench.prefill_parts import MILLISECONDS, chunk_flops
from north_jax.config import Config
from north_jax.geometries import NORTH
from north_jax.kernels.tiling import Tiling


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(RAW_CONFIG | {"num_hidden_layers": 2}))
    return path


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["bench", *map(str, arguments)])
    bench.main()


def test_writes_rows_with_parts_and_provenance(tmp_path, monkeypatch, config_file, capsys):
    out = tmp_path / "r.json"
    sizes = ["--tokens", 100, 20, "--chunk", 64, "--runs", 1]
    run(monkeypatch, "prefill", "--config", config_file, *sizes, "--parts", "--out", out)
    result = json.loads(out.read_text())
    assert [(row["tokens"], row["chunk"]) for row in result["rows"]] == [(100, 64), (20, 64)]
    for row in result["rows"]:
        assert row["tok_s"] > 0 and row["attention_ms"] > 0 and row["experts_ms"] > 0 and row["projections_ms"] > 0
        assert sum(row[name] for name in MILLISECONDS) == pytest.approx(row["ms"], abs=0.01)
    assert result["provenance"]["command"].startswith("python -m north_jax.bench prefill --config")
    assert result["provenance"]["north_jax"] == north_jax.__version__
    table = _table(capsys.readouterr().out)
    run(monkeypatch, "prefill", "--config", config_file, *sizes, "--parts", "--out", out)
    assert json.loads(out.read_text()) == result, "a second run measures nothing again"
    assert _table(capsys.readouterr().out) == table


def _table(printed: str) -> list[str]:
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(lines) == 4, printed
    return lines


@pytest.mark.parametrize(("option", "value"), [("--chunk", 100), ("--busy-chunk", 256)])
def test_chunks_that_do_not_fit_are_refused(monkeypatch, config_file, option, value):
    with pytest.raises(SystemExit, match=option):
        run(monkeypatch, "prefill", "--config", config_file, "--chunk", 128, option, value)


def test_flops_are_those_of_the_useful_products():
    config = tiny_config()  # five layers, the first dense; window 70; three of them slide
    flops = chunk_flops(config, 100, 3)
    full, sliding = 101 + 102 + 103, 3 * 70
    assert flops["attention"] == 4 * 8 * 8 * (2 * full + 3 * sliding)
    assert flops["experts"] == 2 * 3 * 4 * 2 * 3 * 16 * 32
    assert flops["projections"] == 2 * 3 * (5 * (8 + 2 * 2 + 8) * 8 * 32 + 3 * 48 * 32)


def test_the_grouped_matmul_is_checked_and_timed(monkeypatch):
    config = tiny_config()
    weights = jax.random.normal(jax.random.key(0), (3, 128, 64), jnp.bfloat16)
    case = grouped_matmul.Case("plain", 60, "random", Tiling(row_warpgroups=1, columns=128, stages=2, align=8))
    row = grouped_matmul.measure(config, case, weights, interpret=plgpu.InterpretGPUParams())
    assert row["tflop_s"] >= 0 and row["error"] < 0.01
    wrong = lambda *_, **__: jnp.zeros((512, 128), jnp.bfloat16)  # noqa: E731
    monkeypatch.setattr(grouped_matmul, "_product", wrong)
    with pytest.raises(FloatingPointError, match="off by 1"):
        grouped_matmul.measure(config, case, weights, interpret=plgpu.InterpretGPUParams())


@pytest.mark.slow
def test_a_second_start_finds_what_the_first_one_compiled(tmp_path, monkeypatch, config_file):
    out = tmp_path / "r.json"
    run(monkeypatch, "cold_start", "--config", config_file, "--tokens", 20, "--out", out)
    empty, filled = json.loads(out.read_text())["rows"]
    assert (empty["cache"], filled["cache"]) == ("empty", "filled")
    assert filled["compile_s"] < empty["compile_s"]


def test_the_geometry_is_north_mini_code():
    """The published count of parameters."""
    config = Config.from_json(Path(NORTH))
    assert sum(leaf.size for leaf in jax.tree.leaves(north_jax.param_shapes(config))) == 30_484_303_872
    assert np.isclose(chunk_flops(config, 0, 1)["experts"], 2 * 3.624e9 / 2, rtol=1e-3)

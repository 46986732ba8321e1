"""The decode measurement: its cells, what it refuses to count, and how it goes on after an interruption."""

from __future__ import annotations

import json

import pytest
from support import RAW_CONFIG

import ffi
from north_jax.bench import __main__ as bench
from north_jax.bench import decode
from north_jax.bench.record import Results, ResultsError
from north_jax.bench.speed_of_light import kv_bytes, weight_bytes
from north_jax.config import Config
from north_jax.geometries import NORTH


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command on a tiny model; gives what it wrote."""
    (tmp_path / "config.json").write_text(json.dumps(RAW_CONFIG | {"num_hidden_layers": 2}))
    files = ["--config", tmp_path / "config.json", "--out", tmp_path / "r.json"]

    def run(*arguments: object):
        monkeypatch.setattr("sys.argv", ["bench", "decode", *map(str, [*files, *arguments])])
        bench.main()
        return json.loads((tmp_path / "r.json").read_text())

    return run


SHORT = ("--context", 100, "--steps", 4, "--tokens", 8, "--routing", "uniform")


@pytest.mark.parametrize("backend", [pytest.param("jax", marks=pytest.mark.slow), "megakernel"])
def test_writes_rows_and_provenance(command, backend):
    if backend == "megakernel" and not ffi.available("cpu"):
        pytest.skip("nothing compiled")
    result = command("--backend", backend, "--batch", 1, 3, *SHORT)
    memory, *rows = result["rows"]
    assert memory["kind"] == "bandwidth" and memory["copy_tb_s"] > 0 and memory["read_tb_s"] > 0
    assert [(row["backend"], row["batch"]) for row in rows] == [(backend, 1), (backend, 3)]
    assert all(row["ms_step"] > 0 and row["tok_s"] > 0 and row["tokens_per_row"] == 8 for row in rows)
    assert rows[0]["distinct_experts"] == rows[0]["expected_experts"] == 2 and rows[0]["counts"]
    assert "python -m north_jax.bench decode --config" in result["provenance"]["command"]


@pytest.mark.skipif(not ffi.available("cpu"), reason="nothing compiled")
def test_a_second_run_measures_only_what_is_missing(command, monkeypatch, capsys):
    first = command("--batch", 1, *SHORT)
    measured = []
    original = decode.Bench.measure
    monkeypatch.setattr(
        decode.Bench,
        "measure",
        lambda self, cell, **sizes: measured.append(cell.batch) or original(self, cell, **sizes),
    )
    second = command("--batch", 1, 2, *SHORT)
    assert measured == [2]
    assert second["rows"][: len(first["rows"])] == first["rows"]
    assert capsys.readouterr().out.count("| uniform | 100 | 1 |") == 2  # the table has the old row too


def test_rows_of_another_commit_are_not_mixed_in(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    Results(path, ["kind"]).add({"kind": "x"})
    written = json.loads(path.read_text())
    written["provenance"]["commit"] = "0123456789ab"
    path.write_text(json.dumps(written))
    with pytest.raises(ResultsError, match="0123456789ab"):
        Results(path, ["kind"])


def test_a_row_with_other_experts_than_promised_is_marked():
    row = dict.fromkeys(("routing", "context", "batch", "tok_s", "ms_step", "sol_percent", "vllm_tok_s", "ratio"), 1)
    row |= {"distinct_experts": 12.0, "expected_experts": 15.5}
    assert "does not count: 15.5" in decode.table([row | {"counts": False}])
    assert "does not count" not in decode.table([row | {"counts": True}])


@pytest.mark.parametrize(
    "batch, experts, gigabytes", [(1, 8, 6.61), (2, 15.5, 10.01), (4, 29.1, 16.17), (8, 51.6, 26.36), (16, 82.4, 40.3)]
)
def test_the_speed_of_light_is_that_of_the_published_sizes(batch, experts, gigabytes):
    config = Config.from_json(NORTH)
    assert weight_bytes(config, experts) / 1e9 == pytest.approx(gigabytes, abs=0.02)
    assert kv_bytes(config, [8192] * batch) / 2**20 == 496 * batch
    assert kv_bytes(config, [1024]) / 2**20 == 98

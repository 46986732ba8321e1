"""`python -m north_jax.bench moe` on a small geometry: its rows, going on where it ended, and what errors mean."""

from __future__ import annotations

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from support import RAW_CONFIG

from north_jax.bench import __main__ as bench
from north_jax.bench import moe
from north_jax.bench.moe_errors import errors
from north_jax.bench.moe_layers import bytes_of_expert, distinct_experts, random_inputs, random_layers
from north_jax.bench.peers import vllm_experts
from north_jax.config import Config
from north_jax.geometries import NORTH

RAW = RAW_CONFIG | {"hidden_size": 64, "intermediate_size": 32}
CONFIG = Config.from_dict(RAW)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command with these options; gives the rows of its file."""
    (tmp_path / "config.json").write_text(json.dumps(RAW))

    def run(*options):
        fixed = ["--config", str(tmp_path / "config.json"), "--out", str(tmp_path / "out.json")]
        small = ["--layers", "2", "--calls", "3", "--repeats", "1"]
        monkeypatch.setattr(sys, "argv", ["bench", "moe", *fixed, *small, *options])
        bench.main()
        return json.loads((tmp_path / "out.json").read_text())["rows"]

    return run


@pytest.mark.slow
def test_rows_and_a_second_run(command, monkeypatch, capsys):
    options = ["--tokens", "1", "3", "--format", "bfloat16", "mxfp8", "--path", "shared", "expert-centric"]
    rows = command(*options)
    times = [row for row in rows if row["kind"] == "moe-time"]
    assert [(row["path"], row["format"], row["tokens"]) for row in times] == [
        ("shared", "bfloat16", 1),
        ("shared", "bfloat16", 3),
        ("expert-centric", "bfloat16", 1),
        ("expert-centric", "bfloat16", 3),
        ("shared", "mxfp8", 1),
        ("shared", "mxfp8", 3),
    ]
    assert all(row["us"] > 0 and row["vllm_us"] is None for row in times)
    assert times[0]["distinct_experts"] == CONFIG.num_experts_per_tok
    accurate = {(row["path"], row["format"]): row for row in rows if row["kind"] == "moe-error"}
    assert accurate["shared", "bfloat16"]["relative_error"] < 4e-3
    assert accurate["shared", "mxfp8"]["relative_error"] < 4e-3  # of the weights as they are stored
    assert "| shared | bfloat16 |" in capsys.readouterr().out

    monkeypatch.setattr(moe, "measure", lambda *_, **__: pytest.fail("measured again"))
    assert command(*options) == rows


def test_too_many_tokens_are_refused(command):
    with pytest.raises(SystemExit, match="from 1 to 64"):
        command("--tokens", "65")


def test_what_is_counted():
    inputs = random_inputs(CONFIG, 8, 5)
    assert inputs.experts.shape == (5, 8, CONFIG.num_experts_per_tok)
    chosen = np.sort(np.asarray(inputs.experts), axis=-1)
    assert (np.diff(chosen, axis=-1) > 0).all()  # a token's experts are different ones
    assert CONFIG.num_experts_per_tok < distinct_experts(inputs) < CONFIG.num_experts
    values = 3 * 64 * 32
    sizes = {
        format: bytes_of_expert(random_layers(CONFIG, format, 1)[0]) for format in ("bfloat16", "fp8_channel", "mxfp8")
    }
    assert sizes == {"bfloat16": 2 * values, "fp8_channel": values + 4 * (64 + 64), "mxfp8": values + 4 * (64 + 64)}


def test_errors_are_those_of_the_worst_token():
    expected = np.array([[3.0, 4.0], [1.0, 0.0]])
    found = errors(jnp.asarray([[3.0, 4.0], [1.0, 1.0]]), expected)
    assert found["least_cosine"] == pytest.approx(0.5**0.5)
    assert found["largest_difference"] == 1.0 and found["largest_value"] == 4.0
    assert found["relative_error"] == pytest.approx(26**-0.5)


def test_the_peer_is_of_norths_shape():
    config = Config.from_json(NORTH)
    assert (config.num_experts, config.num_experts_per_tok, config.hidden_size, config.intermediate_size) == (
        128,
        8,
        2048,
        768,
    )
    assert vllm_experts(8) == 136.5 and vllm_experts(3) is None

"""python -m north_jax.compare: every backend beside float32, and mistakes that show in the right place."""

from __future__ import annotations

import dataclasses
import json
import xml.dom.minidom

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import RAW_CONFIG, tiny_config, tiny_params

import ffi
from north_jax.compare import TENSORS, Subject, compare, difference, exact_pass, jax_pass, subjects
from north_jax.compare import __main__ as command
from north_jax.compare.compiled_pass import compiled_pass
from north_jax.decoding import BackendError
from north_jax.random_weights.weights import random_params

compiled = pytest.mark.skipif(
    not (ffi.available("cpu") and jax.default_backend() == "cpu"), reason="needs the CPU executor"
)
CONFIG = tiny_config(num_hidden_layers=5, intermediate_size=32, dtype="bfloat16")
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(4, CONFIG.vocab_size, 90).astype(np.int32)  # beyond the window, and 64 tokens of warp decode
LAST = len(TOKENS)  # all: no prefill needs compiling for what is decoded


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


@pytest.fixture(scope="module")
def exact(params):
    return exact_pass(CONFIG, params, TOKENS, LAST)


@compiled
def test_the_compiled_decode_shows_every_tensor():
    """In float32 nothing but the order of sums is left, in every layer at once: two implementations agree."""
    params = tiny_params(CONFIG)
    exact, found = jax_pass(CONFIG, params, TOKENS, LAST, jnp.float32), compiled_pass(CONFIG, params, TOKENS, LAST)
    layers, logits = difference(exact, found)
    assert logits.error < 1e-5
    for ours, theirs in zip(layers, exact.layers, strict=True):
        assert ours.keys() == theirs.keys()
        assert max(one.error for one in ours.values()) < 1e-5
    for one, other in zip(exact.experts, found.experts, strict=True):
        np.testing.assert_equal(one, other)


@compiled
@pytest.mark.parametrize(
    ("change", "layer", "tensor"),
    [
        ({"sliding_window": 69}, 1, "attention"),
        pytest.param({"norm_topk_prob": True}, 1, "mlp", marks=pytest.mark.slow),
        ({"rope_theta": 4e4}, 0, "q"),
    ],
)
def test_a_mistake_shows_where_it_is_made(params, exact, change, layer, tensor):
    mistaken = dataclasses.replace(CONFIG, **change)
    found = compiled_pass(mistaken, params, TOKENS, LAST)
    layers, _ = difference(exact, found)
    order = [(number, name) for number, of in enumerate(layers) for name in TENSORS if name in of]
    first = next(place for place in order if layers[place[0]][place[1]].error > 0.02)
    assert first == (layer, tensor)


def test_warp_decode_takes_long_texts(params, exact):
    found = jax_pass(CONFIG, params, TOKENS, LAST, jnp.bfloat16, "warp")
    _, logits = difference(exact, found)
    assert logits.error < 0.05


@compiled
def test_backends_that_do_not_work_here_are_named(params):
    narrow = tiny_config(intermediate_size=16, dtype="bfloat16")
    taken, left_out = subjects(narrow, random_params(narrow), None)
    assert taken[0].name == "jax" and "warp" not in [subject.name for subject in taken]
    assert "intermediate_size to be a multiple of 32" in left_out["warp"]
    assert left_out["cuda"] == "the weights are not on a GPU"
    with pytest.raises(BackendError, match=r"^warp: .*multiple of 32"):
        subjects(narrow, random_params(narrow), ["warp"])
    with pytest.raises(BackendError, match="expected jax, warp, cpu, cuda"):
        subjects(CONFIG, params, ["tpu"])


def test_impossible_steps_are_refused(params):
    subject = Subject("jax", CONFIG, params)
    with pytest.raises(ValueError, match="0 steps"):
        compare(CONFIG, params, [subject], [1, 2], 0)
    with pytest.raises(ValueError, match="exceed the context of 1024"):
        compare(CONFIG, params, [subject], [1, 2], 1023)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command; gives its exit status."""

    def command_line(*arguments: object) -> int:
        monkeypatch.setattr("sys.argv", ["compare", *map(str, arguments), "--out", str(tmp_path / "r")])
        try:
            command.main()
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    return command_line


@pytest.mark.slow
@compiled
def test_the_command(run, tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(RAW_CONFIG | {"dtype": "bfloat16", "intermediate_size": 32, "num_hidden_layers": 2}))
    assert run("--random-weights", file, "--tokens", 20, "--steps", 4, "--backends", "cpu") == 0
    out = capsys.readouterr().out
    assert "| JAX, the weights' type |" in out and "| CPU executor |" in out
    found = json.loads((tmp_path / "r.json").read_text())
    assert [row["name"] for row in found["backends"]] == ["jax", "cpu"]
    for row in found["backends"]:
        assert len(row["layers"]) == 2 and len(row["text"]) == 4
        assert all(set(layer) <= set(TENSORS) for layer in row["layers"])
        assert set(row["logits"]) == {"error", "median", "cosine", "maximum"}
        assert 0 < row["logits"]["error"] < 0.05 and row["logits"]["cosine"] > 0.99
        assert row["routing"][0] is None and row["routing"][1]["choices"] == 4
    assert str(tmp_path) not in json.dumps(found["provenance"])
    picture = xml.dom.minidom.parse(str(tmp_path / "r.svg"))
    cells = picture.getElementsByTagName("title")
    assert len(cells) == 2 * 2 * (2 * len(TENSORS) - 1 + 1)  # two panels of two backends; a dense layer, the logits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "at least 1"),
        (["--model", "nowhere"], "no such directory"),
        (["--random-weights", "nowhere.json"], "no such file"),
        (["--steps", "8190"], "exceed the context of 8192"),
        (["--prompt", "nowhere.txt"], "nowhere.txt"),
        (["--backends", "tpu"], "expected jax"),
    ],
)
def test_bad_arguments_are_answered_in_a_line(run, capsys, arguments, message):
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@compiled
def test_north_nano_out_of_the_box(run, tmp_path):
    assert run() == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert all(row["logits"]["cosine"] > 0.999 for row in found["backends"])

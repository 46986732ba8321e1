"""python -m north_jax.quality, on a tiny model that reads and writes North Nano's tokens."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import ffi
import north_jax.nano
from north_jax.checkpoint import write_random_checkpoint
from north_jax.quality import __main__ as command
from north_jax.quality.held_out import excerpts, held_out_texts
from north_jax.quality.measure import Spread
from north_jax.text import Tokenizer
from tests.support import tiny_config

NANO = Path(north_jax.nano.__file__).parent
_SIZES = {"seeds": 2, "excerpts": 2, "length": 12, "functions": 2, "prompt": 24, "written": 8, "rows": 2}
SMALL = [part for name, size in _SIZES.items() for part in (f"--{name}", str(size))]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(NANO)


@pytest.fixture
def run(monkeypatch):
    """Runs the command; gives its exit status."""

    def command_line(*arguments: object) -> int:
        monkeypatch.setattr("sys.argv", ["quality", *map(str, arguments)])
        try:
            command.main()
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    return command_line


def test_excerpts_begin_with_lines(tokenizer):
    texts = held_out_texts()
    assert len(texts) == 49
    tokens, size = excerpts(tokenizer, texts, count=5, length=40, seed=3)
    assert tokens.shape == (5, 41) and set(tokens[:, 0].tolist()) == {tokenizer.bos_id}
    pieces = [tokenizer.decode(row[1:].tolist()) for row in tokens]
    assert size == sum(len(piece.encode()) for piece in pieces)
    joined = "\n" + "\n".join(text for _, text in texts)
    assert all("\n" + piece in joined for piece in pieces)
    again, _ = excerpts(tokenizer, texts, count=5, length=40, seed=3)
    np.testing.assert_equal(again, tokens)
    with pytest.raises(ValueError, match="has 1 pieces of 3 tokens, 2 are needed"):
        excerpts(tokenizer, [("a.py", "return 1\n")], count=2, length=3, seed=0)


def test_spread():
    spread = Spread.of([1.0, 2.0, 3.0])
    assert (spread.mean, spread.deviation, str(spread)) == (2.0, 1.0, "2.0000 ± 1.0000")
    assert Spread.of([2.0]).deviation == 0


@pytest.mark.slow
@pytest.mark.skipif(not (ffi.available("cpu") and jax.default_backend() == "cpu"), reason="needs the CPU executor")
def test_both_backends_score_alike(run, tmp_path, capsys):
    config = tiny_config(vocab_size=3968, num_hidden_layers=2, eos_token_id=5)
    write_random_checkpoint(tmp_path / "model", config, dtype="float32")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, tmp_path / "model")
    out = tmp_path / "quality.json"
    assert run("--model", tmp_path / "model", *SMALL, "--out", out) == 0
    found = json.loads(out.read_text())
    theirs, ours = found["backends"]["jax"], found["backends"]["megakernel"]
    assert len(theirs["bits_per_byte"]["values"]) == 2
    # A random model: as many bits a token as the vocabulary has, or more.
    assert theirs["bits_per_byte"]["mean"] > 1
    np.testing.assert_allclose(ours["bits_per_byte"]["values"], theirs["bits_per_byte"]["values"], rtol=1e-5)
    assert found["same_completions"] == {"megakernel": 1.0}
    assert str(tmp_path) not in json.dumps(found["provenance"])
    assert "| | jax | megakernel | megakernel − jax |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "at least 1"),
        (["--held-out", "nowhere"], "nowhere"),
        (["--held-out", str(NANO / "config.json")], "not JSON lines with path and text"),
        (["--random-weights", str(NANO / "config.json")], "needs a tokenizer"),
        (["--written", "9000"], "the model takes at most 8192"),
        (["--temperature", "-1"], "temperature must be"),
    ],
)
def test_bad_arguments_are_answered_in_a_line(run, capsys, arguments, message):
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_north_nano(run, tmp_path):
    """Both backends are equally good, and far better than chance."""
    out = tmp_path / "quality.json"
    assert run("--out", out) == 0
    found = json.loads(out.read_text())["backends"]
    for of in found.values():
        assert 0.5 < of["bits_per_byte"]["mean"] < 1.2 and of["valid"]["mean"] > 0.6
    difference = found["megakernel"]["bits_per_byte"]["mean"] - found["jax"]["bits_per_byte"]["mean"]
    assert math.fabs(difference) < 0.005

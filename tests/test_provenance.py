"""What results say of where they come from."""

from __future__ import annotations

import pytest

from north_jax.provenance import command_line, provenance


def test_the_commit_that_a_copy_names_comes_first(monkeypatch):
    monkeypatch.setenv("NORTH_JAX_COMMIT", "0123456789ab")
    assert provenance("north_jax.bench")["commit"] == "0123456789ab"
    monkeypatch.delenv("NORTH_JAX_COMMIT")
    assert provenance("north_jax.bench")["commit"] != "0123456789ab"


def test_the_device_may_be_another_process_s(monkeypatch):
    monkeypatch.setattr("jax.devices", None)
    monkeypatch.setattr("jax.device_count", None)
    found = provenance("north_jax.bench", "H200")
    assert (found["device"], found["devices"]) == ("H200", 1)


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["--out", "/home/me/results/r.json", "--batch", "1"], "--out r.json --batch 1"),
        (["--out=/home/me/r.json"], "--out=r.json"),
        (["--out", "results/r.json"], "--out results/r.json"),
        (["--batch", "1", "--out"], "--batch 1 --out"),
        (
            [
                *("--server", "--model /data/secret/North --random-weights"),
                *("--kernel", "/scratch/me/d.json", "--config", "/scratch/c.json"),
            ],
            "--server '--model North --random-weights' --kernel d.json --config c.json",
        ),
        (["--server=--model=/data/secret/North --port 1"], "'--server=--model=North --port 1'"),
        (["--server", "--model '/data/my secret/North' --port 1"], "--server '--model North --port 1'"),
        (["--a", "b --c '--model /data/secret/North'"], """--a 'b --c '"'"'--model North'"'"''"""),
        (["--model", "/data/my secret/North"], "--model North"),
        (["--model=/data/my secret/North"], "--model=North"),
        (["--say", "it's of /data/secret/North"], """--say 'it'"'"'s of North'"""),
        (["--text", "two  words, a/b = c", ""], "--text 'two  words, a/b = c' ''"),
    ],
)
def test_the_command_names_no_place_of_the_machine(monkeypatch, arguments, kept):
    monkeypatch.setattr("sys.argv", ["bench", "serve", *arguments])
    found = command_line("north_jax.bench")
    assert found == f"python -m north_jax.bench serve {kept}"
    assert provenance("north_jax.bench")["command"] == found

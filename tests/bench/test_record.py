"""What results say of where they come from."""

from __future__ import annotations

import pytest

from north_jax.bench.record import provenance


def test_the_commit_that_a_copy_names_comes_first(monkeypatch):
    monkeypatch.setenv("NORTH_JAX_COMMIT", "0123456789ab")
    assert provenance()["commit"] == "0123456789ab"
    monkeypatch.delenv("NORTH_JAX_COMMIT")
    assert provenance()["commit"] != "0123456789ab"


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["--out", "/home/me/results/r.json", "--batch", "1"], "--out r.json --batch 1"),
        (["--out=/home/me/r.json"], "--out=r.json"),
        (["--out", "results/r.json"], "--out results/r.json"),
        (["--batch", "1", "--out"], "--batch 1 --out"),
    ],
)
def test_the_command_names_no_place_of_the_machine(monkeypatch, arguments, kept):
    monkeypatch.setattr("sys.argv", ["bench", "decode", *arguments])
    assert provenance()["command"] == f"python -m north_jax.bench decode {kept}"

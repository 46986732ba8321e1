"""The soak runs, goes on where it ended, and notices answers that differ."""

from __future__ import annotations

import itertools

import pytest
from support.bench_command import bench_command

import ffi
from north_jax.bench import soak
from north_jax.bench.soak import Soak
from north_jax.megakernel.decoder import MegakernelDecoder

pytestmark = pytest.mark.skipif(not ffi.available("cpu"), reason="nothing compiled")


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command on a tiny model; gives its exit status and what it wrote."""
    sizes = {"layers": 2, "window": 70, "replays": 8, "most-tokens": 150}
    fixed = [item for name, value in sizes.items() for item in (f"--{name}", value)]
    run = bench_command("soak", {"hidden_size": 64}, tmp_path, monkeypatch)
    return lambda *arguments: run(*fixed, *arguments)


@pytest.mark.slow
def test_answers_are_the_same_again_and_parts_are_kept(command, monkeypatch):
    status, rows = command("--steps", 400, "--parts", 2)
    assert status == 0 and [row["part"] for row in rows] == [0, 1]
    for row in rows:
        assert row["steps"] >= 200 and row["replayed"] == row["same_among_strangers"] == 4
        assert row["requests"] == sum(row["finished"].values())
    assert {finish for row in rows for finish in row["finished"]} >= {"LENGTH", "STOP"}
    monkeypatch.setattr(Soak, "part", None)
    assert command("--steps", 400, "--parts", 2) == (0, rows)


@pytest.mark.slow
def test_thousands_of_steps(command):
    status, rows = command("--steps", 5000, "--parts", 5, "--most-tokens", 400)
    assert status == 0 and sum(row["steps"] for row in rows) >= 5000


def test_counters_begin_at_the_origin(command, monkeypatch):
    given = []

    class Watched(MegakernelDecoder):
        def __init__(self, *arguments, **options):
            given.append(options["counter_origin"])
            super().__init__(*arguments, **options)

    monkeypatch.setattr(soak, "MegakernelDecoder", Watched)
    status, _ = command("--steps", 20, "--parts", 1, "--counter-origin", 2**32 - 9)
    assert status == 0 and given == [2**32 - 9]


def test_a_row_that_its_neighbours_change_is_noticed(command, monkeypatch):
    original, calls = MegakernelDecoder.decode, itertools.count()

    def careless(self, cache, tables, rows, steps, deliver):
        def changed(records):
            if len(rows) > 2 and next(calls) % 20 == 0:
                records = [record._replace(token=(record.token + 1) % 199) for record in records]
            deliver(records)

        return original(self, cache, tables, rows, steps, changed)

    monkeypatch.setattr(MegakernelDecoder, "decode", careless)
    status, rows = command("--steps", 150, "--parts", 1)
    assert status == 1 and rows[0]["same_among_strangers"] < rows[0]["replayed"]


def test_a_lost_page_is_noticed(command, monkeypatch):
    original = Soak.part

    def leaking(self, *arguments):
        self.free = (self.free[0] + 1, self.free[1])
        return original(self, *arguments)

    monkeypatch.setattr(Soak, "part", leaking)
    status, rows = command("--steps", 50, "--parts", 1)
    assert status == 1 and rows[0]["pages_lost"]

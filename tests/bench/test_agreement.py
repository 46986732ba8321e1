"""The agreement campaign: what agrees passes, planted mistakes do not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support import tiny_config
from support.bench_command import bench_command

import ffi
from north_jax.bench import campaign
from north_jax.bench.comparison import Found, compare, faults
from north_jax.bench.reference import CANDIDATES, Outputs, Reference, doubt, gaps, given_experts, references
from north_jax.bench.shared_pages import Row, SharedPages
from north_jax.compare.measures import errors
from north_jax.random_weights.weights import STRONG, random_params

pytestmark = pytest.mark.skipif(not ffi.available("cpu"), reason="nothing compiled")

# Wide enough that rounding errors average out.
SIZES = {
    "hidden_size": 128,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "num_experts": 32,
    "dtype": "bfloat16",
    "vocab_size": 500,
}


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command on a tiny model; gives its exit status and what it wrote."""
    return bench_command("agreement", SIZES, tmp_path, monkeypatch)


FEW = ("--part", "slices", "--layers", 3, "--batch", 2, "--context", 0, 100, "--ragged", 1, "--long", 300)


ONE = ("--part", "slices", "--layers", 3, "--batch", 2, "--context", 100, "--ragged", 0, "--long")


@pytest.mark.slow
def test_the_compiled_decode_agrees_and_a_run_goes_on_where_one_was_stopped(command, monkeypatch, capsys):
    status, first = command(*FEW, "--seconds", 0)
    assert status == 2 and len(first) == 1
    assert "4 of 5 cases are missing" in capsys.readouterr().out
    status, rows = command(*FEW)
    assert status == 0 and rows[:1] == first
    assert [row["contexts"] for row in rows] == ["0 100", "300", "0", "100", "0"]
    assert all("skipped" not in row for row in rows)
    monkeypatch.setattr(campaign.Subject, "step", None)
    assert command(*FEW) == (0, rows)


@pytest.mark.slow
def test_the_other_parts_agree(command):
    status, rows = command("--part", "depth", "float32", *FEW[2:])
    assert status == 0 and {row["part"] for row in rows} == {"depth", "float32"}


@pytest.mark.parametrize("change", [{"sliding_window": 69}, {"norm_topk_prob": True}, {"rope_theta": 49000.0}])
def test_a_planted_mistake_is_found(command, monkeypatch, change):
    original = campaign.truncated

    def mistaken(config, params, layers):
        short, part = original(config, params, layers)
        return dataclasses.replace(short, **change), part

    monkeypatch.setattr(campaign, "truncated", mistaken)
    status, rows = command(*ONE)
    assert status == 1
    assert any(row["faults"] for row in rows)


def test_rows_share_what_they_read_and_own_what_they_write():
    config = tiny_config()
    pages = SharedPages(config, contexts=[100, 300], numbers=4)
    rows = [Row(300, 0, 5), Row(300, 1, 6), Row(100, 0, 7)]
    full, sliding = pages.tables(rows, 5)
    assert len({full[0, 4], full[1, 4], full[2, 1]}) == 3 and min(full[0, 4], full[1, 4], full[2, 1]) >= 5
    assert set(full[0, :4]) <= set(range(5)) and (full[0, :4] != full[1, :4]).any()
    assert (full[2, 2:] == -1).all() and (full[3:] == -1).all() and (sliding[3:] == -1).all()
    assert sliding[0, 300 // 64 % sliding.shape[1]] >= 5
    seen = {position // 64 for position in range(300 - config.sliding_window + 1, 301)}
    assert set(np.flatnonzero(sliding[0] >= 0)) == {page % sliding.shape[1] for page in seen}


def test_chosen_rows_are_beyond_doubt():
    """Rows that rounding could tip are left out, and there are some."""
    config = tiny_config(**SIZES)
    params = random_params(config, gains=STRONG)
    pages = SharedPages(config, contexts=[70], numbers=CANDIDATES)
    arguments = {"depths": [3], "wanted": CANDIDATES}
    cache = pages.cache(3, "bfloat16")
    some, every = (
        references(config, params, cache, pages, 70, beyond_doubt=beyond, **arguments) for beyond in (True, False)
    )

    def worst(chosen):
        return max(errors(r.theirs.logits[3], r.exact.logits[3], -1) for r in chosen)

    assert len(every) == CANDIDATES and worst(some) < 0.5 * worst(every)
    assert worst(every[:8]) < worst(every)  # in the order of their doubts


def test_doubt_is_the_expected_number_of_other_experts():
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((6, 400, 32)).astype(np.float32)
    theirs = exact + 0.02 * rng.standard_normal(exact.shape).astype(np.float32)

    def chosen(logits):
        return np.sort(np.argsort(-logits, axis=2)[:, :, :4], axis=2)

    changed = (chosen(exact) != chosen(theirs)).any(axis=2).sum(axis=0)
    expected = doubt(exact, theirs, 4)
    assert 0.7 < changed.sum() / expected.sum() < 1.5  # the next but one may come in too
    assert changed[expected < 0.01].sum() == 0


def test_gaps_are_how_far_a_choice_is_from_a_tie():
    logits = np.array([[[1.0, 4.0, 3.0, 2.5]], [[1.0, 1.0, 1.0, 0.0]]], np.float32)
    np.testing.assert_array_equal(gaps(logits, np.array([[[1, 2]], [[1, 2]]])), [[0], [0]])
    np.testing.assert_array_equal(gaps(logits, np.array([[[1, 3]], [[0, 3]]])), [[0.5], [1]])


def test_the_experts_that_a_decoder_ran_decide_what_it_is_held_against():
    """JAX's own choices, given to float32, leave rounding; a choice that is no near tie is told apart."""
    config = tiny_config(**SIZES)
    params = random_params(config, gains=STRONG)
    pages = SharedPages(config, contexts=[70], numbers=CANDIDATES)
    cache = pages.cache(3, "bfloat16")
    every = references(config, params, cache, pages, 70, depths=[3], wanted=CANDIDATES, beyond_doubt=False)
    changed = [r for r in every if r.their_gaps.max() > 0]
    assert changed and all(r.their_gaps.max() < 8 for r in changed)

    def error(found, exact):
        return np.median([errors(f.logits[3], e.logits[3], -1) for f, e in zip(found, exact, strict=True)])

    theirs = [r.theirs for r in changed]
    rounding = error(theirs, [r.their_exact for r in changed])
    assert rounding < 0.5 * error(theirs, [r.exact for r in changed])

    some = every[:2]
    experts = np.broadcast_to(np.arange(config.num_experts_per_tok, dtype=np.int32), (2, 2, config.num_experts_per_tok))
    outputs, far = given_experts(config, params, cache, pages, [r.row for r in some], experts, depth=3, slots=8)
    found = Found(outputs, outputs, far / some[0].yardsticks[:, None])
    result = compare(some, found, 3)
    assert result["error"] == 0 and result["gap"] > 8
    assert [text for text in faults(result) if "from a tie" in text] == faults(result)
    assert result["row_choices"] == [2, 2] and max(result["row_cosines"]) < 0.99


def test_faults_are_named():
    exact = Outputs({1: np.ones((4,), np.float32)}, np.ones((1, 2, 4, 128), np.float32))

    def off(by: float, written: float = 0.0) -> Outputs:
        step = np.array([by, -by, by, -by], np.float32)
        return Outputs({1: exact.logits[1] + step}, exact.written + np.float32(written))

    dense = np.zeros(0)
    reference = Reference(Row(1, 0, 1), exact, off(1e-3, 1e-3), exact, dense, dense)

    def found(*outputs: Outputs) -> list[str]:
        rows = [reference] * len(outputs)
        return faults(compare(rows, Found.of_exact_experts(rows, outputs), 1))

    assert found(off(1e-3, 1e-3)) == []
    assert found(off(1.2e-3))[0].startswith("error of logits")
    assert "layer 0" in found(off(1e-3, 1.3e-3))[0]
    assert found(off(1e-3, 1.2e-3)) == []  # of a thousand numbers, that may be chance
    assert len(found(off(1e-3), off(np.nan, np.nan))) == 3

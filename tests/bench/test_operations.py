"""The campaign of single operations: what agrees passes, planted mistakes do not, and are found where they are."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from support import tiny_config
from support.bench_command import bench_command

import ffi
from north_jax.bench import operations, oracles
from north_jax.bench.activations import EXECUTOR, read
from north_jax.bench.operation_checks import Check, LayerChecks, fault
from north_jax.bench.operations import Subject, depths
from north_jax.bench.shared_pages import Row, SharedPages
from north_jax.megakernel.decoder import MegakernelDecoder
from north_jax.random_weights.weights import STRONG, random_params, truncated

pytestmark = pytest.mark.skipif(not ffi.available("cpu"), reason="nothing compiled")

# A layer of each kind, wide enough that rounding errors average out.
SIZES = {
    "hidden_size": 128,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "sliding_window_pattern": 2,
    "num_experts": 32,
    "intermediate_size": 32,
    "dtype": "bfloat16",
    "vocab_size": 500,
}
CONFIG = tiny_config(**SIZES)
# The sizes of every test, so that each operation is compiled once.
CONTEXTS, SLOTS = [5, 300], 3


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command on a tiny model; gives its exit status and what it wrote."""
    return bench_command("operations", SIZES, tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, gains=STRONG)


@pytest.fixture(scope="module")
def pages():
    return SharedPages(CONFIG, contexts=CONTEXTS, numbers=SLOTS)


@pytest.fixture(scope="module")
def cache(pages):
    return pages.cache(3, "bfloat16")


FEW = ("--batch", 1, SLOTS, "--context", *CONTEXTS, "--ragged", 1)


@pytest.mark.slow
def test_the_operations_agree_and_a_second_run_adds_nothing(command, monkeypatch, capsys):
    status, rows = command(*FEW)
    assert status == 0 and all(row["kernel"] == EXECUTOR and not row["faults"] for row in rows)
    found = {(row["routing"], row["layers"], row["batch"]) for row in rows}
    assert found == {("uniform", layers, batch) for layers in (1, 2, 3) for batch in (1, SLOTS)} | {
        ("skewed", 2, SLOTS)
    }
    named = {(each["operation"], each["output"]) for row in rows for each in row["operations"]}
    assert {output for _, output in named} >= {"RESIDUAL", "HIDDEN", "keys", "ATTENTION", "DENSE_HIDDEN", "LOGITS"}
    assert {operation for operation, _ in named} >= {"EMBED", "MOE_DOWN", "FFN_DOWN", "ROUTER_GEMM", "O_PROJ"}
    assert "| LM_HEAD | LOGITS | " in capsys.readouterr().out
    monkeypatch.setattr(operations, "Subject", None)
    assert command(*FEW) == (0, rows)


@pytest.fixture(scope="module")
def seen(params, pages, cache):
    """Number of layers → what a ragged batch left, and the checks of it. All rows share a norm."""
    rows = [Row(300, 0, 7), Row(5, 1, 8), Row(300, 2, 9)]
    found = {}
    for layers in (1, 2):
        short, part = truncated(CONFIG, params, layers)
        decoder = MegakernelDecoder(short, part, slots=SLOTS, max_context=pages.max_context)
        decoder.compile(cache[:layers], pages.tables([], SLOTS))
        own, _ = pages.step(decoder, tuple(array.copy() for array in cache[:layers]), rows)
        table = pages.tables(rows, SLOTS).of_layer(CONFIG, layers - 1)
        left = read(short, decoder, rows, pages.written(own, rows, SLOTS)[-1], on_gpu=False)
        checks = LayerChecks(CONFIG, params, layers - 1, SLOTS)
        found[layers] = left, lambda some, checks=checks, own=own, table=table: checks.checks(some, own[-1], table)
    return found


def wrong_in(checks):
    return {(check.operation, check.output) for check in checks if fault(check.judged())}


@pytest.mark.parametrize(
    ("layers", "field", "operation", "output"),
    [
        (1, "residual", "EMBED", "RESIDUAL"),
        (1, "residual_out", "ADD_RMSNORM", "RESIDUAL"),
        (1, "hidden", "ADD_RMSNORM", "HIDDEN"),
        (1, "qkv", "QKV_PROJ", "queries"),
        (1, "written", "QKV_PROJ", "keys and values in pages"),
        (2, "partial", "ATTN_DECODE", "PARTIAL, folded"),
        (2, "attention", "ATTN_COMBINE", "ATTENTION"),
        (2, "attention_out", "O_PROJ", "ATTENTION_OUT"),
        (1, "mlp_hidden", "FFN_UPGATE_ACT", "DENSE_HIDDEN"),
        (1, "mlp_out", "FFN_DOWN", "MLP_OUT"),
        (2, "router_logits", "ROUTER_GEMM", "ROUTER_LOGITS"),
        (2, "mlp_hidden", "MOE_UPGATE_ACT", "EXPERT_HIDDEN"),
        (2, "mlp_out", "MOE_DOWN", "MLP_OUT"),
        (1, "hidden_out", "ADD_RMSNORM", "HIDDEN of the head"),
        (2, "logits", "LM_HEAD", "LOGITS"),
    ],
)
def test_a_buffer_of_one_row_that_is_off_is_found(seen, layers, field, operation, output):
    left, checks = seen[layers]
    changed = getattr(left, field).copy()
    row = (0, 1) if field == "residual_out" else 1
    changed[row] = changed[row].astype(np.float64) * 1.01
    wrong = wrong_in(checks(dataclasses.replace(left, **{field: changed})))
    # It and what takes its output.
    assert (operation, output) in wrong and len(wrong) <= 5, wrong


def test_what_was_left_is_right(seen):
    for left, checks in seen.values():
        assert wrong_in(checks(left)) == set()


def test_nan_is_wrong(seen):
    left, checks = seen[2]
    attention = left.attention.copy()
    attention[2, 5] = np.nan
    assert ("ATTN_COMBINE", "ATTENTION") in wrong_in(checks(dataclasses.replace(left, attention=attention)))


def scaled_output(config, params, layers):
    short, part = truncated(config, params, layers)
    last = part["layers"][layers - 1]
    return short, part | {"layers": part["layers"] | {layers - 1: last | {"o": last["o"] * 1.01}}}


def changing(**changes):
    def mistaken(config, params, layers):
        short, part = truncated(config, params, layers)
        return dataclasses.replace(short, **changes), part

    return mistaken


@pytest.mark.parametrize(
    ("mistaken", "layers", "found"),
    [
        (scaled_output, 1, "O_PROJ, ATTENTION_OUT"),
        (changing(rope_theta=49000.0), 1, "QKV_PROJ, queries"),
        (changing(sliding_window=69), 2, "ATTN_DECODE, PARTIAL"),
        (changing(norm_topk_prob=True), 2, "MOE_UPGATE_ACT, router weights"),
    ],
    ids=["weights", "rotation", "window", "router"],
)
def test_a_kernel_that_computes_something_else_is_found(params, pages, cache, monkeypatch, mistaken, layers, found):
    monkeypatch.setattr(operations, "truncated", mistaken)
    subject = Subject(CONFIG, params, layers, cache, pages, SLOTS)
    _, result = subject.step(tuple(array.copy() for array in cache), [Row(300, 0, 7)])
    assert any(found in text for text in result["faults"])


def test_every_kind_of_layer_is_once_the_last():
    assert depths(CONFIG) == {"dense": 1, "sparse, sliding": 2, "sparse, full": 3}


def test_a_logit_of_every_tile_is_looked_at():
    assert oracles.looked_at(500).tolist() == list(range(500))
    tokens = oracles.looked_at(16 * 1000 + 3)
    assert (tokens // 16 == np.arange(1001)).all() and len({*(tokens % 16).tolist()}) == 16


def test_splits_fold_to_either_base():
    rng = np.random.default_rng(0)
    partial, stats = rng.standard_normal((1, 2, 32, 4, 8)), rng.uniform(1, 3, (1, 2, 32, 4, 2))
    expected = oracles.fold(partial, stats, [700], None, math.e)
    stats[..., 0] *= math.log2(math.e)
    np.testing.assert_allclose(oracles.fold(partial, stats, [700], None, 2.0), expected, rtol=1e-12)


def test_an_error_is_judged_row_by_row():
    exact = np.ones((2, 4))
    step = np.array([1, -1, 1, -1]) * 1e-3
    theirs = exact + step
    good, bad = (Check("X", "Y", exact + [[0.1], [factor]] * step, exact, theirs) for factor in (1.1, 1.2))
    assert fault(good.judged()) is None
    assert fault(bad.judged()) == "X, Y of row 1: error 1.20e-03, at most 1.11e-03"
    assert fault(Check("X", "Y", exact * (1 + 9e-6), exact, exact).judged()) is None  # float32 may be so far off

"""The pipelined kernel itself on a CPU, with fibers as threads (see warps/), against the CPU executor.

Rings, barriers, counters, routing, attention, the ends of rows and of quanta, and the ways out after a fault. What a
GPU adds is not tested here: memory order, what its instructions really do, and the time it takes.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_config
from support.kernel_program import SIZES, SMS, KernelProgram, Result, batch_of, params_of
from support.quantum import Quanta, Start

import ffi
from north_jax.config import Config
from north_jax.decoding import DecodeRow, Finish
from north_jax.layers import Params
from north_jax.megakernel.abi import Field, Opcode
from north_jax.megakernel.build import build
from north_jax.megakernel.decoder import MegakernelDecoder
from north_jax.megakernel.orders import down_first, router_first, shared_norm, streamed
from north_jax.megakernel.schedule import Schedule
from north_jax.megakernel.selection import select
from north_jax.sampling import SamplingBatch, SamplingParams, sample

ROOT = Path(__file__).parents[2]
slow = pytest.mark.slow
NONE, WAIT, SLICE_WAIT, NO_PAGE = 0, 1, 2, 7  # csrc/megakernel/launch.h
CONFIG = tiny_config(**SIZES)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    program = tmp_path_factory.mktemp("warps") / "pipeline"
    warps, host = Path(__file__).with_name("warps"), ROOT / "csrc" / "megakernel" / "pipeline"
    # Shared memory holds what its users say; and jumps from stack to stack are meant.
    options = ["-std=c++20", "-O1", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", f"-I{warps}", f"-I{ROOT}"]
    sources = [warps / "pipeline.cc", host / "limits.cc", host / "tasks.cc"]
    subprocess.run([compiler, *options, *sources, "-o", program], check=True)
    return program


@pytest.fixture(scope="module")
def params():
    return params_of(CONFIG)


@pytest.fixture
def emulator(program, tmp_path, params) -> KernelProgram:
    return KernelProgram(program, tmp_path, CONFIG, params)


def steps_of(entries: np.ndarray) -> list[list[tuple[int, int, Finish]]]:
    """(slot, token, finish) of every row, by step."""
    result: list[list[tuple[int, int, Finish]]] = []
    for entry in entries:
        assert entry["step"] in (len(result) - 1, len(result))
        if entry["step"] == len(result):
            result.append([])
        result[-1].append((int(entry["slot"]), int(entry["token"]), Finish(entry["finish"])))
    return result


def error_of(logits: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Of each row, relative to its norm."""
    return np.linalg.norm(logits - expected, axis=-1) / np.linalg.norm(expected, axis=-1)


def assert_agrees(config: Config, params: Params, batch: Start, rows: Sequence[DecodeRow], result: Result) -> None:
    """The CPU executor, given the kernel's tokens step by step, finds its logits and tokens, and the same pages."""
    if not ffi.available("cpu"):
        pytest.skip(str(ffi.build_info()))
    assert result.fault["kind"] == NONE
    decoder = MegakernelDecoder(config, params, slots=batch.slots, max_context=batch.max_context, sms=SMS)
    decoder.compile(batch.cache(), batch.tables)
    quanta, going = Quanta(decoder, batch), list(rows)
    steps = steps_of(result.entries)
    for number, step in enumerate(steps):
        assert [slot for slot, _, _ in step] == [row.slot for row in going]
        quanta.run(1, going)
        logits = decoder.logits()
        # The last logits of a row are those of its last step.
        last = [n for n, (_, _, finish) in enumerate(step) if number + 1 == len(steps) or finish is not Finish.NONE]
        places = [rows.index(next(row for row in rows if row.slot == step[n][0])) for n in last]
        assert (error_of(result.logits[places], logits[last]) < 2e-2).all()
        following = []
        for row, own, (_, token, finish) in zip(going, logits, step, strict=True):
            tolerance = 4e-2 * np.linalg.norm(own) / np.sqrt(len(own))
            assert own[token] >= own.max() - tolerance
            assert finish is (Finish.LENGTH if row.remaining == 1 else Finish.NONE)
            if finish is Finish.NONE:
                following.append(
                    dataclasses.replace(row, token=token, position=row.position + 1, remaining=row.remaining - 1)
                )
        going = following
    for ours, theirs in zip(result.pages, quanta.cache, strict=True):
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
        np.testing.assert_allclose(np.nan_to_num(ours), np.nan_to_num(theirs), rtol=5e-2, atol=5e-2)


BATCHES = {  # positions and steps left of each row
    "one": [(130, 4)],
    "ends at different steps": [(63, 4), (0, 1), (64, 8)],
    "two": [(69, 8), (70, 8)],
}


@pytest.mark.parametrize("name", BATCHES)
def test_it_agrees_with_the_executor(emulator, params, name):
    """Ragged positions across the ends of pages and of the window; rows that end within the quantum."""
    batch = batch_of(CONFIG, [position for position, _ in BATCHES[name]])
    lengths = [remaining for _, remaining in BATCHES[name]]
    rows = [dataclasses.replace(row, remaining=n) for row, n in zip(batch.rows, lengths, strict=True)]
    result = emulator.run(batch, rows, 4, size={3: 4}.get(len(rows), len(rows)))
    assert len(steps_of(result.entries)) == 4
    assert_agrees(CONFIG, params, batch, rows, result)


@pytest.mark.parametrize("seeds", [pytest.param((0, 3), id="few"), pytest.param(range(10, 30), id="many", marks=slow)])
def test_no_interleaving_changes_a_bit(emulator, seeds):
    """Who runs when, and how long copies take, is chance; what comes out is not. With few pages in the ring."""
    batch = batch_of(CONFIG, [130, 0, 63])
    results = {}
    for seed in seeds:
        result = emulator.run(batch, batch.rows, 2, seed=seed, size=4, shared_memory=180 * 1024)
        assert result.fault["kind"] == NONE
        live = result.logits[: len(batch.rows)]
        results[seed] = (live.tobytes(), result.entries.tobytes(), *(pages.tobytes() for pages in result.pages))
    assert len(set(results.values())) == 1


def test_warps_may_be_items_of_attention_apart(program, tmp_path):
    """Nothing makes the consumers meet between two items: what one of them works on must not be another's."""
    config = tiny_config(**(SIZES | {"num_hidden_layers": 1, "vocab_size": 64}))
    emulator = KernelProgram(program, tmp_path, config, params_of(config))
    batch = batch_of(config, [130, 200, 70, 190])
    results = [emulator.run(batch, batch.rows, 1, seed=seed) for seed in range(8)]
    assert len({result.logits.tobytes() for result in results}) == 1


def test_counters_may_wrap(emulator):
    """Within the first step and the second; and go on from the largest positive number."""
    batch = batch_of(CONFIG, [64])
    results = set()
    for origin in (0, 2**32 - 3, 2**31 - 1):
        result = emulator.run(batch, batch.rows, 2, counter_origin=origin)
        assert result.fault["kind"] == NONE
        results.add((result.logits.tobytes(), result.entries.tobytes(), *(pages.tobytes() for pages in result.pages)))
    assert len(results) == 1


def test_a_row_without_a_page_ends_the_quantum(emulator):
    """In the middle of attention, with everything in flight: every role finds its way out, and copies land."""
    batch = batch_of(CONFIG, [130, 64])
    full = np.array(batch.tables.full)
    full[0, 1] = -1
    broken = dataclasses.replace(batch, tables=batch.tables._replace(full=full))
    for seed in range(4):
        result = emulator.run(broken, broken.rows, 4, seed=seed, timeout_ns=10**6)
        fault = result.fault
        assert (fault["kind"], fault["needed"], fault["seen"], fault["step"]) == (NO_PAGE, 0, 64, 0)
        assert len(result.entries) == 0


def task_of(schedule: Schedule, opcode: Opcode) -> int:
    """The operation's last task."""
    return int(np.flatnonzero(schedule.tasks[:, Field.OPCODE] == opcode)[-1])


@pytest.mark.parametrize(
    ("opcode", "field"),
    [
        (Opcode.ADD_RMSNORM, Field.WAIT_NEED),  # the loader, all of it
        (Opcode.MOE_UPGATE_ACT, Field.WAIT_NEED),  # the router
        (Opcode.O_PROJ, Field.SLICE_NEED),  # the loader's first warp
        (Opcode.END_STEP, Field.WAIT_NEED),  # the loader of one block, and all others for its decision
        *(
            pytest.param(*pair, marks=slow)
            for pair in (
                (Opcode.ATTN_COMBINE, Field.WAIT_NEED),
                (Opcode.SAMPLE_DRAW, Field.WAIT_NEED),
                (Opcode.ATTN_DECODE, Field.SLICE_NEED),
                (Opcode.FFN_DOWN, Field.SLICE_NEED),
                (Opcode.MOE_DOWN, Field.SLICE_NEED),
            )
        ),
    ],
)
def test_an_arrival_that_never_comes_ends_the_quantum(emulator, opcode, field):
    """Wherever somebody waits in vain, the launch ends with a report of such a wait, in arrivals of the step."""
    batch = batch_of(CONFIG, [130, 64])
    schedule = build(CONFIG, batch=2, sms=SMS, dtype=jnp.bfloat16, order=select(2, 131))
    number, tasks = task_of(schedule, opcode), np.array(schedule.tasks)
    tasks[number, field] += 1
    faulty = dataclasses.replace(schedule, tasks=tasks)
    result = emulator.run(batch, batch.rows, 2, schedule=faulty, timeout_ns=10**6, counter_origin=2**31)
    fault = result.fault
    # Somebody who waits for what that task would have done may have begun to wait before it.
    assert fault["kind"] in (WAIT, SLICE_WAIT)
    assert fault["step"] == 0
    assert fault["needed"] == tasks[fault["task"], Field.WAIT_NEED if fault["kind"] == WAIT else Field.SLICE_NEED]
    assert 0 <= fault["seen"] < fault["needed"]
    assert len(result.entries) == 0


@slow
def test_tokens_are_drawn_from_the_logits(emulator):
    """Rows that sample: every pass of the search over both SMs."""
    sampling = [
        SamplingParams(1.5, top_p=0.90625, seed=5, logprobs=4),
        SamplingParams(2, top_k=50, seed=8),
        SamplingParams(1.1, top_k=700, top_p=0.5, seed=7),
        SamplingParams(0),
    ]
    batch = batch_of(CONFIG, [130, 0, 63, 64], sampling=sampling)
    result = emulator.run(batch, batch.rows, 3)
    last = result.entries[-len(batch.rows) :]
    positions = np.array([row.position for row in batch.rows]) + 2
    drawn = jax.jit(sample)(result.logits, SamplingBatch.of(sampling), positions + 1)
    assert last["token"].tolist() == np.asarray(drawn).tolist()
    assert len(set(result.entries["token"].tolist())) > len(batch.rows)


def test_the_host_ends_a_quantum_after_a_step(emulator):
    batch = batch_of(CONFIG, [5, 6])
    result = emulator.run(batch, batch.rows, 4, stop=True)
    assert result.fault["kind"] == NONE
    assert len(steps_of(result.entries)) == 1


# A choice between nearly equal experts cannot tip where every row goes to all of them.
ALL_EXPERTS = {"num_experts_per_tok": 16}
VARIANTS = {
    "wide": {"hidden_size": 1152, "intermediate_size": 384, "prefix_dense_intermediate_size": 1536},
    "one KV head": {"num_key_value_heads": 1},
    "softmax": {"expert_selection_fn": "softmax"},
    "renormalised": {"norm_topk_prob": True},
    "layer norm": {"rms_norm_eps": None, "layer_norm_eps": 1e-5},
    "three layers": {"num_hidden_layers": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_models(program, tmp_path, variant):
    config = tiny_config(**SIZES | ALL_EXPERTS | VARIANTS[variant])
    params = params_of(config)
    batch = batch_of(config, [130, 0, 63])
    result = KernelProgram(program, tmp_path, config, params).run(batch, batch.rows, 2, size=4)
    assert_agrees(config, params, batch, batch.rows, result)


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", [router_first(streamed(0)), shared_norm(router_first(down_first(0)))], ids=lambda order: order.name
)
@pytest.mark.parametrize("sms", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 8])
def test_other_shapes(program, tmp_path, rows, sms, order):
    config = tiny_config(**SIZES | ALL_EXPERTS)
    params = params_of(config)
    batch = batch_of(config, (330, 0, 69, 63, 70, 64, 1, 68)[:rows])
    result = KernelProgram(program, tmp_path, config, params).run(batch, batch.rows, 3, sms=sms, order=order)
    assert_agrees(config, params, batch, batch.rows, result)

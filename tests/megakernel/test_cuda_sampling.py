"""The kernel's sampling on a CPU: its own code, with fibers as threads (see warps/), against sampling.py.

What a GPU adds is not tested here: memory order, and the time it takes.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.programs import write_arrays

from north_jax.adjust import Bias, Penalties, adjust, count, mask_words
from north_jax.decoding import DecodeRow, Finish, TokenHistory
from north_jax.logprobs import top_logprobs
from north_jax.megakernel.abi import MAX_LOGPROBS, ROW_FIELDS, Row
from north_jax.megakernel.batch import biases_of, masks_of, pack_rows
from north_jax.sampling import SamplingBatch, SamplingParams, sample

ROOT = Path(__file__).parents[2]
ENTRY = np.dtype(  # csrc/megakernel/channel.h
    [
        *((name, np.int32) for name in ("quantum", "step", "slot", "token", "finish", "alternatives")),
        ("logprob", np.float32),
        ("top_token", np.int32, MAX_LOGPROBS),
        ("top_logprob", np.float32, MAX_LOGPROBS),
    ]
)
STEPS = 3
slow = pytest.mark.slow
PENAL = {"presence_penalty": 0.8, "frequency_penalty": 1.2, "repetition_penalty": 1.3}


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    program = tmp_path_factory.mktemp("warps") / "sampling"
    source = Path(__file__).with_name("warps") / "sampling.cc"
    command = [compiler, "-std=c++20", "-O1", f"-I{source.parent}", f"-I{ROOT}", source, "-o", program]
    subprocess.run(command, check=True)
    return program


class Even:
    """A grammar of even tokens."""

    def __init__(self, vocabulary):
        self.words = mask_words(vocabulary)

    def mask(self):
        return np.full(self.words, 0x55555555, np.uint32)

    def accept(self, token):
        pass


def rows_of(vocabulary):
    sampling = [
        SamplingParams(0),
        SamplingParams(0, logprobs=20, **PENAL),
        SamplingParams(1.5, top_p=0.90625, seed=5, logprobs=4, **PENAL),
        SamplingParams(1, seed=6, logit_bias=((5, 3.0), (vocabulary - 1, 4.0), (9, -100.0)), logprobs=0),
        SamplingParams(1.1, top_k=700, top_p=0.5, seed=7, logit_bias=tuple((t, 0.01 * t) for t in range(300))),
        SamplingParams(2, top_k=50, seed=8),
        SamplingParams(0.7, top_k=900, top_p=0.9375, min_p=0.1, seed=9),
        SamplingParams(1, seed=10),
        SamplingParams(3, top_p=0.25, seed=11),
    ]
    rows = [
        DecodeRow(
            slot,
            3 + slot,
            10 * slot,
            50,
            frozenset(),
            one,
            TokenHistory(range(slot, 199, 7), generated=[3 + slot]),
            Even(vocabulary) if slot in (2, 5) else None,
        )
        for slot, one in enumerate(sampling)
    ]
    return rows


def run(program: Path, folder: Path, logits, rows, ranges):
    """What the kernel leaves after each step: rows, counts, adjusted logits, ring entries."""
    batch, vocabulary = logits.shape
    histories = [count(row.history.prompt, row.history.generated, vocabulary) for row in rows]
    biases, masks = biases_of(rows, batch), masks_of(rows, batch, vocabulary)
    assert biases is not None and masks is not None
    packed = pack_rows(rows, batch)
    arrays = [
        np.array([batch, vocabulary, ranges, STEPS], np.int32),
        packed,
        logits,
        np.array(histories),
        biases,
        masks,
    ]
    write_arrays(folder / "in", arrays)
    subprocess.run([program, folder / "in", folder / "out"], check=True, timeout=300)
    data, place, steps = (folder / "out").read_bytes(), 0, []
    types = [(np.int32, (batch, ROW_FIELDS)), (np.int32, logits.shape), (np.float32, logits.shape), (ENTRY, (-1,))]
    for _ in range(STEPS):
        values = []
        for dtype, shape in types:
            size = int(np.frombuffer(data, np.int64, 1, place)[0])
            values.append(np.frombuffer(data[place + 8 : place + 8 + size], dtype).reshape(shape))
            place += 8 + size
        steps.append(values)
    return packed, np.array(histories), steps


KINDS = ["many ties", "peaked", "flat", "all the same"]


@pytest.mark.parametrize(
    ("ranges", "kind"),
    [
        pytest.param(ranges, kind, marks=() if (ranges, kind) in zip((3, 2, 1, 1), KINDS, strict=True) else slow)
        for ranges in (1, 2, 3, 12)
        for kind in KINDS
    ],
)
def test_the_kernel_draws_what_jax_draws(program, tmp_path, kind, ranges):
    """Steps of rows of every kind: tokens, log-probabilities, counts, adjusted logits."""
    vocabulary, rng = 5000, np.random.default_rng(ranges)
    rows = rows_of(vocabulary)
    shape = len(rows), vocabulary
    logits = {
        "many ties": lambda: rng.integers(0, 12, shape) / 2,
        "peaked": lambda: rng.normal(0, 6, shape),
        "flat": lambda: rng.normal(0, 0.1, shape),
        "all the same": lambda: np.full(shape, 3.5),
    }[kind]().astype(np.float32)
    params = [row.sampling for row in rows]
    packed, counts, steps = run(program, tmp_path, logits, rows, ranges)
    masks = np.array([row.grammar.mask() if row.grammar else Even(vocabulary).mask() | 0xAAAAAAAA for row in rows])
    positions = packed[:, Row.POSITION].copy()
    for number, (state, counted, adjusted, entries) in enumerate(steps):
        penalties = Penalties.of(params, jnp.array(counts))
        expected = adjust(jnp.array(logits), penalties=penalties, bias=Bias.of(params, vocabulary), mask=masks)
        np.testing.assert_allclose(adjusted, expected, rtol=1e-6, atol=1e-6)
        drawn = np.asarray(jax.jit(sample)(adjusted, SamplingBatch.of(params), positions + 1))
        assert state[:, Row.TOKEN].tolist() == drawn.tolist() == entries["token"].tolist()
        assert (entries["step"] == number).all() and (entries["finish"] == Finish.NONE).all()
        positions += 1
        np.testing.assert_array_equal(state[:, Row.POSITION], positions)
        penal = np.array([one.penalises for one in params])
        counts[penal, drawn[penal]] += 1
        np.testing.assert_array_equal(counted, counts)
        top = top_logprobs(jnp.array(adjusted), jnp.array(drawn))
        for row, one in enumerate(params):
            assert entries["alternatives"][row] == (-1 if one.logprobs is None else one.logprobs)
            if one.logprobs is None:
                continue
            np.testing.assert_allclose(entries["logprob"][row], top.chosen[row], rtol=1e-5, atol=1e-5)
            wanted = slice(one.logprobs)
            np.testing.assert_array_equal(entries["top_token"][row, wanted], top.tokens[row, wanted])
            np.testing.assert_allclose(
                entries["top_logprob"][row, wanted], top.values[row, wanted], rtol=1e-5, atol=1e-5
            )


def test_ends_of_rows(program, tmp_path):
    """Stop tokens, lengths, and logits that are not finite, also behind a mask."""
    vocabulary = 600
    rows = rows_of(vocabulary)
    logits = np.random.default_rng(0).normal(0, 1, (len(rows), vocabulary)).astype(np.float32)
    logits[0, 77] = logits[1, 77] = 50
    logits[3, 500], logits[4, 4], logits[5, 1], logits[6] = np.nan, np.inf, np.nan, -np.inf
    rows[0] = DecodeRow(0, 3, 5, 50, frozenset({77, 78}), SamplingParams(0), rows[0].history)
    rows[7] = DecodeRow(7, 3, 5, 2, frozenset(), SamplingParams(0), rows[7].history)
    _, _, steps = run(program, tmp_path, logits, rows, 3)
    finishes = [dict(zip(entries["slot"].tolist(), entries["finish"].tolist(), strict=True)) for *_, entries in steps]
    errors = dict.fromkeys((3, 4, 5, 6), Finish.ERROR)
    assert finishes[0] == {0: Finish.STOP, 1: 0, 2: 0, 7: 0, 8: 0} | errors
    assert finishes[1] == {1: 0, 2: 0, 7: Finish.LENGTH, 8: 0}
    assert finishes[2] == {1: 0, 2: 0, 8: 0}
    entries = steps[0][3]
    assert entries["token"][entries["finish"] == Finish.ERROR].tolist() == [-1] * 4
    assert (entries["alternatives"][entries["finish"] == Finish.ERROR] == -1).all()

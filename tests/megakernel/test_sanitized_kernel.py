"""compute-sanitizer on a quantum of either kernel: no stray access, no misused barrier, no unexplained race.

On a GPU, with nvcc and compute-sanitizer. The kernels run without Python, in a program of their own. racecheck follows
no mbarrier that is polled, so it finds races in hand-overs that are in order; a control program shows that, and that it
finds those that are not. What it may find in the kernel are accesses to the regions of shared memory that
`support.hand_overs` lists with the barriers that order them. test_races.py looks for races there, knowing the barriers.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_config
from support.hand_overs import explained, races
from support.kernel_program import SIZES, KernelProgram, batch_of, params_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
KERNEL = ROOT / "csrc" / "megakernel"
SECONDS = 60  # of compute-sanitizer
WAIT_NS = 12 * 10**9  # of a kernel's waits
OPTIONS = (
    *("-std=c++17", "-O2", "-lineinfo", "-DNORTH_JAX_SLOW_POLLS", f"-I{ROOT}"),
    "-gencode=arch=compute_90a,code=sm_90a",
)

# What the pipelined kernel runs, and, with a dense layer of few columns a slice, what only the plain one does.
PLAIN = {"prefix_dense_intermediate_size": 256}
MODELS: dict[str, dict[str, Any]] = {"pipelined": {}, "plain": PLAIN}
SMS = {"pipelined": 2, "plain": 8}
POSITIONS = [130, 64, 71]  # three rows, at the window's edge among them

# racecheck takes a thousand times as long.
SMALL: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 132}
SMALL_MODELS: dict[str, dict[str, Any]] = {
    "pipelined, dense": SMALL,
    "pipelined, experts": SMALL | {"first_k_dense_replace": 0, "num_experts": 8},
    "plain": SMALL | PLAIN,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Builds a program of CUDA sources with nvcc."""
    compiler = shutil.which("nvcc")
    if compiler is None or shutil.which("compute-sanitizer") is None:
        pytest.skip("needs nvcc and compute-sanitizer")

    def build(*sources: Path) -> Path:
        program = tmp_path_factory.mktemp(sources[0].stem) / sources[0].stem
        subprocess.run([compiler, *OPTIONS, *sources, "-o", program], check=True)
        return program

    return build


@pytest.fixture(scope="module")
def program(compiled) -> Path:
    names = ("pipeline/kernel.cu", "plain/kernel.cu", "words.cu", "pipeline/limits.cc", "pipeline/tasks.cc")
    return compiled(Path(__file__).with_name("warps") / "device.cu", *(KERNEL / name for name in names))


@pytest.fixture(scope="module")
def control(compiled) -> Path:
    return compiled(Path(__file__).with_name("racecheck_control.cu"))


def sanitized(tool: str, *command: object) -> str:
    """What a tool of compute-sanitizer says of a program, which must succeed."""
    found = subprocess.run(
        ["compute-sanitizer", "--tool", tool, *map(str, command)], capture_output=True, text=True, timeout=SECONDS
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def prepared(program: Path, folder: Path, sizes: dict[str, Any], positions: list[int], steps: int, sms: int) -> None:
    """Writes a quantum's input, and sees it run by itself."""
    config = tiny_config(**(SIZES | sizes))
    batch = batch_of(config, positions)
    quantum = KernelProgram(program, folder, config, params_of(config))
    result = quantum.run(batch, batch.rows, steps, sms=sms, timeout_ns=WAIT_NS)
    assert len(result.entries) == steps * len(positions)
    assert np.isfinite(result.logits).all()


@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
@pytest.mark.parametrize("kernel", MODELS)
def test_nothing_is_found(program, tmp_path, kernel, tool):
    prepared(program, tmp_path, MODELS[kernel], POSITIONS, 2, SMS[kernel])
    said = sanitized(tool, program, tmp_path / "in", tmp_path / "out")
    assert "SUMMARY: 0 errors" in said, said


@pytest.mark.parametrize("kernel", SMALL_MODELS)
def test_every_race_that_racecheck_finds_is_explained(program, tmp_path, kernel):
    prepared(program, tmp_path, SMALL_MODELS[kernel], [3], 1, 2)
    said = sanitized("racecheck", program, tmp_path / "in", tmp_path / "out")
    assert "RACECHECK SUMMARY" in said, said
    found = races(said)
    unexplained = sorted(found if kernel == "plain" else {pair for pair in found if not explained(*pair)})
    assert not unexplained, said


@pytest.mark.parametrize("kind", ["copies", "sums"])
@pytest.mark.parametrize("order", ["ordered", "unordered"])
def test_racecheck_finds_races_where_an_mbarrier_is_between_and_where_it_is_not(control, kind, order):
    """Once it finds nothing in order, what it finds in the kernel is to be taken for what it says."""
    said = sanitized("racecheck", control, kind, order)
    assert races(said), said


def test_racecheck_finds_a_missing_named_barrier(control):
    assert races(sanitized("racecheck", control, "team", "unordered"))

"""compute-sanitizer finds nothing in a quantum of either kernel: no stray access, no misused barrier, no race.

On a GPU, with nvcc and compute-sanitizer. The kernels run without Python, in a program of their own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support import tiny_config
from support.kernel_program import SIZES, KernelProgram, batch_of, params_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
KERNEL = ROOT / "csrc" / "megakernel"


# What the pipelined kernel runs, and, with a dense layer of few columns a slice, what only the plain one does.
MODELS = {
    "pipelined": {"num_hidden_layers": 2},
    "plain": {"num_hidden_layers": 2, "prefix_dense_intermediate_size": 256},
}
SMS = {"pipelined": 2, "plain": 8}
POSITIONS = [130, 64, 71]  # three rows, at the window's edge among them


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """The program, built with nvcc."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("needs nvcc")
    program = tmp_path_factory.mktemp("device") / "device"
    kernels = ("pipeline/kernel.cu", "plain/kernel.cu", "words.cu", "pipeline/limits.cc", "pipeline/tasks.cc")
    sources = [Path(__file__).with_name("warps") / "device.cu", *(KERNEL / name for name in kernels)]
    options = ["-std=c++17", "-O2", "-lineinfo", f"-I{ROOT}", "-gencode=arch=compute_90a,code=sm_90a"]
    subprocess.run([compiler, *options, *sources, "-o", program], check=True)
    return program


@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
@pytest.mark.parametrize("kernel", MODELS)
def test_nothing_is_found(program, tmp_path, kernel, tool):
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("needs compute-sanitizer")
    config = tiny_config(**(SIZES | MODELS[kernel]))
    quantum = KernelProgram(program, tmp_path, config, params_of(config))
    batch = batch_of(config, POSITIONS)
    result = quantum.run(batch, batch.rows, 2, sms=SMS[kernel], timeout_ns=60 * 10**9)
    assert len(result.entries) == 2 * len(POSITIONS)
    assert np.isfinite(result.logits).all()
    found = subprocess.run(
        ["compute-sanitizer", "--tool", tool, program, tmp_path / "in", tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stdout
    assert re.search(r"SUMMARY: 0 (errors|hazards)", found.stdout), found.stdout

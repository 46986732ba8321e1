"""compute-sanitizer finds nothing in a quantum of the pipelined kernel: no stray access, no misused barrier, no race.

On a GPU, with nvcc and compute-sanitizer. The kernel runs without Python, in a program of its own.
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


@pytest.fixture(scope="module")
def quantum(tmp_path_factory) -> tuple[KernelProgram, list]:
    """A small model's quantum of three rows, at the window's edge among them; the program is built with nvcc."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("needs nvcc")
    folder = tmp_path_factory.mktemp("device")
    sources = [
        Path(__file__).with_name("warps") / "device.cu",
        *(KERNEL / name for name in ("pipeline/kernel.cu", "words.cu", "pipeline/limits.cc", "pipeline/tasks.cc")),
    ]
    options = ["-std=c++17", "-O2", f"-I{ROOT}", "-gencode=arch=compute_90a,code=sm_90a"]
    subprocess.run([compiler, *options, *sources, "-o", folder / "device"], check=True)
    config = tiny_config(**(SIZES | {"num_hidden_layers": 3}))
    return KernelProgram(folder / "device", folder, config, params_of(config)), [130, 64, 71]


@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_nothing_is_found(quantum, tool):
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("needs compute-sanitizer")
    program, positions = quantum
    batch = batch_of(program.config, positions)
    result = program.run(batch, batch.rows, 2, timeout_ns=60 * 10**9)
    assert len(result.entries) == 2 * len(positions)
    assert np.isfinite(result.logits).all()
    found = subprocess.run(
        ["compute-sanitizer", "--tool", tool, program.program, program.folder / "in", program.folder / "out"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stdout
    assert re.search(r"SUMMARY: 0 (errors|hazards)", found.stdout), found.stdout

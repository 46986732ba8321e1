"""Host memory that loading and exporting take above the arrays themselves, measured in a fresh process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from north_jax.checkpoint import write_random_checkpoint
from north_jax.config import Config

ROOT = Path(__file__).parents[2]
PROC = Path("/proc/self/status")

FULL_WIDTH = {
    "model_type": "cohere2_moe",
    "vocab_size": 262144,
    "hidden_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 768,
    "prefix_dense_intermediate_size": 3072,
    "first_k_dense_replace": 1,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "expert_selection_fn": "sigmoid",
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000,
    "logit_scale": 1.0,
}

needs_proc = pytest.mark.skipif(not PROC.exists(), reason="reads the peak from /proc, which this system lacks")


def measure(checkpoint: Path, dtype: str, exported: Path) -> dict[str, float]:
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("measure_memory.py"), checkpoint, dtype, exported],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published shape with a quarter of the width."""
    path = tmp_path_factory.mktemp("narrow") / "checkpoint"
    changes = {"vocab_size": 30000, "hidden_size": 512, "num_experts": 64, "intermediate_size": 384}
    write_random_checkpoint(path, Config.from_dict(FULL_WIDTH | changes))
    return path


@needs_proc
@pytest.mark.parametrize("dtype", ["-", "float32"])
def test_memory_above_the_arrays_is_a_small_part_of_them(narrow: Path, tmp_path: Path, dtype: str) -> None:
    found = measure(narrow, dtype, tmp_path / "exported")
    assert found["arrays"] > 180e6
    assert found["loaded"] - found["start"] - found["arrays"] < 50e6
    assert found["exported"] - found["start"] - found["arrays"] < 60e6


@needs_proc
@pytest.mark.slow
def test_full_width_checkpoint_loads_within_3_gb_above_its_arrays(tmp_path: Path) -> None:
    """One dense and two MoE layers of the published width: 3.6 GB of arrays; needs 8 GB of disk."""
    write_random_checkpoint(tmp_path / "checkpoint", Config.from_dict(FULL_WIDTH))
    found = measure(tmp_path / "checkpoint", "-", tmp_path / "exported")
    for directory in ("checkpoint", "exported"):
        shutil.rmtree(tmp_path / directory)
    above = (found["loaded"] - found["arrays"]) / 1e9
    print(f"{found['arrays'] / 1e9:.2f} GB loaded in {found['seconds']:.1f} s, peak {above:.2f} GB above the arrays")
    assert found["arrays"] > 3.6e9
    assert above < 3
    assert (found["exported"] - found["arrays"]) / 1e9 < 3

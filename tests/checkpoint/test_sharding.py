"""Checkpoints onto several devices, in a process that has eight virtual ones."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

from north_jax.checkpoint import write_random_checkpoint
from north_jax.config import Config

ROOT = Path(__file__).parents[2]


def test_layouts_of_devices(config: Config, tmp_path: Path) -> None:
    divisible = dataclasses.replace(config, num_experts=6, intermediate_size=16)
    write_random_checkpoint(tmp_path / "checkpoint", divisible)
    (tmp_path / "scratch").mkdir()
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("sharded_checks.py"), tmp_path / "checkpoint", tmp_path / "scratch"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-4000:]

"""The model on many devices, in processes that have virtual ones."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from support import tiny_config, tiny_params

import north_jax

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LAYERS = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}


def start(program: str, devices: int, *arguments: object) -> subprocess.Popen[str]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(*processes: subprocess.Popen[str]) -> None:
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-6000:]


def test_eight_devices_compute_what_one_does(tmp_path: Path) -> None:
    finish(start("sharded_checks.py", 8, "quick", tmp_path))


@pytest.mark.slow
def test_gradients_and_checkpoints_and_warp_decode_on_other_meshes(tmp_path: Path) -> None:
    finish(start("sharded_checks.py", 8, "long", tmp_path))


def test_two_hosts_read_their_parts_and_compute_together(tmp_path: Path) -> None:
    config = tiny_config(vocab_size=208, **LAYERS | {"intermediate_size": 1024})  # mostly experts
    params = tiny_params(config)
    north_jax.export(tmp_path / "files", config, params)
    north_jax.save(tmp_path / "orbax", config, params)
    tokens = np.arange(9, dtype=np.int32)[None]
    np.save(tmp_path / "logits.npy", jax.jit(north_jax.forward, static_argnums=0)(config, params, tokens))
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    finish(*(start("two_hosts.py", 2, process, port, tmp_path) for process in range(2)))

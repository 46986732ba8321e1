"""Run twice by test_sharding.py, as two hosts of two devices each: experts divided between hosts, heads within one.

Arguments: the process's number, the port of process 0, a directory with `files`, `orbax` and `logits.npy`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import north_jax
from north_jax.checkpoint import restore
from north_jax.sharding import make_mesh, shardings_of


def bytes_read() -> int:
    """By this process from any file, as Linux counts."""
    return int(Path("/proc/self/io").read_text().split()[1])


def reads_its_part(read: Callable[[], Any]) -> Any:
    """What `read` gives, the second time: files of code are not read again."""
    read()
    before = bytes_read()
    params = read()
    found = bytes_read() - before
    everything = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    experts = sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"][1]["mlp"]) if leaf.ndim == 3)
    part = everything - experts // 2  # each value once, without the other host's experts
    assert part < 0.7 * everything
    assert part <= found < 1.05 * part, (found, part, everything)  # with headers and indices
    return params


def main(process: int, port: int, directory: Path) -> None:
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
    assert (len(jax.devices()), len(jax.local_devices())) == (4, 2)
    config = north_jax.Config.from_json(directory / "files")
    mesh = make_mesh(expert=2, tensor=2)
    shardings = shardings_of(config, mesh)
    params = reads_its_part(lambda: north_jax.load(directory / "files", shardings=shardings).params)
    restored = reads_its_part(lambda: restore(directory / "orbax", shardings=shardings)[1])
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(params), strict=True):
        assert ours.sharding == theirs.sharding
        for one, other in zip(ours.addressable_shards, theirs.addressable_shards, strict=True):
            assert np.array_equal(one.data, other.data)

    everywhere = NamedSharding(mesh, PartitionSpec())
    forward = jax.jit(north_jax.forward, static_argnums=0, out_shardings=everywhere)
    expected = np.load(directory / "logits.npy")
    tokens = np.arange(expected.shape[1], dtype=np.int32)[None]
    with jax.set_mesh(mesh):
        logits = np.asarray(forward(config, restored, tokens))
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

"""Run twice by test_sharding.py, as two hosts of two devices each: experts divided between hosts, heads within one.

Arguments: the process's number, the port of process 0, a directory with `files`, `orbax` and `logits.npy`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import north_jax
from north_jax.checkpoint import restore
from north_jax.sharding import make_mesh, shardings_of


def main(process: int, port: int, directory: Path) -> None:
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
    assert (len(jax.devices()), len(jax.local_devices())) == (4, 2)
    config = north_jax.Config.from_json(directory / "files")
    mesh = make_mesh(expert=2, tensor=2)
    shardings = shardings_of(config, mesh)

    read = []
    model = north_jax.load(directory / "files", shardings=shardings, progress=lambda done, *_: read.append(done))
    everything = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    experts = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params["layers"][1]["mlp"]) if leaf.ndim == 3)
    assert read[-1] == everything - experts // 2  # each value once, without the other host's experts

    _, restored = restore(directory / "orbax", shardings=shardings)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(model.params), strict=True):
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

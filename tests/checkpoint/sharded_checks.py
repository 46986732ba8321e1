"""Run by test_sharding.py in a process of eight virtual CPU devices.

Arguments: a checkpoint and an empty directory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from north_jax.checkpoint import CheckpointError, export, load, restore, save
from north_jax.checkpoint import assemble as assembling
from north_jax.layers import Params
from north_jax.model import param_axes

MESH = jax.make_mesh((2, 4), ("expert", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))
RULES = {"expert": "expert", "heads": "tensor", "mlp": "tensor", "expert_mlp": "tensor", "embed": None}


def shardings(config, rules) -> Params:
    """A sharding per parameter, from its logical axis names."""

    def sharding(axes: tuple[str | None, ...]) -> NamedSharding:
        return NamedSharding(MESH, P(*(rules.get(axis) for axis in axes)))

    return jax.tree.map(sharding, param_axes(config), is_leaf=lambda node: isinstance(node, tuple))


def check(params: Params, expected: Params, placed: Params) -> None:
    """Bits, types and placement of every parameter and every shard."""
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for array, value, sharding in zip(*map(jax.tree.leaves, (params, expected, placed)), strict=True):
        assert array.sharding.is_equivalent_to(sharding, array.ndim), (array.sharding, sharding)
        assert array.dtype == value.dtype
        assert np.asarray(array).tobytes() == value.tobytes()
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == value[shard.index].tobytes()


def main(checkpoint: Path, scratch: Path) -> None:
    plain = load(checkpoint)
    expected = jax.tree.map(np.asarray, plain.params)
    config = plain.config
    by_tensor = shardings(config, RULES)
    by_column = shardings(config, {"embed": "tensor", "expert": "expert"})
    replicated = shardings(config, {})

    # Hugging Face onto devices, by rows and by columns, with and without a cast.
    counts = []
    for placed in (by_tensor, by_column):
        check(load(checkpoint, shardings=placed, progress=lambda *c: counts.append(c)).params, expected, placed)
    done, totals, _ = zip(*counts, strict=True)
    assert max(done) == set(totals).pop() == sum(value.nbytes for value in jax.tree.leaves(expected))
    wide = jax.tree.map(lambda x: x.astype(np.float32), expected)
    check(load(checkpoint, shardings=by_column, dtype="float32").params, wide, by_column)

    # Donated: another array that shares a host buffer must not change.
    shared = load(checkpoint, shardings=replicated).params["embed"]
    first, second = (shard.data for shard in shared.addressable_shards[:2])
    jax.block_until_ready(jax.jit(lambda x: x * 0, donate_argnums=0)(first))
    assert np.asarray(second).tobytes() == expected["embed"].tobytes()

    # The same where a thread's buffer holds less than a row, so that rows are read piece by piece.
    assembling._SCRATCH_BYTES = assembling._READ_BYTES = 16
    for placed in (by_tensor, by_column):
        check(load(checkpoint, shardings=placed).params, expected, placed)
    check(load(checkpoint, shardings=by_column, dtype="float32").params, wide, by_column)

    # And where devices get shards of more than 1000 bytes in chunks of rows, as accelerators do.
    assembling._in_host_memory, assembling._CHUNK_BYTES = lambda placement: False, 1000
    check(load(checkpoint, shardings=by_tensor).params, expected, by_tensor)

    # Orbax, from one layout onto another, and back to one device.
    sharded = load(checkpoint, shardings=by_tensor)
    save(scratch / "orbax", config, sharded.params)
    for placed in (by_tensor, by_column):
        check(restore(scratch / "orbax", shardings=placed)[1], expected, placed)
    check(restore(scratch / "orbax", shardings=by_column, dtype="float32")[1], wide, by_column)
    _, single = restore(scratch / "orbax")
    assert all(array.devices() == {jax.devices()[0]} for array in jax.tree.leaves(single))

    # Export of sharded parameters gives the same file.
    export(scratch / "exported", config, sharded.params)
    assert (scratch / "exported/model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()

    uneven = shardings(config, {"vocab": "tensor"})
    for read, directory in ((load, checkpoint), (restore, scratch / "orbax")):
        with pytest.raises(CheckpointError, match=r"embed \[53, 24\] cannot be laid out as"):
            read(directory, shardings=uneven)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

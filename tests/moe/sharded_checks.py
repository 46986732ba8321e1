"""Warp decode divided over eight devices, against one: run by test_transforms.py. Prints "ok" for each check."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from support.experts import FORMATS, Shape, random_problem

from north_jax import moe

SHAPE = Shape(6, 3, 8, 512, 1024)

for axis_type in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(axis_type, axis_type))
    for format in FORMATS if axis_type is AxisType.Auto else FORMATS[-1:]:
        problem = random_problem(SHAPE, format, seed=1, absent=0.1)
        whole = moe.warp_decode(*problem.operands(), form="shared")

        run = jax.jit(moe.sharded_warp_decode(mesh, "b", over="outputs", form="shared"))
        out = run(*problem.operands())
        np.testing.assert_array_equal(np.asarray(out), np.asarray(whole))
        assert out.sharding.spec[1] == "b", out.sharding
        print("ok")

        run = jax.jit(moe.sharded_warp_decode(mesh, "b", over="experts", form="shared"))
        out = np.asarray(run(*problem.operands()), np.float32)
        np.testing.assert_allclose(out, np.asarray(whole, np.float32), rtol=2**-7, atol=1e-3)
        print("ok")

# The function itself within a shard_map of the caller: tokens divided, weights everywhere.
mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
problem = random_problem(Shape(16, 3, 8, 64, 32), "bfloat16", seed=2)
rows, none = PartitionSpec("rows"), PartitionSpec()
run = jax.shard_map(
    lambda *operands: moe.warp_decode(*operands, form="shared", dtype=jnp.float32),
    mesh=mesh,
    in_specs=(rows, rows, rows, none, none),
    out_specs=rows,
)
whole = moe.warp_decode(*problem.operands(), form="shared", dtype=jnp.float32)
np.testing.assert_array_equal(np.asarray(jax.jit(run)(*problem.operands())), np.asarray(whole))
print("ok")

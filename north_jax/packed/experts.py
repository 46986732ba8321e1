"""The experts of many tokens: assignments sorted by expert, two grouped products, and a sum a token.

On a Hopper GPU every expert's matrix is streamed once a tile of rows, SwiGLU is fused into the first product, and the
router's weights are applied in the sum, which reads each token's k results in order: deterministic, without atomics.
Elsewhere the methods of `moe` run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..config import Config
from ..kernels.device import multiprocessors, runs_kernels
from ..kernels.grouped_matmul import grouped_matmul
from ..kernels.row_moves import spread_rows, sum_rows
from ..kernels.streamed_matmul import StreamTiling, stream_items, stream_rows, streamed_matmul
from ..kernels.tiling import Tiling
from ..kernels.work_items import sort_rows, sorted_rows, work_items
from ..layers import Array, Params
from ..moe import run_experts


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertTilings:
    """Tilings of the gated product up and of the one down. Both work on the same rows, so `align` is the same."""

    up: Tiling | StreamTiling
    down: Tiling | StreamTiling

    def __post_init__(self) -> None:
        if self.up.align != self.down.align or self.up.rows != self.down.rows or type(self.up) is not type(self.down):
            raise ValueError(f"the tilings differ in their rows: {self}")


_FEW = Tiling(row_warpgroups=1, columns=256, stages=5, align=8)
_MANY = Tiling(row_warpgroups=2, columns=256, stages=4, align=64)
FEW_ROWS = ExpertTilings(_FEW, _FEW)  # limited by the memory that the weights come from: a deep ring, small tiles
MANY_ROWS = ExpertTilings(_MANY, _MANY)  # limited by the tensor cores
_ROWS_PER_EXPERT = 48  # on average, from which on a tile of 128 rows pays


def tilings_for(assignments: int, experts: int) -> ExpertTilings:
    """The measured best for so many assignments of tokens to experts."""
    return FEW_ROWS if assignments < _ROWS_PER_EXPERT * experts else MANY_ROWS


def packed_experts(config: Config, mlp: Params, h: Array, experts: Array, weights: Array, valid: Array) -> Array:
    """Sum of the selected experts' outputs, times their weights, accumulated in float32.

    Args:
      config: the model's configuration.
      mlp: gate_up [E, 2I, D], gate rows first, and down [E, D, I].
      h: [T, D].
      experts: [T, k] int32.
      weights: [T, k] float32.
      valid: [T] bool; the others are padding, for which no expert is computed on a GPU.

    Returns:
      [T, D] in h's dtype; for padding finite where h is.
    """

    def elsewhere(h: Array, experts: Array, weights: Array, valid: Array, gate_up: Array, down: Array) -> Array:
        return run_experts(config, {"gate_up": gate_up, "down": down}, h, experts, weights)

    def on_hopper(h: Array, experts: Array, weights: Array, valid: Array, gate_up: Array, down: Array) -> Array:
        return sorted_experts(h, experts, weights, valid, gate_up, down)

    operands = (h, experts, weights, valid, mlp["gate_up"], mlp["down"])
    if not (applies(h, mlp) and runs_kernels()):
        return elsewhere(*operands)
    return jax.lax.platform_dependent(*operands, cuda=on_hopper, default=elsewhere)


def applies(h: Array, mlp: Params) -> bool:
    """Whether the grouped products take these sizes and types."""
    _, twice, width = mlp["gate_up"].shape
    half = h.dtype in (jnp.bfloat16, jnp.float16) and mlp["gate_up"].dtype == h.dtype
    return half and width % 256 == 0 and twice % 256 == 0


def sorted_experts(
    h: Array,
    experts: Array,
    weights: Array,
    valid: Array,
    gate_up: Array,
    down: Array,
    *,
    tilings: ExpertTilings | None = None,
    moves: bool = False,
    blocks: int | None = None,
    interpret: Any = None,
) -> Array:
    """`packed_experts` by grouped products on a Hopper GPU; operands as there.

    Args:
      h: [T, D].
      experts: [T, k] int32.
      weights: [T, k] float32.
      valid: [T] bool.
      gate_up: [E, 2I, D].
      down: [E, D, I].
      tilings: of the products; by default those for so many assignments.
      moves: whether kernels of ours move the rows, instead of XLA.
      blocks: of the grid; by default one a multiprocessor.
      interpret: `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    tokens, k = experts.shape
    count = gate_up.shape[0]
    tilings = tilings or tilings_for(tokens * k, count)
    blocks = blocks or multiprocessors()
    expert = jnp.where(valid[:, None], experts, count).reshape(-1)
    streamed = isinstance(tilings.up, StreamTiling)
    rows = (stream_rows if streamed else sorted_rows)(tokens * k, count, tilings.up)
    groups, row = sort_rows(expert, count, tilings.up)
    row = jnp.where(expert < count, row, rows)
    if moves:
        x = spread_rows(h, row, rows, interpret=interpret)
    else:
        token = jnp.arange(tokens * k, dtype=jnp.int32) // k
        source = jnp.zeros(rows, jnp.int32).at[row].set(token, mode="drop", unique_indices=True)
        x = h[source]  # [R, D]; a row of no expert holds token 0, and is not read again

    def product(x: Array, matrices: Array, tiling: Tiling | StreamTiling, gated: bool) -> Array:
        if isinstance(tiling, StreamTiling):
            work = stream_items(groups, tiling, rows=rows, columns=matrices.shape[1], blocks=blocks)
            return streamed_matmul(x, matrices, work, tiling, gated=gated, blocks=blocks, interpret=interpret)
        work = work_items(groups, tiling, rows=rows, columns=matrices.shape[1], blocks=blocks // tiling.cluster)
        return grouped_matmul(x, matrices, work, tiling, gated=gated, blocks=blocks, interpret=interpret)

    y = product(product(x, gate_up, tilings.up, True), down, tilings.down, False)  # [R, D]
    if moves:
        return jnp.where(valid[:, None], sum_rows(y, row.reshape(tokens, k), weights, interpret=interpret), 0)
    picked = y[jnp.minimum(row, rows - 1)].reshape(tokens, k, -1)
    weighted = jnp.where(valid[:, None, None], picked.astype(jnp.float32) * weights[..., None], 0)
    return jnp.sum(weighted, axis=1).astype(h.dtype)

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
from ..kernels.placement import Placed, place_rows, places
from ..kernels.row_moves import spread_rows, sum_rows
from ..kernels.tiling import Tiling
from ..kernels.work_items import sort_rows, sorted_rows, work_items
from ..layers import Array, Params
from ..moe import run_experts


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertTilings:
    """Tilings of the gated product up and of the one down. Both work on the same rows, so `align` is the same."""

    up: Tiling
    down: Tiling

    def __post_init__(self) -> None:
        if self.up.align != self.down.align or self.up.rows != self.down.rows:
            raise ValueError(f"the tilings differ in their rows: {self}")


def _both(tiling: Tiling) -> ExpertTilings:
    return ExpertTilings(tiling, tiling)


# Few rows are limited by the memory that the weights come from: small tiles, a deep ring. Many by the tensor cores.
FEW_ROWS = _both(Tiling(row_warpgroups=1, columns=128, stages=8, align=8))
SOME_ROWS = _both(Tiling(row_warpgroups=1, columns=256, stages=5, align=8))
MANY_ROWS = _both(Tiling(row_warpgroups=2, columns=256, stages=4, align=64))
_ROWS = ((32, FEW_ROWS), (256, SOME_ROWS))  # an expert has at most, on average


def tilings_for(assignments: int, experts: int) -> ExpertTilings:
    """The measured best for so many assignments of tokens to experts."""
    return next((tilings for rows, tilings in _ROWS if assignments <= rows * experts), MANY_ROWS)


def packed_experts(
    config: Config,
    mlp: Params,
    h: Array,
    experts: Array,
    weights: Array,
    valid: Array,
    onto: tuple[Array, Array] | None = None,
) -> Array:
    """Sum of the selected experts' outputs, times their weights, accumulated in float32.

    Args:
      config: the model's configuration.
      mlp: gate_up [E, 2I, D], gate rows first, and down [E, D, I].
      h: [T, D].
      experts: [T, k] int32, those of a token distinct.
      weights: [T, k] float32.
      valid: [T] bool; the others are padding, for which no expert is computed on a GPU.
      onto: [T, D] twice; the first is added to every token, the second to those that are valid.

    Returns:
      [T, D] in h's dtype; for padding finite where h is, and the first of `onto` where that is given.
    """
    added = onto or ()

    def elsewhere(
        h: Array, experts: Array, weights: Array, valid: Array, gate_up: Array, down: Array, *onto: Array
    ) -> Array:
        result = run_experts(config, {"gate_up": gate_up, "down": down}, h, experts, weights)
        return onto[0] + jnp.where(valid[:, None], onto[1] + result, 0) if onto else result

    def on_hopper(
        h: Array, experts: Array, weights: Array, valid: Array, gate_up: Array, down: Array, *onto: Array
    ) -> Array:
        return _lowered_once(h, experts, weights, valid, gate_up, down, (onto[0], onto[1]) if onto else None)

    operands = (h, experts, weights, valid, mlp["gate_up"], mlp["down"], *added)
    if not (applies(h, mlp) and runs_kernels()):
        return elsewhere(*operands)
    return jax.lax.platform_dependent(*operands, cuda=on_hopper, default=elsewhere)


def applies(h: Array, mlp: Params) -> bool:
    """Whether the kernels take these sizes and types."""
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
    onto: tuple[Array, Array] | None = None,
    *,
    tilings: ExpertTilings | None = None,
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
      onto: [T, D] twice.
      tilings: of the products; by default those for so many assignments.
      blocks: of the grid; by default one a multiprocessor.
      interpret: `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    tokens, k = experts.shape
    tilings = tilings or tilings_for(tokens * k, gate_up.shape[0])
    blocks = blocks or multiprocessors()
    columns = gate_up.shape[1], down.shape[1]
    x, row, work = _place(h, experts, valid, gate_up.shape[0], tilings, columns, blocks, interpret)
    for matrices, items, tiling, gated in ((gate_up, work[0], tilings.up, True), (down, work[1], tilings.down, False)):
        x = grouped_matmul(x, matrices, items, tiling, gated=gated, blocks=blocks, interpret=interpret)
    return sum_rows(x, row, weights, onto, interpret=interpret)


_lowered_once = jax.jit(sorted_experts)  # for all layers of a program: lowering a kernel takes a second


def _place(
    h: Array,
    experts: Array,
    valid: Array,
    count: int,
    tilings: ExpertTilings,
    columns: tuple[int, int],
    blocks: int,
    interpret: Any,
) -> Placed:
    """Rows at their experts, and who multiplies them: in one kernel for a few tokens, else in several."""
    tokens, k = experts.shape
    rows = sorted_rows(tokens * k, count, tilings.up)
    sizes: dict[str, Any] = {"rows": rows, "columns": columns, "blocks": blocks}
    if tilings.up == tilings.down and places(tokens, count, tilings.up, **sizes):
        return place_rows(h, experts, valid, count, tilings.up, **sizes, interpret=interpret)
    expert = jnp.where(valid[:, None], experts, count).reshape(-1)
    groups, row = sort_rows(expert, count, tilings.up)
    work = tuple(
        work_items(groups, tiling, rows=rows, columns=number, blocks=blocks // tiling.cluster)
        for tiling, number in zip((tilings.up, tilings.down), columns, strict=True)
    )
    return Placed(spread_rows(h, row, rows, interpret=interpret), row, (work[0], work[1]))

"""The experts of many tokens: assignments sorted by expert, two grouped products, and a sum a token.

On a Hopper GPU every expert's matrix is streamed once a tile of rows, SwiGLU is fused into the first product, and the
router's weights are applied in the sum, which reads each token's k results in order: deterministic, without atomics.
Elsewhere the methods of `moe` run.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..config import Config
from ..kernels.device import multiprocessors, runs_kernels
from ..kernels.grouped_matmul import grouped_matmul
from ..kernels.placement import Placed, place_rows, places
from ..kernels.row_moves import spread_rows, sum_rows
from ..kernels.selection import Selected, arrange, select, selects
from ..kernels.tiling import Tiling
from ..kernels.work_items import WorkItems, sort_rows, sorted_rows, work_items
from ..layers import Array, Params
from ..moe import route_logits, run_experts, select_experts


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


def routed_experts(
    config: Config, mlp: Params, h: Array, valid: Array, onto: tuple[Array, Array] | None = None
) -> Array:
    """`packed_experts` of the experts that the router selects: mlp has router [E, D] too.

    On a Hopper GPU many tokens' experts are selected and sorted by kernels (`kernels.selection`).
    """
    logits = route_logits(mlp["router"], h)
    added = onto or ()

    def elsewhere(h: Array, logits: Array, valid: Array, gate_up: Array, down: Array, *onto: Array) -> Array:
        selected = select_experts(config, logits)
        parts = (onto[0], onto[1]) if onto else None
        return packed_experts(config, {"gate_up": gate_up, "down": down}, h, *selected, valid, parts)

    def on_hopper(h: Array, logits: Array, valid: Array, gate_up: Array, down: Array, *onto: Array) -> Array:
        parts = (onto[0], onto[1]) if onto else None
        return _selected_once(h, logits, valid, gate_up, down, parts, selection_of(config))

    operands = (h, logits, valid, mlp["gate_up"], mlp["down"], *added)
    if not (many(config, h, mlp) and runs_kernels()):
        return elsewhere(*operands)
    return jax.lax.platform_dependent(*operands, cuda=on_hopper, default=elsewhere)


def many(config: Config, h: Array, mlp: Params) -> bool:
    """Whether `selected_experts` takes these sizes and types, and there are enough tokens for it."""
    tokens, count = h.shape[0], mlp["router"].shape[0]
    few = tilings_for(tokens * config.num_experts_per_tok, count) is FEW_ROWS
    return not few and selects(tokens, count) and applies(h, mlp)


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
    placed = _place(h, experts, valid, gate_up.shape[0], tilings, columns, blocks, interpret)
    arranged = Arranged(placed.row, placed.x.shape[0], placed.work, tilings, blocks)
    return run_placed(placed.x, arranged, weights, gate_up, down, onto, interpret)


class Selection(NamedTuple):
    """How experts are selected, and their weights."""

    top: int
    softmax: bool
    normalized: bool


def selection_of(config: Config) -> Selection:
    """What the configuration says."""
    softmax = config.expert_selection_fn == "softmax"
    return Selection(config.num_experts_per_tok, softmax, config.norm_topk_prob and not softmax)


def selected_experts(
    h: Array,
    logits: Array,
    valid: Array,
    gate_up: Array,
    down: Array,
    onto: tuple[Array, Array] | None,
    selection: Selection,
    *,
    tilings: ExpertTilings | None = None,
    blocks: int | None = None,
    interpret: Any = None,
) -> Array:
    """`routed_experts` on a Hopper GPU, of so many tokens and experts as `kernels.selection` takes.

    Args:
      h: [T, D].
      logits: [T, E] float32.
      valid: [T] bool.
      gate_up: [E, 2I, D].
      down: [E, D, I].
      onto: [T, D] twice, or None.
      selection: how experts are selected.
      tilings: of the products, the same for both; by default those for so many assignments.
      blocks: of the grid; by default one a multiprocessor.
      interpret: `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    selected, placed = select_rows(logits, valid, gate_up, down, selection, tilings, blocks, interpret)
    x = spread_rows(h, placed.row, placed.rows, interpret=interpret)
    return run_placed(x, placed, selected.weights, gate_up, down, onto, interpret)


class Arranged(NamedTuple):
    """Where rows go, and who multiplies them."""

    row: Array  # [T · k] int32
    rows: int  # of the sorted array
    work: tuple[WorkItems, WorkItems]
    tilings: ExpertTilings
    blocks: int


def select_rows(
    logits: Array,
    valid: Array,
    gate_up: Array,
    down: Array,
    selection: Selection,
    tilings: ExpertTilings | None = None,
    blocks: int | None = None,
    interpret: Any = None,
) -> tuple[Selected, Arranged]:
    """The first half of `selected_experts`, before rows are moved; operands as there."""
    tokens, count = logits.shape
    tilings = tilings or tilings_for(tokens * selection.top, count)
    blocks = blocks or multiprocessors()
    columns = gate_up.shape[1], down.shape[1]
    selected = select(
        logits, valid, selection.top, softmax=selection.softmax, normalized=selection.normalized, interpret=interpret
    )
    clusters = blocks // tilings.up.cluster
    row, work = arrange(selected, tilings.up, columns=columns, blocks=clusters, interpret=interpret)
    rows = sorted_rows(tokens * selection.top, count, tilings.up)
    return selected, Arranged(row, rows, work, tilings, blocks)


def run_placed(
    x: Array,
    arranged: Arranged,
    weights: Array,
    gate_up: Array,
    down: Array,
    onto: tuple[Array, Array] | None,
    interpret: Any = None,
) -> Array:
    """Both products of rows x at their experts, and the sums; the other operands as for `sorted_experts`."""
    row, _, work, tilings, blocks = arranged
    for matrices, items, tiling, gated in ((gate_up, work[0], tilings.up, True), (down, work[1], tilings.down, False)):
        x = grouped_matmul(x, matrices, items, tiling, gated=gated, blocks=blocks, interpret=interpret)
    return sum_rows(x, row, weights, onto, interpret=interpret)


_lowered_once = jax.jit(sorted_experts)  # for all layers of a program: lowering a kernel takes a second
_selected_once = jax.jit(selected_experts, static_argnums=6)


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

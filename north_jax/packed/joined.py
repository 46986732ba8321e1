"""A layer's two branches of many tokens on Hopper, joined: attention's kernel also moves the rows of the experts.

Both branches begin with the same normalised input. Attention is limited by the tensor cores and moving rows by the
memory, so they run at the same time. Where this does not apply, the branches run one after the other.
"""

from __future__ import annotations

from typing import Any

import jax

from ..config import Config
from ..kernels.device import multiprocessors
from ..kernels.paged_attention import Spread, paged_attention_kernel
from ..layers import Array, Params
from . import attention, experts
from .projections import project


def joins(config: Config, q: Array, pages: Array, h: Array, mlp: Params) -> bool:
    """Whether a layer's branches of these sizes and types can be joined on a Hopper GPU."""
    same = q.dtype == h.dtype and h.shape[1] % 256 == 0
    return same and attention.applies(q, pages) and experts.many(config, h, mlp)


def joined(
    config: Config,
    window: int | None,
    q: Array,
    pages: Array,
    table: Array,
    tiles: Array,
    count: Array,
    x: Array,
    h: Array,
    logits: Array,
    valid: Array,
    o: Array,
    gate_up: Array,
    down: Array,
    *,
    tilings: experts.ExpertTilings | None = None,
    blocks: int | None = None,
    interpret: Any = None,
) -> Array:
    """x plus attention plus experts, all of h, on a Hopper GPU.

    Args:
      config: the model's configuration.
      window: keys that a query sees, its own included; None for all before it.
      q: [T, H, d], rotated, not scaled.
      pages: [pages, 2, K, PAGE_SIZE, d].
      table: [N, P] int32.
      tiles: of `query_tiles`.
      count: [1] int32, of the tiles that hold work.
      x: [T, D].
      h: [T, D], normalised.
      logits: [T, E] float32, the router's.
      valid: [T] bool.
      o: [D, H · d].
      gate_up: [E, 2I, D].
      down: [E, D, I].
      tilings: of the products, the same for both; by default those for so many assignments.
      blocks: of the grids; by default one a multiprocessor.
      interpret: `plgpu.InterpretGPUParams()` to run on a CPU.

    Returns:
      [T, D]; x for padding.
    """
    selection = experts.selection_of(config)
    blocks = blocks or multiprocessors()
    selected, arranged = experts.select_rows(logits, valid, gate_up, down, selection, tilings, blocks, interpret)
    mixed, rows = paged_attention_kernel(
        q,
        pages,
        table,
        tiles,
        count,
        window=window,
        blocks=blocks,
        spread=Spread(h, arranged.row, arranged.rows),
        interpret=interpret,
    )
    attended = project(mixed.reshape(x.shape[0], -1), o)
    return experts.run_placed(rows, arranged, selected.weights, gate_up, down, (x, attended), interpret)


joined_once = jax.jit(joined, static_argnums=(0, 1))  # lowered once for all layers of a kind

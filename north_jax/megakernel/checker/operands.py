"""What each operation takes: in which layers it occurs, its weight, its buffers, its rows and columns."""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from ...config import DENSE, SPARSE, Config
from ..abi import PASSES, SAMPLE_BLOCK, Buffer, Field, Opcode, Weight

_B = Buffer


class Place(enum.Enum):
    """Layers that have an operation."""

    FIRST = "the first layer"
    ALL = "a layer"
    DENSE = "a dense layer"
    SPARSE = "an MoE layer"
    HEAD = "the head: the number of layers"
    ANY = "a layer, or the head after the last"

    def holds(self, config: Config) -> np.ndarray:
        """[layers + 1] bool, of every layer and of the head: whether it is such a place."""
        kinds = np.array([*config.mlp_layer_types, ""])
        number, head = np.arange(len(kinds)), kinds == ""
        return {
            Place.FIRST: (number == 0) & ~head,
            Place.ALL: ~head,
            Place.DENSE: kinds == DENSE,
            Place.SPARSE: kinds == SPARSE,
            Place.HEAD: head,
            Place.ANY: number >= 0,
        }[self]


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """What one operation takes.

    Attributes:
      place: the layers that have it.
      weight: kind of its weight.
      buffers: what each buffer field may name.
      whole_batch: whether it must be for all rows, because all must choose the same routing or the same items.
    """

    place: Place
    weight: Weight | None
    buffers: dict[Field, tuple[Buffer, ...]]
    whole_batch: bool = False


def _operands(
    place: Place,
    weight: Weight | None,
    inputs: tuple[Buffer | tuple[Buffer, ...], ...] = (),
    outputs: tuple[Buffer | tuple[Buffer, ...], ...] = (),
    whole_batch: bool = False,
) -> Operands:
    fields = (Field.INPUT, Field.INPUT_2, Field.INPUT_3), (Field.OUTPUT, Field.OUTPUT_2)
    buffers = {
        field: names if isinstance(names, tuple) else (names,)
        for group, given in zip(fields, (inputs, outputs), strict=True)
        for field, names in zip(group, given, strict=False)
    }
    return Operands(place, weight, buffers, whole_batch)


_HIDDEN = (_B.HIDDEN, _B.LOCAL_HIDDEN)
_RESIDUAL = (_B.RESIDUAL, _B.LOCAL_RESIDUAL)
_PARTIALS = (_B.PARTIAL, _B.PARTIAL_STATS)

OPERANDS: dict[Opcode, Operands] = {
    Opcode.EMBED: _operands(Place.FIRST, Weight.EMBED, (), (_RESIDUAL,)),
    Opcode.ADD_RMSNORM: _operands(
        Place.ANY,
        Weight.NORM,
        (_RESIDUAL, (_B.NONE, _B.ATTENTION_OUT), (_B.NONE, _B.MLP_OUT)),
        (_HIDDEN, (_B.NONE, *_RESIDUAL)),
    ),
    Opcode.QKV_PROJ: _operands(Place.ALL, Weight.QKV, (_HIDDEN,), (_B.QKV,)),
    Opcode.ROUTER_GEMM: _operands(Place.SPARSE, Weight.ROUTER, (_HIDDEN,), (_B.ROUTER_LOGITS,)),
    Opcode.ATTN_DECODE: _operands(Place.ALL, None, (_B.QKV,), _PARTIALS, whole_batch=True),
    Opcode.ATTN_DRAIN: _operands(Place.ALL, None, (_B.QKV,), _PARTIALS, whole_batch=True),
    Opcode.ATTN_COMBINE: _operands(Place.ALL, None, _PARTIALS, (_B.ATTENTION,)),
    Opcode.O_PROJ: _operands(Place.ALL, Weight.OUT, (_B.ATTENTION,), (_B.ATTENTION_OUT,)),
    Opcode.FFN_UPGATE_ACT: _operands(Place.DENSE, Weight.GATE_UP, (_HIDDEN,), (_B.DENSE_HIDDEN,)),
    Opcode.FFN_DOWN: _operands(Place.DENSE, Weight.DOWN, (_B.DENSE_HIDDEN,), (_B.MLP_OUT,)),
    Opcode.ROUTER_TOPK: _operands(Place.SPARSE, None, (_B.ROUTER_LOGITS,), (_B.TOPK,)),
    Opcode.ROUTE_FINALIZE: _operands(Place.SPARSE, None, (_B.TOPK,), (_B.ROUTES,), whole_batch=True),
    Opcode.MOE_GATHER: _operands(Place.SPARSE, None, (_B.HIDDEN, _B.ROUTES), (_B.GATHERED,), whole_batch=True),
    Opcode.MOE_UPGATE_ACT: _operands(
        Place.SPARSE, Weight.GATE_UP, (_HIDDEN, _B.ROUTER_LOGITS), (_B.EXPERT_HIDDEN,), whole_batch=True
    ),
    Opcode.MOE_DOWN: _operands(
        Place.SPARSE, Weight.DOWN, (_B.EXPERT_HIDDEN, _B.ROUTER_LOGITS), (_B.MLP_OUT,), whole_batch=True
    ),
    Opcode.MOE_UPGATE_ACT_DRAIN: _operands(
        Place.SPARSE, Weight.GATE_UP, (_B.GATHERED, _B.ROUTES), (_B.EXPERT_HIDDEN,), whole_batch=True
    ),
    Opcode.MOE_DOWN_DRAIN: _operands(
        Place.SPARSE, Weight.DOWN, (_B.EXPERT_HIDDEN, _B.ROUTES), (_B.EXPERT_OUT,), whole_batch=True
    ),
    Opcode.MOE_COMBINE: _operands(Place.SPARSE, None, (_B.EXPERT_OUT, _B.TOPK, _B.ROUTES), (_B.MLP_OUT,)),
    Opcode.LM_HEAD: _operands(Place.HEAD, Weight.EMBED, (_HIDDEN,), (_B.LOGITS, _B.RANGE_BEST)),
    Opcode.SAMPLE_HISTOGRAM: _operands(Place.HEAD, None, (_B.LOGITS, _B.RANGE_BEST), (_B.SEARCH,)),
    Opcode.SAMPLE_MASS: _operands(Place.HEAD, None, (_B.LOGITS, _B.RANGE_BEST, _B.SEARCH), (_B.MASS,)),
    Opcode.SAMPLE_DRAW: _operands(Place.HEAD, None, (_B.LOGITS, _B.RANGE_BEST, _B.MASS), (_B.SEARCH,)),
    Opcode.END_STEP: _operands(Place.ANY, None),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a model at a batch size, by the letters of DESIGN.md."""

    batch: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_width: int
    dense_width: int
    vocabulary: int
    splits: int  # parts of ATTENTION_OUT
    ranges: int  # of RANGE_BEST and SEARCH

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def ranks(self) -> int:
        """Experts that may be active at once."""
        return min(self.experts, self.batch * self.top_k)

    @property
    def assignments(self) -> int:
        """Experts of all rows together."""
        return self.batch * self.top_k

    @property
    def blocks(self) -> int:
        """Entries of a row of MASS."""
        return -(-self.vocabulary // SAMPLE_BLOCK)

    def rows(self, opcode: Opcode) -> int:
        """What ROW_BEGIN and ROW_COUNT count of."""
        return {
            Opcode.QKV_PROJ: (self.heads + 2 * self.kv_heads) * self.head_dim,
            Opcode.ROUTER_GEMM: self.experts,
            Opcode.ATTN_COMBINE: self.heads,
            Opcode.O_PROJ: self.hidden,
            Opcode.FFN_UPGATE_ACT: self.dense_width,
            Opcode.FFN_DOWN: self.hidden,
            Opcode.MOE_GATHER: self.assignments,
            Opcode.MOE_UPGATE_ACT: self.expert_width,
            Opcode.MOE_DOWN: self.hidden,
            Opcode.MOE_UPGATE_ACT_DRAIN: self.expert_width,
            Opcode.MOE_DOWN_DRAIN: self.hidden,
            Opcode.MOE_COMBINE: self.hidden,
            Opcode.LM_HEAD: self.vocabulary,
            Opcode.SAMPLE_HISTOGRAM: self.vocabulary,
            Opcode.SAMPLE_MASS: self.vocabulary,
        }[opcode]

    def columns(self, opcode: Opcode) -> int:
        """Input columns of an operation that has K slices."""
        return {Opcode.O_PROJ: self.heads * self.head_dim, Opcode.FFN_DOWN: self.dense_width}[opcode]

    def extent(self, buffer: Buffer) -> tuple[int, int]:
        """Rows and columns of a buffer as the checker counts them.

        Rows are those of the batch where it has them. Parts of ATTENTION_OUT lie side by side; an entry of TOPK, the
        entries of a range in RANGE_BEST, the routes and an assignment are one column each. A column of SEARCH is what a
        range does for a pass: its state, and its part of the histogram's sums.
        """
        columns = {
            Buffer.RESIDUAL: self.hidden,
            Buffer.HIDDEN: self.hidden,
            Buffer.LOCAL_RESIDUAL: self.hidden,
            Buffer.LOCAL_HIDDEN: self.hidden,
            Buffer.QKV: self.rows(Opcode.QKV_PROJ),
            Buffer.ROUTER_LOGITS: self.experts,
            Buffer.PARTIAL: self.kv_heads,
            Buffer.PARTIAL_STATS: self.kv_heads,
            Buffer.ATTENTION: self.heads * self.head_dim,
            Buffer.ATTENTION_OUT: self.splits * self.hidden,
            Buffer.DENSE_HIDDEN: self.dense_width,
            Buffer.MLP_OUT: self.hidden,
            Buffer.LOGITS: self.vocabulary,
            Buffer.RANGE_BEST: self.ranges,
            Buffer.SEARCH: PASSES * self.ranges,
            Buffer.MASS: self.blocks,
            Buffer.GATHERED: self.assignments,
        }
        rows = 1 if buffer in (Buffer.ROUTES, Buffer.GATHERED, Buffer.EXPERT_HIDDEN, Buffer.EXPERT_OUT) else self.batch
        return rows, columns.get(buffer, 1)

"""Where a step's activations lie: the workspace in global memory, and what an SM keeps in shared memory."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from ..config import DENSE, SPARSE, Config
from .abi import (
    MASS_WORDS,
    MAX_LOGPROBS,
    MAX_SPLITS,
    PASS_BITS,
    PASSES,
    SAMPLE_BLOCK,
    SEARCH_WORDS,
    Buffer,
)
from .division import routes_size

_ALIGNMENT = 256  # bytes between buffers
LOCAL = frozenset({Buffer.LOCAL_RESIDUAL, Buffer.LOCAL_HIDDEN})  # one copy an SM, in shared memory on a GPU
# What SMs publish for all others in every layer. The pipelined kernel (csrc/megakernel/pipeline/exchange.cuh) clears it
# before it is written, and so needs a plane a layer, and as many again for every other step.
EXCHANGED = frozenset({Buffer.QKV, Buffer.ROUTER_LOGITS, Buffer.EXPERT_HIDDEN, Buffer.ATTENTION_OUT, Buffer.MLP_OUT})
EXCHANGED_BATCH = 8  # rows that the pipelined kernel takes


@dataclasses.dataclass(frozen=True, slots=True)
class BufferSpec:
    """One buffer: `planes` copies of `shape`; layer l uses plane l mod planes. LOCAL buffers have that for each SM."""

    shape: tuple[int, ...]
    dtype: np.dtype
    planes: int

    @property
    def plane_bytes(self) -> int:
        """Bytes of one plane."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Workspace:
    """All buffers of a schedule, and the byte offset of each from the workspace's start."""

    buffers: dict[Buffer, BufferSpec]
    offsets: dict[Buffer, int]
    bytes: int


def workspace(
    config: Config, *, batch: int, sms: int, dtype: np.dtype, planes: int, splits: int, ranges: int
) -> Workspace:
    """Lays out the buffers of a batch.

    Args:
      config: the model's configuration.
      batch: rows.
      sms: SMs, for the buffers that each has.
      dtype: of the weights, and so of what is multiplied with them.
      planes: copies of each buffer between layers; those that are exchanged have more.
      splits: parts of ATTENTION_OUT.
      ranges: parts of the vocabulary that the tasks of LM_HEAD and of sampling divide.
    """
    b, d_model, k = batch, config.hidden_size, config.num_experts_per_tok
    heads, kv, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    group = config.queries_per_kv_head
    f32, i32, t = np.dtype(np.float32), np.dtype(np.int32), np.dtype(dtype)
    shapes: dict[Buffer, tuple[tuple[int, ...], np.dtype]] = {
        Buffer.RESIDUAL: ((b, d_model), f32),
        Buffer.HIDDEN: ((b, d_model), t),
        Buffer.LOCAL_RESIDUAL: ((b, d_model), f32),
        Buffer.LOCAL_HIDDEN: ((b, d_model), t),
        Buffer.QKV: ((b, (heads + 2 * kv) * d), t),
        Buffer.PARTIAL: ((b, kv, MAX_SPLITS, group, d), f32),
        Buffer.PARTIAL_STATS: ((b, kv, MAX_SPLITS, group, 2), f32),
        Buffer.ATTENTION: ((b, heads * d), t),
        Buffer.ATTENTION_OUT: ((splits, b, d_model), f32),
        Buffer.MLP_OUT: ((b, d_model), f32),
        Buffer.LOGITS: ((b, config.vocab_size), f32),
        Buffer.RANGE_BEST: ((b, ranges, MAX_LOGPROBS, 2), i32),
        Buffer.SEARCH: ((b, PASSES * (2 * 2**PASS_BITS + SEARCH_WORDS)), i32),
        Buffer.MASS: ((b, -(-config.vocab_size // SAMPLE_BLOCK), MASS_WORDS), i32),
    }
    if DENSE in config.mlp_layer_types:
        shapes[Buffer.DENSE_HIDDEN] = ((b, config.dense_intermediate_size), t)
    if SPARSE in config.mlp_layer_types:
        width, experts = config.intermediate_size, config.num_experts
        shapes |= {
            Buffer.ROUTER_LOGITS: ((b, experts), f32),
            Buffer.EXPERT_HIDDEN: ((b * k, width), t),
            Buffer.TOPK: ((b, k, 2), i32),
            Buffer.ROUTES: ((routes_size(experts, b * k),), i32),
            Buffer.GATHERED: ((b * k, d_model), t),
            Buffer.EXPERT_OUT: ((b * k, d_model), f32),
        }
    head = {Buffer.LOGITS, Buffer.RANGE_BEST, Buffer.SEARCH, Buffer.MASS}

    def copies(name: Buffer) -> int:
        if name in EXCHANGED and batch <= EXCHANGED_BATCH:
            return 2 * config.num_hidden_layers
        return 1 if name in head | LOCAL else planes

    buffers = {name: BufferSpec(*shapes[name], copies(name)) for name in sorted(shapes)}
    offsets: dict[Buffer, int] = {}
    end = 0
    for name, spec in buffers.items():
        offsets[name] = end
        size = spec.plane_bytes * spec.planes * (sms if name in LOCAL else 1)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return Workspace(buffers, offsets, end)


def activation_type(dtype: jnp.dtype | str) -> np.dtype:
    """The type of activations beside weights of `dtype`. Raises ValueError for one that the kernels do not read."""
    kind = np.dtype(jnp.dtype(dtype))
    if kind not in (np.dtype(jnp.bfloat16), np.dtype(np.float32)):
        raise ValueError(f"the megakernel runs bfloat16 and float32 weights, not {kind}")
    return kind

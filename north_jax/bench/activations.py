"""What one decode step leaves of its last layer in the buffers of the workspace."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from north_jax.config import DENSE, Config
from north_jax.megakernel.abi import Buffer, Field, Opcode
from north_jax.megakernel.decoder import MegakernelDecoder
from north_jax.megakernel.schedule import Schedule

from .shared_pages import Row

EXECUTOR, PLAIN, PIPELINED = "executor", "plain", "pipelined"


@dataclasses.dataclass(frozen=True)
class Activations:
    """Buffers after a step of B rows through n layers. "T" is the type of the weights.

    Attributes:
      kernel: what ran: EXECUTOR, PLAIN or PIPELINED.
      tokens: [B] int32, what the step was fed.
      positions: [B] int32.
      residual: [B, D], the last layer's input: float32 where the step keeps it, else in float64 what is left of
        `residual_out` without the layer's outputs.
      hidden: [B, D] T, the normalised input; None where each SM has its own, which the pipelined kernel does not store.
      qkv: [B, (H + 2K)·d] T.
      partial: [B, K, MAX_SPLITS, H/K, d] float32.
      stats: [B, K, MAX_SPLITS, H/K, 2] float32.
      attention: [B, H·d] T.
      attention_out: float64 [B, D], the sum of the parts.
      router_logits: [B, E] float32; None in a dense layer.
      mlp_hidden: [B, F] or [B, k, I] T.
      mlp_out: [B, D] float32.
      added: float64 [B, D] each, what attention and MLP have added, in order: of all layers, to the embedding, where
        the residual stream is the SMs' own, and of the last one, to `residual`, where it is not; None where the former
        is not to be seen any more.
      residual_out: [copies, B, D] float32, the last layer's output; a copy for each SM where each norms for itself.
      hidden_out: [B, D] T, the head's input; None as `hidden`.
      logits: [B, V] float32.
      written: [B, 2 (k, v), K, d] float32, what the layer's pages hold of the new tokens.
    """

    kernel: str
    tokens: np.ndarray
    positions: np.ndarray
    residual: np.ndarray
    hidden: np.ndarray | None
    qkv: np.ndarray
    partial: np.ndarray
    stats: np.ndarray
    attention: np.ndarray
    attention_out: np.ndarray
    router_logits: np.ndarray | None
    mlp_hidden: np.ndarray
    mlp_out: np.ndarray
    added: tuple[np.ndarray, ...] | None
    residual_out: np.ndarray
    hidden_out: np.ndarray | None
    logits: np.ndarray
    written: np.ndarray

    @property
    def base(self) -> float:
        """Of the exponential whose exponents `stats` holds."""
        return 2.0 if self.kernel == PIPELINED else math.e


def read(
    config: Config, decoder: MegakernelDecoder, rows: Sequence[Row], written: np.ndarray, *, on_gpu: bool
) -> Activations:
    """Reads the buffers of the step that `decoder` has just run.

    Args:
      config: the decoder's model, whose last layer is looked at.
      decoder: has run one step of `rows`, in this order.
      rows: one token each.
      written: float32 [B, 2, K, d], of the last layer's pages.
      on_gpu: whether a kernel ran, not the CPU executor.
    """
    batch, layers, last = len(rows), config.num_hidden_layers, config.num_hidden_layers - 1
    schedule = decoder.schedule_of(batch, max(row.context for row in rows) + 1)

    def seen(buffer: Buffer, layer: int = last) -> np.ndarray:
        return decoder.activations(buffer, layer)[:batch]

    def sums(layer: int) -> tuple[np.ndarray, np.ndarray]:
        """What attention and MLP of a layer add, float64 [B, D] each."""
        parts = decoder.activations(Buffer.ATTENTION_OUT, layer)[:, :batch]
        return parts.sum(axis=0, dtype=np.float64), seen(Buffer.MLP_OUT, layer).astype(np.float64)

    attention_out, mlp_out = sums(last)
    added: tuple[np.ndarray, ...] | None = (attention_out, mlp_out)
    hidden = hidden_out = None
    if _norms_locally(schedule):
        all_there = layers <= schedule.workspace.buffers[Buffer.MLP_OUT].planes
        added = tuple(branch for layer in range(layers) for branch in sums(layer)) if all_there else None
        residual_out = decoder.activations(Buffer.LOCAL_RESIDUAL, layers)[:, :batch]
        residual = residual_out[0].astype(np.float64) - attention_out - mlp_out
    else:
        residual_out, residual = seen(Buffer.RESIDUAL, layers)[None], seen(Buffer.RESIDUAL)
        hidden, hidden_out = seen(Buffer.HIDDEN), seen(Buffer.HIDDEN, layers)
    dense = config.mlp_layer_types[last] == DENSE
    experts_shape = (-1, config.num_experts_per_tok, config.intermediate_size)
    plain = (schedule.batch, schedule.order) in decoder.not_pipelined()
    return Activations(
        kernel=(PLAIN if plain else PIPELINED) if on_gpu else EXECUTOR,
        tokens=np.array([row.token for row in rows], np.int32),
        positions=np.array([row.context for row in rows], np.int32),
        residual=residual,
        hidden=hidden,
        qkv=seen(Buffer.QKV),
        partial=seen(Buffer.PARTIAL),
        stats=seen(Buffer.PARTIAL_STATS),
        attention=seen(Buffer.ATTENTION),
        attention_out=attention_out,
        router_logits=None if dense else seen(Buffer.ROUTER_LOGITS),
        mlp_hidden=(
            seen(Buffer.DENSE_HIDDEN)
            if dense
            else decoder.activations(Buffer.EXPERT_HIDDEN, last).reshape(experts_shape)[:batch]
        ),
        mlp_out=seen(Buffer.MLP_OUT),
        added=added,
        residual_out=residual_out,
        hidden_out=hidden_out,
        logits=decoder.logits(),
        written=written,
    )


def _norms_locally(schedule: Schedule) -> bool:
    """Whether every SM has the residual stream and its norm for itself."""
    norms = schedule.tasks[:, Field.OPCODE] == Opcode.ADD_RMSNORM
    return bool(np.any(norms & (schedule.tasks[:, Field.OUTPUT] == Buffer.LOCAL_HIDDEN)))

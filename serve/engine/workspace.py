"""What a server needs on the device besides weights and pages: an upper bound, from sizes alone.

It is needed before anything is compiled, so it counts arrays instead of asking XLA. Each bound is of the largest
moment of its kind; they never come together, but what they leave behind is not given back at once either, so a start
plans with the larger of the two calls, prefill and decode, and both draws.
"""

from __future__ import annotations

from north_jax.config import DENSE, SPARSE, Config

_FLOAT32 = 4
_TILE_ROWS = 64  # rows of an expert's tile: sorted assignments are padded to it
_DRAW_COPIES = 16  # of the logits in float32, while a draw sorts them
_MEGAKERNEL_ROW = 3 << 20  # bytes of activations and of a row's sampling, besides its logits
_ALWAYS = 2 << 30  # small arrays, trials while programs are compiled, what an allocator cannot use of its gaps


def workspace_bytes(config: Config, *, chunk: int, slots: int, backend: str, itemsize: int) -> int:
    """Bytes for prefill, decode and draws.

    Args:
      config: the model's configuration.
      chunk: prompt tokens of a prefill, at most.
      slots: rows that decode together.
      backend: what decodes.
      itemsize: bytes of a weight.
    """
    calls = max(prefill_bytes(config, chunk, itemsize), decode_bytes(config, slots, backend, itemsize))
    return calls + draw_bytes(config, slots) + _ALWAYS


def prefill_bytes(config: Config, chunk: int, itemsize: int) -> int:
    """Bytes of a layer's arrays over a chunk: the residual, queries, keys, values, and the experts' rows."""
    d_model, d = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    token = 4 * d_model + 2 * (heads + 2 * kv_heads) * d + 2 * heads * d
    if DENSE in config.mlp_layer_types:
        token += 3 * config.dense_intermediate_size
    total = token * itemsize * chunk
    if SPARSE in config.mlp_layer_types:
        assignments = chunk * config.num_experts_per_tok
        rows = assignments + config.num_experts * _TILE_ROWS
        # Gathered tokens, hidden units and outputs by sorted row; outputs by token, also in float32.
        total += rows * (2 * d_model + config.intermediate_size) * itemsize
        total += assignments * d_model * (itemsize + _FLOAT32)
    return total


def decode_bytes(config: Config, slots: int, backend: str, itemsize: int) -> int:
    """Bytes of a decode step: in JAX without kernels each row gathers its experts' matrices."""
    if backend == "megakernel":
        return slots * (_MEGAKERNEL_ROW + 2 * config.vocab_size * _FLOAT32)
    if backend == "warp" or SPARSE not in config.mlp_layer_types:
        return 0
    matrices = 3 * config.intermediate_size * config.hidden_size * itemsize
    return min(slots * config.num_experts_per_tok, config.num_experts) * matrices


def draw_bytes(config: Config, slots: int) -> int:
    """Bytes of a draw over all slots."""
    return _DRAW_COPIES * slots * config.vocab_size * _FLOAT32


def loading_bytes(config: Config, itemsize: int) -> int:
    """Bytes beside the weights while they are loaded or drawn: the largest matrix in float32, and as it will be."""
    largest = config.vocab_size * config.hidden_size
    if SPARSE in config.mlp_layer_types:
        largest = max(largest, config.num_experts * 2 * config.intermediate_size * config.hidden_size)
    return largest * (_FLOAT32 + itemsize)

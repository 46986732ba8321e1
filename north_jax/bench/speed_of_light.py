"""The least that a decode step must read, and how long the memory takes for it."""

from __future__ import annotations

from collections.abc import Sequence

from north_jax.config import DENSE, Config

BANDWIDTH = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12}  # bytes per second, of the data sheets


def weight_bytes(config: Config, distinct_experts: float, *, itemsize: int = 2) -> float:
    """Bytes of the weights that a step needs.

    Args:
      config: the model's configuration.
      distinct_experts: mean over the layers with experts; rows share an expert's weights.
      itemsize: bytes of a weight.
    """
    d_model, d = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dense = config.mlp_layer_types.count(DENSE)
    sparse = config.num_hidden_layers - dense
    attention = (2 * heads + 2 * kv_heads) * d * d_model
    every_layer = attention + d_model
    dense_layer = 3 * config.dense_intermediate_size * d_model
    sparse_layer = (config.num_experts + distinct_experts * 3 * config.intermediate_size) * d_model
    ends = config.vocab_size * d_model + d_model
    return itemsize * (config.num_hidden_layers * every_layer + dense * dense_layer + sparse * sparse_layer + ends)


def kv_bytes(config: Config, contexts: Sequence[float], *, itemsize: int = 2) -> float:
    """Bytes of keys and values that a step reads, for rows that hold these contexts, in positions."""
    position = 2 * config.num_key_value_heads * config.head_dim * itemsize
    windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
    return position * sum(min(context, window or context) for context in contexts for window in windows)

"""What several tests share: tiny models."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from north_jax.config import Config
from north_jax.layers import Params
from north_jax.model import init_params

# North's pattern in small: layer 0 dense and full with RoPE, then three sliding layers to a full one without.
RAW_CONFIG: dict[str, Any] = {
    "model_type": "cohere2_moe",
    "vocab_size": 199,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 16,
    "prefix_dense_intermediate_size": 48,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_selection_fn": "sigmoid",
    "norm_topk_prob": False,
    "first_k_dense_replace": 1,
    "sliding_window": 70,
    "rope_theta": 50000,
    "rms_norm_eps": 1e-6,
    "logit_scale": 1.0,
    "max_position_embeddings": 1024,
    "eos_token_id": 3,
    "bos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_config(**changes: Any) -> Config:
    """A model small enough to compile in a second; `changes` replace fields of its config.json."""
    return Config.from_dict(RAW_CONFIG | changes)


def tiny_params(config: Config, seed: int = 0, dtype: Any = jnp.float32) -> Params:
    """Random parameters with some life in attention and routing."""
    params = init_params(config, jax.random.key(seed), dtype)
    return jax.tree.map(lambda a: a * jnp.asarray(1.5, dtype) if a.ndim > 1 else a, params)

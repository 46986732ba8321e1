"""A tiny model whose dimensions all differ, and its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from north_jax.checkpoint import write_random_checkpoint
from north_jax.config import Config
from north_jax.layers import Params


@pytest.fixture(scope="session")
def config() -> Config:
    return Config.from_dict(
        {
            "model_type": "cohere2_moe",
            "vocab_size": 53,
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 10,
            "intermediate_size": 14,
            "prefix_dense_intermediate_size": 20,
            "first_k_dense_replace": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "sliding_window": 8,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "logit_scale": 1.0,
        }
    )


@pytest.fixture(scope="session")
def pristine(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 checkpoint in one file. Not to be written to."""
    path = tmp_path_factory.mktemp("pristine") / "checkpoint"
    write_random_checkpoint(path, config)
    return path


@pytest.fixture(scope="session")
def same_bits() -> Callable[[Params, Params], bool]:
    """Whether two trees have the same keys, and arrays of the same types, shapes and bits."""

    def compare(a: Params, b: Params) -> bool:
        if jax.tree.structure(a) != jax.tree.structure(b):
            return False
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return all(
            (x.dtype, x.shape, np.asarray(x).tobytes()) == (y.dtype, y.shape, np.asarray(y).tobytes()) for x, y in pairs
        )

    return compare

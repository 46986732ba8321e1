"""The table of tensors: it fits the params tree, fills it exactly once, and counts as the published checkpoint does."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from north_jax.checkpoint.layout import parameters
from north_jax.checkpoint.tree import leaves
from north_jax.config import Config
from north_jax.model import param_shapes

PUBLISHED = Config.from_dict(
    {
        "model_type": "cohere2_moe",
        "vocab_size": 262144,
        "hidden_size": 2048,
        "num_hidden_layers": 49,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 768,
        "prefix_dense_intermediate_size": 3072,
        "first_k_dense_replace": 1,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000,
    }
)

# Names that make `parameters` expect layer 1 in each form, and the tensors that its experts then are.
FORMS = {
    "one tensor per expert": ((), 3 * 5),
    "stacked": (("model.layers.1.mlp.experts.gate_up_proj",), 2),
    "switch_mlp": (("model.layers.1.mlp.switch_mlp.up_proj.weight",), 3),
}


def test_paths_and_shapes_are_those_of_the_model(config: Config) -> None:
    shapes = {path: leaf.shape for path, leaf in leaves(param_shapes(config))}
    assert {parameter.path: parameter.shape for parameter in parameters(config)} == shapes


@pytest.mark.parametrize(("names", "tensors"), FORMS.values(), ids=FORMS.keys())
def test_pieces_fill_every_element_exactly_once(config: Config, names: tuple[str, ...], tensors: int) -> None:
    for parameter in parameters(config, names):
        filled = np.zeros(parameter.shape, int)
        for piece in parameter.pieces:
            assert math.prod(piece.block) == math.prod(piece.shape)
            filled[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.block, strict=True))] += 1
        np.testing.assert_array_equal(filled, 1, parameter.name)
    experts = [
        p for p in parameters(config, names) if p.path[:2] == ("layers", 1) and p.path[-1] in ("gate_up", "down")
    ]
    assert sum(len(parameter.pieces) for parameter in experts) == tensors


def test_counts_of_the_published_checkpoint() -> None:
    table = list(parameters(PUBLISHED))
    assert sum(len(parameter.pieces) for parameter in table) == 18_730
    assert sum(math.prod(parameter.shape) for parameter in table) == 30_484_303_872
    assert len(table) == len(jax.tree.leaves(param_shapes(PUBLISHED)))

"""Mistakes that keep every shape, planted one at a time: the comparison with the golden files must see each of them.

`test_golden.py` allows an error of `TOLERANCE`; a planted mistake must exceed a hundred times that. Mistakes are
planted where they would be made: in the configuration as read, in a function of the model, or in how the checkpoint's
tensors become parameters. `test_window_4096.py` repeats the mistakes about the window at North's own size.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import north_jax
from north_jax import layers, model
from north_jax.checkpoint import CheckpointError
from north_jax.config import FULL, SLIDING, SPARSE, Config
from north_jax.layers import Array, Params, contract, norm
from north_jax.model import attend, feed_forward
from tests.golden.compare import TOLERANCE, Golden, error, golden

VISIBLE = 100 * TOLERANCE
forward_module = importlib.import_module("north_jax.forward_pass")  # the package's attribute of that name is a function

type Patch = pytest.MonkeyPatch
type Plant = Callable[[Patch, Golden], tuple[Config, Params]]  # the configuration and parameters to run with


@dataclass(frozen=True)
class Mistake:
    name: str
    variant: str  # whose golden files must see it
    plant: Plant


# Planted in the configuration.


def config_says(**changes: Any) -> Plant:
    return lambda _, g: (dataclasses.replace(g.config, **changes), g.params)


def window_off_by(step: int) -> Plant:
    return lambda _, g: (dataclasses.replace(g.config, sliding_window=g.config.sliding_window + step), g.params)


def layer_types(change: Callable[[Config], list[str]]) -> Plant:
    return lambda _, g: (dataclasses.replace(g.config, layer_types=tuple(change(g.config))), g.params)


def rope_on(change: Callable[[Config], list[bool]]) -> Plant:
    def plant(patch: Patch, g: Golden) -> tuple[Config, Params]:
        rotating = tuple(change(g.config))
        assert rotating != g.config.rope_layers
        patch.setattr(Config, "rope_layers", rotating)
        return g.config, g.params

    return plant


# Planted in a function.


def function(module: Any, name: str, replacement: Callable[..., Any]) -> Plant:
    def plant(patch: Patch, g: Golden) -> tuple[Config, Params]:
        patch.setattr(module, name, replacement)
        return g.config, g.params

    return plant


def half_split_rotate(config: Config, x: Array, positions: Array) -> Array:
    """Pairs (i, i + d/2): the convention of most other models."""
    d = config.head_dim
    angle = positions[..., None, None] * config.rope_theta ** (-jnp.arange(0, d, 2) / d)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def scaled_embed(params: Params, tokens: Array) -> Array:
    return params["embed"][tokens] * params["embed"].shape[1] ** 0.5


def sequential_block(
    config: Config, layer: int, params: Params, x: Array, positions: Array, method: Any, tap: Any
) -> Array:
    """Attention first, then the MLP on the normalised sum."""
    x = x + attend(config, layer, params, norm(config, x, params["norm"]), positions)
    return x + feed_forward(config, layer, params["mlp"], norm(config, x, params["norm"]), method)


def softmax_over_all(config: Config, router: Array, h: Array) -> tuple[Array, Array, Array]:
    """Softmax before the selection instead of over the selected logits."""
    logits = contract("...d,ed->...e", h, router)
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), config.num_experts_per_tok)
    return experts, weights, logits


def embedding_as_hidden(config: Config, params: Params, x: Array) -> Array:
    """The head without the final norm."""
    return contract("...i,vi->...v", x, params["embed"]) * config.logit_scale


# Planted in the parameters.


def parameters(change: Callable[[Config, Params], None]) -> Plant:
    """`change` edits a copy of the tree in place."""

    def plant(_: Patch, g: Golden) -> tuple[Config, Params]:
        params = jax.tree.map(lambda array: array, g.params)
        change(g.config, params)
        return g.config, params

    return plant


def qkv_in_order(order: Callable[[Config], list[np.ndarray]]) -> Plant:
    """The heads of each layer's fused projection, in another order."""

    def change(config: Config, params: Params) -> None:
        heads = np.concatenate(order(config))
        for layer in params["layers"].values():
            by_head = layer["qkv"].reshape(-1, config.head_dim, config.hidden_size)
            assert sorted(heads) == list(range(len(by_head)))
            layer["qkv"] = by_head[heads].reshape(layer["qkv"].shape)

    return parameters(change)


def heads_of(config: Config) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Head numbers of queries, keys and values within the fused projection."""
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    return np.split(np.arange(queries + 2 * keys), [queries, queries + keys])


def values_before_keys(config: Config) -> list[np.ndarray]:
    q, k, v = heads_of(config)
    return [q, v, k]


def qkv_per_kv_head(config: Config) -> list[np.ndarray]:
    """The rows as if on disk each KV head stood behind its own query heads."""
    q, k, v = heads_of(config)
    groups = np.split(q, config.num_key_value_heads)
    return [part for group, key, value in zip(groups, k, v, strict=True) for part in (group, [key], [value])]


def queries_dealt_round_robin(config: Config, params: Params) -> None:
    """Query head h reads KV head h mod K instead of h div (H/K); every head's output keeps its column."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dealt = np.arange(heads).reshape(-1, kv_heads).T.reshape(-1)  # position in the grouped order -> head
    for layer in params["layers"].values():
        q, kv = jnp.split(layer["qkv"], [heads * config.head_dim])
        q = q.reshape(heads, config.head_dim, -1)[dealt].reshape(q.shape)
        o = layer["o"].reshape(-1, heads, config.head_dim)[:, dealt].reshape(layer["o"].shape)
        layer["qkv"], layer["o"] = jnp.concatenate([q, kv]), o


def up_before_gate(config: Config, params: Params) -> None:
    for layer in params["layers"].values():
        gate, up = jnp.split(layer["mlp"]["gate_up"], 2, axis=-2)
        layer["mlp"]["gate_up"] = jnp.concatenate([up, gate], axis=-2)


def gate_and_up_interleaved(config: Config, params: Params) -> None:
    for layer in params["layers"].values():
        halves = jnp.stack(jnp.split(layer["mlp"]["gate_up"], 2, axis=-2), axis=-2)  # [..., I, 2, D]
        layer["mlp"]["gate_up"] = halves.reshape(layer["mlp"]["gate_up"].shape)


def experts_shifted(config: Config, params: Params) -> None:
    """Each expert's weights in its neighbour's place."""
    for layer in params["layers"].values():
        if "router" in layer["mlp"]:
            layer["mlp"] |= {name: jnp.roll(layer["mlp"][name], 1, axis=0) for name in ("gate_up", "down")}


def norm_weight_plus_one(config: Config, params: Params) -> None:
    for layer in params["layers"].values():
        layer["norm"] = layer["norm"] + 1


def layer_0_as_moe(patch: Patch, g: Golden) -> tuple[Config, Params]:
    """The dense MLP cut into experts of equal width, chosen by a router; the layer keeps its rotation."""
    patch.setattr(Config, "rope_layers", g.config.rope_layers)
    config = dataclasses.replace(g.config, mlp_layer_types=(SPARSE,) * g.config.num_hidden_layers)
    params = jax.tree.map(lambda array: array, g.params)
    dense, experts = params["layers"][0]["mlp"], config.num_experts
    gate, up = jnp.split(dense["gate_up"].reshape(2 * experts, -1, config.hidden_size), 2)
    params["layers"][0]["mlp"] = {
        "router": params["layers"][1]["mlp"]["router"],
        "gate_up": jnp.concatenate([gate, up], axis=1),
        "down": jnp.moveaxis(dense["down"].reshape(config.hidden_size, experts, -1), 1, 0),
    }
    return config, params


MISTAKES = [
    Mistake("no RoPE on layer 0", "north", rope_on(lambda c: [False, *c.rope_layers[1:]])),
    Mistake("RoPE on the NoPE layers", "north", rope_on(lambda c: [True] * c.num_hidden_layers)),
    Mistake(
        "RoPE on full layers of a patterned prefix",
        "prefix_sliding",
        config_says(prefix_dense_sliding_window_pattern=1),
    ),
    Mistake("half-split RoPE", "north", function(layers, "rotate", half_split_rotate)),
    Mistake("RoPE's default base", "north", config_says(rope_theta=10000.0)),
    Mistake("the base beside rope_parameters", "top1", config_says(rope_theta=10000.0)),
    Mistake("top-k renormalised", "north", config_says(norm_topk_prob=True)),
    Mistake("top-k not renormalised", "renormalised", config_says(norm_topk_prob=False)),
    Mistake("softmax instead of sigmoid", "north", config_says(expert_selection_fn="softmax")),
    Mistake("sigmoid instead of softmax", "softmax", config_says(expert_selection_fn="sigmoid", norm_topk_prob=False)),
    Mistake("normalised sigmoid instead of softmax", "softmax", config_says(expert_selection_fn="sigmoid")),
    Mistake("softmax over all experts", "softmax", function(model, "route", softmax_over_all)),
    Mistake("one expert too many", "north", config_says(num_experts_per_tok=3)),
    Mistake("LayerNorm for RMSNorm", "north", config_says(norm_type="layer")),
    Mistake("RMSNorm for LayerNorm", "layer_norm", config_says(norm_type="rms")),
    Mistake("norm weights counted from one", "north", parameters(norm_weight_plus_one)),
    Mistake("no final norm", "north", function(forward_module, "head", embedding_as_hidden)),
    Mistake("a window one short", "north", window_off_by(-1)),
    Mistake("a window one long", "north", window_off_by(1)),
    Mistake("the window ignored", "north", window_off_by(10**6)),
    Mistake("the window on every layer", "north", layer_types(lambda c: [SLIDING] * c.num_hidden_layers)),
    Mistake("the pattern counted from layer 0", "north", layer_types(lambda c: [SLIDING] * 3 + [FULL, SLIDING])),
    Mistake("layer 0 as MoE", "north", layer_0_as_moe),
    Mistake("embeddings scaled", "north", function(forward_module, "embed", scaled_embed)),
    Mistake("attention before the MLP", "north", function(forward_module, "block", sequential_block)),
    Mistake("logit_scale left out", "renormalised", config_says(logit_scale=1.0)),
    Mistake("values before keys", "north", qkv_in_order(values_before_keys)),
    Mistake("fused rows per KV head", "north", qkv_in_order(qkv_per_kv_head)),
    Mistake("query heads dealt round robin", "north", parameters(queries_dealt_round_robin)),
    Mistake("up before gate", "north", parameters(up_before_gate)),
    Mistake("gate and up interleaved", "north", parameters(gate_and_up_interleaved)),
    Mistake("experts shifted by one", "north", parameters(experts_shifted)),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "-"))
def test_a_planted_mistake_is_seen(mistake, monkeypatch):
    g = golden(mistake.variant)
    config, params = mistake.plant(monkeypatch, g)
    planted = error(forward_module.forward(config, params, g.tokens), g.outputs["logits"])
    print(f"{mistake.name}: error {planted:.1e}")
    assert np.isfinite(planted)
    assert planted > VISIBLE


@pytest.mark.parametrize("variant", sorted({mistake.variant for mistake in MISTAKES}))
def test_without_a_mistake_nothing_is_seen(variant):
    """The same call, nothing planted."""
    g = golden(variant)
    assert error(forward_module.forward(g.config, g.params, g.tokens), g.outputs["logits"]) < TOLERANCE


def test_layer_0_as_moe_is_refused_by_the_loader(tmp_path):
    """With the real file layout this mistake is not silent: experts' tensors are missing and dense ones surplus."""
    checkpoint = golden("north").variant.checkpoint
    shutil.copy(checkpoint / "model.safetensors", tmp_path)
    raw = json.loads((checkpoint / "config.json").read_text())
    raw["mlp_layer_types"][0] = SPARSE
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.gate\.weight"):
        north_jax.load(tmp_path)

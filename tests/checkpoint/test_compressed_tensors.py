"""Checkpoints in e4m3 with scales: each strategy gives the weights that its file means, and other schemes are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from north_jax import forward_pass
from north_jax.checkpoint import CheckpointError, load, write_random_checkpoint
from north_jax.checkpoint.tree import leaves
from north_jax.config import Config
from north_jax.decoding import BackendError, make_decoder
from north_jax.moe import QuantizedExperts, dequantize

Tensors = dict[str, np.ndarray]
E4M3 = ml_dtypes.float8_e4m3fn
STRATEGIES = ["tensor", "channel", "block", "group"]
SCHEMES = {"tensor": "fp8_channel", "channel": "fp8_channel", "block": "fp8_block", "group": "mxfp8"}
forward = jax.jit(forward_pass.forward, static_argnums=0, static_argnames="method")
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.{}"


@pytest.fixture(scope="module")
def config() -> Config:
    """Sizes of which none is a multiple of 128, and one is smaller."""
    return Config.from_dict(
        {
            "model_type": "cohere2_moe",
            "vocab_size": 61,
            "hidden_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 64,
            "prefix_dense_intermediate_size": 192,
            "first_k_dense_replace": 1,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "sliding_window": 8,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "logit_scale": 1.0,
        }
    )


def scales_of(weight: np.ndarray, strategy: str) -> tuple[np.ndarray, np.ndarray]:
    """What the file holds of a matrix's scales, and the scale of every value."""
    rows, columns = weight.shape
    sizes = np.abs(weight)
    match strategy:
        case "tensor":
            scale = np.float32(sizes.max() / 448)
            return scale.reshape(1), np.full(weight.shape, scale)
        case "channel":
            scale = (sizes.max(axis=1, keepdims=True) / 448).astype(ml_dtypes.bfloat16)
            return scale, np.broadcast_to(scale.astype(np.float32), weight.shape)
        case "block":
            padded = np.pad(sizes, ((0, -rows % 128), (0, -columns % 128)))
            blocks = padded.reshape(padded.shape[0] // 128, 128, -1, 128).max(axis=(1, 3)).astype(np.float32) / 448
            return blocks, np.repeat(np.repeat(blocks, 128, 0), 128, 1)[:rows, :columns]
        case _:
            largest = sizes.reshape(rows, -1, 32).max(axis=-1)
            exponent = np.ceil(np.log2(largest / 448)).astype(int)
            return (exponent + 127).astype(np.uint8), np.repeat(np.ldexp(np.float32(1), exponent), 32, axis=1)


def quantization_config(strategy: str, **weights: Any) -> dict[str, Any]:
    scheme: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    if strategy == "block":
        scheme["block_structure"] = [128, 128]
    if strategy == "group":
        scheme["group_size"] = 32
    group = {"targets": ["Linear"], "weights": scheme | weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    form = "mxfp8-quantized" if strategy == "group" else "float-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


@pytest.fixture
def quantised(config: Config, tmp_path: Path) -> Callable[..., tuple[Path, dict[str, np.ndarray]]]:
    """Writes a checkpoint by a strategy; with it come the matrices that it means, in float32."""

    def write(strategy: str, change: Callable[[Tensors], object] = dict) -> tuple[Path, Tensors]:
        path = tmp_path / strategy
        write_random_checkpoint(path, config, overwrite=True)
        tensors = safetensors.numpy.load_file(path / "model.safetensors")
        meant = {}
        for name, weight in list(tensors.items()):
            if not name.endswith("_proj.weight"):
                continue
            wide = weight.astype(np.float32)
            stored, spread = scales_of(wide, strategy)
            tensors[name] = np.clip(wide / spread, -448, 448).astype(E4M3)
            tensors[f"{name}_scale"] = stored
            meant[name] = tensors[name].astype(np.float32) * spread
        change(tensors)
        safetensors.numpy.save_file(tensors, path / "model.safetensors")
        change_config(path, lambda raw: raw.update(quantization_config=quantization_config(strategy)))
        return path, meant

    return write


def change_config(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads((path / "config.json").read_text())
    change(raw)
    (path / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_are_those_that_the_file_means(quantised, config, strategy):
    path, meant = quantised(strategy)
    params = load(path).params
    experts = params["layers"][1]["mlp"]
    assert experts["gate_up"].scheme == experts["down"].scheme == SCHEMES[strategy]
    gate_up, down = (np.asarray(dequantize(experts[name], jnp.float32)) for name in ("gate_up", "down"))
    for e in range(config.num_experts):
        gate, up = np.split(gate_up[e], 2)
        for kind, found in (("gate", gate), ("up", up), ("down", down[e])):
            np.testing.assert_array_equal(found, meant[EXPERT.format(e, kind, "weight")])
    qkv = np.concatenate([meant[f"model.layers.0.self_attn.{kind}_proj.weight"] for kind in "qkv"])
    assert params["layers"][0]["qkv"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(params["layers"][0]["qkv"]), qkv.astype(ml_dtypes.bfloat16))
    dense = np.concatenate([meant[f"model.layers.0.mlp.{kind}_proj.weight"] for kind in ("gate", "up")])
    np.testing.assert_array_equal(np.asarray(params["layers"][0]["mlp"]["gate_up"]), dense.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_quantised_model_computes_what_its_dequantised_one_does(quantised, strategy):
    path, _ = quantised(strategy)
    model = load(path, dtype="float32")
    whole = jax.tree.map(
        lambda leaf: dequantize(leaf, jnp.float32) if isinstance(leaf, QuantizedExperts) else leaf,
        model.params,
        is_leaf=lambda leaf: isinstance(leaf, QuantizedExperts),
    )
    tokens = np.arange(40, dtype=np.int32).reshape(2, 20)
    expected = forward(model.config, whole, tokens, method="dense")
    for method in ("dense", "gathered", "tiled"):
        found = forward(model.config, model.params, tokens, method=method)
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


def test_the_megakernel_does_not_take_it(quantised, config):
    model = load(quantised("channel")[0])
    with pytest.raises(BackendError, match="does not take experts in eight bits"):
        make_decoder(model.config, model.params, backend="megakernel", slots=1, max_context=64)
    assert make_decoder(model.config, model.params, backend="warp", slots=1, max_context=64).backend == "warp"


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another method": (lambda found: found.update(quant_method="gptq"), r"not supported yet \(gptq float-quantized\)"),
    "another format": (lambda found: found.update(format="nvfp4-pack-quantized"), "compressed-tensors nvfp4-pack-quan"),
    "four bits": (
        lambda found: found["config_groups"]["group_0"]["weights"].update(num_bits=4),
        r"weights\.num_bits = 4 is not supported \(only 8 is\)",
    ),
    "integers": (
        lambda found: found["config_groups"]["group_0"]["weights"].update(type="int"),
        r"weights\.type = 'int' is not supported",
    ),
    "another strategy": (
        lambda found: found["config_groups"]["group_0"]["weights"].update(strategy="token"),
        r"weights\.strategy = 'token' is not supported",
    ),
    "two groups": (
        lambda found: found["config_groups"].update(group_1={}),
        "config_groups must have one group",
    ),
}


@pytest.mark.parametrize(("change", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_other_schemes_are_named(quantised, change, message):
    path, _ = quantised("channel")
    change_config(path, lambda raw: change(raw["quantization_config"]))
    with pytest.raises(CheckpointError, match=message) as error:
        load(path)
    assert str(path) in str(error.value)


WRONG: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing scales": (
        lambda tensors: tensors.pop(EXPERT.format(2, "down", "weight_scale")),
        r"missing tensors: .*experts\.2\.down_proj\.weight_scale \[160, 1\]",
    ),
    "mis-shaped scales": (
        lambda tensors: tensors.update({EXPERT.format(1, "up", "weight_scale"): np.ones((3, 1), np.float32)}),
        r"experts\.1\.up_proj\.weight_scale is \[3, 1\], expected \[64, 1\]",
    ),
    "one expert in bfloat16": (
        lambda tensors: tensors.update({EXPERT.format(0, "gate", "weight"): np.zeros((64, 160), ml_dtypes.bfloat16)}),
        r"layers\.1\.mlp\.gate_up is quantised in part: not .*experts\.0\.gate_proj",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_tensors_are_named(quantised, change, message):
    path, _ = quantised("channel", change)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_every_parameter_is_there(quantised, config):
    paths = {path for path, _ in leaves(load(quantised("block")[0]).params)}
    assert ("layers", 1, "mlp", "gate_up") in paths
    assert not any("scales" in path for path in paths)

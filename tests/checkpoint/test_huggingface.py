"""Hugging Face directories: every form that is accepted gives the same parameters, every fault is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from north_jax.checkpoint import CheckpointError, export, load
from north_jax.checkpoint.tree import leaves
from north_jax.config import Config, ConfigError

Tensors = dict[str, np.ndarray]
SameBits = Callable[[Any, Any], bool]
BF16 = np.dtype(ml_dtypes.bfloat16)
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.{}"


@pytest.fixture
def edited(pristine: Path, tmp_path: Path) -> Callable[[Callable[[Tensors], None]], Path]:
    """Copies the pristine checkpoint with its tensors changed by a function."""

    def make(change: Callable[[Tensors], None]) -> Path:
        path = tmp_path / "edited"
        path.mkdir()
        shutil.copy(pristine / "config.json", path)
        tensors = safetensors.numpy.load_file(pristine / "model.safetensors")
        change(tensors)
        safetensors.numpy.save_file(tensors, path / "model.safetensors")
        return path

    return make


@pytest.fixture
def sharded(pristine: Path, tmp_path: Path) -> Path:
    """The pristine checkpoint in several shards."""
    model = load(pristine)
    export(tmp_path / "sharded", model.config, model.params, max_shard_bytes=9000)
    assert len(list((tmp_path / "sharded").glob("model-*-of-*.safetensors"))) > 3
    return tmp_path / "sharded"


def test_parameters_hold_the_tensors_in_the_documented_order(pristine: Path, config: Config) -> None:
    tensors = safetensors.numpy.load_file(pristine / "model.safetensors")
    params = jax.tree.map(np.asarray, load(pristine).params)
    layer = "model.layers.2"
    qkv = np.concatenate([tensors[f"{layer}.self_attn.{kind}_proj.weight"] for kind in "qkv"])
    np.testing.assert_array_equal(params["layers"][2]["qkv"], qkv)
    width = config.intermediate_size
    for e in range(config.num_experts):
        expert = f"{layer}.mlp.experts.{e}"
        fused = params["layers"][2]["mlp"]["gate_up"][e]
        np.testing.assert_array_equal(fused[:width], tensors[f"{expert}.gate_proj.weight"])
        np.testing.assert_array_equal(fused[width:], tensors[f"{expert}.up_proj.weight"])
        np.testing.assert_array_equal(params["layers"][2]["mlp"]["down"][e], tensors[f"{expert}.down_proj.weight"])
    np.testing.assert_array_equal(params["layers"][2]["mlp"]["router"], tensors[f"{layer}.mlp.gate.weight"])
    dense = np.concatenate([tensors[f"model.layers.0.mlp.{kind}_proj.weight"] for kind in ("gate", "up")])
    np.testing.assert_array_equal(params["layers"][0]["mlp"]["gate_up"], dense)
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["final_norm"], tensors["model.norm.weight"])


def pop_experts(tensors: Tensors, kind: str) -> np.ndarray:
    return np.stack([tensors.pop(EXPERT.format(e, kind, "weight")) for e in range(5)])


def stack(tensors: Tensors) -> None:
    gate, up, down = (pop_experts(tensors, kind) for kind in ("gate", "up", "down"))
    tensors["model.layers.1.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
    tensors["model.layers.1.mlp.experts.down_proj"] = down


def switch(tensors: Tensors) -> None:
    for kind in ("gate", "up", "down"):
        tensors[f"model.layers.1.mlp.switch_mlp.{kind}_proj.weight"] = pop_experts(tensors, kind)


def prefix(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[f"language_model.{name}"] = tensors.pop(name)


def explicit_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]


def zero_biases(tensors: Tensors) -> None:
    for e in range(5):
        for kind, width in (("gate", 14), ("up", 14), ("down", 24)):
            tensors[EXPERT.format(e, kind, "bias")] = np.zeros(width, BF16)


def everything(tensors: Tensors) -> None:
    explicit_head(tensors)
    stack(tensors)
    prefix(tensors)


@pytest.mark.parametrize("change", [stack, switch, prefix, explicit_head, zero_biases, everything])
def test_forms_seen_in_the_wild_load_as_the_same_parameters(
    edited: Callable[..., Path], pristine: Path, same_bits: SameBits, change: Callable[[Tensors], None]
) -> None:
    assert same_bits(load(edited(change)).params, load(pristine).params)


def test_shards_load_as_the_same_parameters(sharded: Path, pristine: Path, same_bits: SameBits) -> None:
    assert same_bits(load(sharded).params, load(pristine).params)


def test_dtype_is_kept_or_converted(pristine: Path, same_bits: SameBits) -> None:
    kept = load(pristine)
    assert kept.config.dtype == "bfloat16"
    for dtype in ("float32", "float16"):
        cast = load(pristine, dtype=dtype)
        assert cast.config.dtype == dtype
        assert {leaf.dtype.name for _, leaf in leaves(cast.params)} == {dtype}
        assert same_bits(cast.params, jax.tree.map(lambda x, dtype=dtype: np.asarray(x).astype(dtype), kept.params))


def test_float32_rounds_to_the_nearest_bfloat16(edited: Callable[..., Path], pristine: Path) -> None:
    values = np.random.default_rng(0).standard_normal((53, 24), np.float32)
    path = edited(lambda tensors: tensors.update({"model.embed_tokens.weight": values}))
    assert load(path).params["embed"].dtype == np.float32
    embed = load(path, dtype="bfloat16").params["embed"]
    assert np.asarray(embed).tobytes() == np.asarray(jax.numpy.asarray(values).astype("bfloat16")).tobytes()


def test_pieces_of_different_types_are_promoted(edited: Callable[..., Path], pristine: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    path = edited(lambda tensors: tensors.update({name: tensors[name].astype(np.float32)}))
    wide, narrow = (load(p).params["layers"][0]["qkv"] for p in (path, pristine))
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide, narrow.astype(np.float32))


def reshape(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: np.zeros(shape, BF16)})


def drop(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def several(tensors: Tensors) -> None:
    drop("model.norm.weight", EXPERT.format(3, "up", "weight"))(tensors)
    reshape("model.layers.0.self_attn.k_proj.weight", 40, 24)(tensors)
    reshape("model.layers.0.self_attn.q_norm.weight", 10)(tensors)


def other_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][17, 3] += 1


def nonzero_bias(tensors: Tensors) -> None:
    zero_biases(tensors)
    tensors[EXPERT.format(2, "up", "bias")][5] = 1e-8


def quantised(tensors: Tensors) -> None:
    name = EXPERT.format(0, "gate", "weight")
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)


def many_missing(tensors: Tensors) -> None:
    for name in list(tensors):
        if ".experts." in name:
            del tensors[name]


# What is done to the tensors, and what the message must say.
FAULTS: dict[str, tuple[Callable[[Tensors], None], list[str]]] = {
    "missing": (drop("model.norm.weight"), [r"1 missing tensors: model\.norm\.weight \[24\]"]),
    "surplus": (
        reshape("model.layers.1.self_attn.q_norm.weight", 10),
        [r"1 unexpected tensors: model\.layers\.1\.self_attn\.q_norm\.weight \[10\]"],
    ),
    "layer too many": (reshape("model.layers.3.input_layernorm.weight", 24), [r"unexpected tensors: model\.layers\.3"]),
    "expert too many": (reshape(EXPERT.format(5, "up", "weight"), 14, 24), [r"unexpected tensors: .*experts\.5\.up"]),
    "mis-shaped": (
        reshape("model.layers.0.self_attn.o_proj.weight", 40, 24),
        [r"1 mis-shaped tensors: model\.layers\.0\.self_attn\.o_proj\.weight is \[40, 24\], expected \[24, 40\]"],
    ),
    "several": (
        several,
        [r"2 missing tensors: .*experts\.3\.up.* model\.norm", "1 unexpected .*q_norm", "1 mis-shaped .*k_proj"],
    ),
    "many": (many_missing, [r"30 missing tensors: .*experts\.0\.gate.* and 22 more"]),
    "two forms at once": (
        lambda tensors: tensors.update({"model.layers.1.mlp.experts.down_proj": np.zeros((5, 24, 14), BF16)}),
        ["1 missing tensors: .*gate_up_proj", r"15 unexpected tensors: .*experts\.0"],
    ),
    "prefix and none": (
        lambda tensors: tensors.update({"language_model.model.norm.weight": tensors["model.norm.weight"]}),
        [r"given twice: .*model\.norm\.weight"],
    ),
    "untied head": (other_head, [r"lm_head\.weight differs from model\.embed_tokens\.weight", r"first in row 17\b"]),
    "head of another type": (
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].astype(np.float32)}),
        [r"lm_head\.weight differs", "F32 and BF16"],
    ),
    "head of another shape": (
        reshape("lm_head.weight", 24, 53),
        [r"lm_head\.weight is \[24, 53\], expected \[53, 24\]"],
    ),
    "bias": (nonzero_bias, [r"1 expert biases are not zero.*layers\.1\.mlp\.experts\.2\.up_proj\.bias"]),
    "mis-shaped bias": (
        reshape(EXPERT.format(2, "up", "bias"), 24),
        [r"experts\.2\.up_proj\.bias is \[24\], expected \[14\]"],
    ),
    "quantised weights": (
        quantised,
        [r"experts\.0\.gate_proj\.weight \(F8_E4M3\)", "without a quantization_config are not supported"],
    ),
    "integers": (
        lambda tensors: tensors.update({"model.norm.weight": np.ones(24, np.int32)}),
        [r"model\.norm\.weight \(I32\)"],
    ),
}


@pytest.mark.parametrize(("change", "messages"), FAULTS.values(), ids=FAULTS.keys())
def test_faulty_tensors_are_named(
    edited: Callable[..., Path], change: Callable[[Tensors], None], messages: list[str]
) -> None:
    path = edited(change)
    for message in messages:
        with pytest.raises(CheckpointError, match=message) as error:
            load(path)
        assert str(path) in str(error.value)


def test_shapes_are_checked_before_anything_is_read(
    edited: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = edited(reshape("model.norm.weight", 25))

    def fail(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("north_jax.checkpoint.assemble.read_bytes", fail)
    monkeypatch.setattr("north_jax.checkpoint.huggingface.read_bytes", fail)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[25\]"):
        load(path)


def edit_json(file: Path, change: Callable[[dict], None]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def first_shard(path: Path) -> Path:
    return sorted(path.glob("model-*.safetensors"))[0]


def weight_map(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    return lambda path: edit_json(path / "model.safetensors.index.json", lambda index: change(index["weight_map"]))


def repeat_in_last_shard(path: Path) -> None:
    last = sorted(path.glob("model-*.safetensors"))[-1]
    tensors = safetensors.numpy.load_file(last)
    safetensors.numpy.save_file(tensors | {"model.embed_tokens.weight": np.zeros((53, 24), BF16)}, last)


NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"

# What is done to the files of a sharded checkpoint, and what the message must say.
BROKEN_DIRECTORIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda path: (path / "config.json").unlink(), r"config\.json: no such file"),
    "config is not JSON": (lambda path: (path / "config.json").write_text("{"), r"config\.json: not valid JSON"),
    "4-bit compressed config": (
        lambda path: edit_json(
            path / "config.json",
            lambda config: config.update(
                quantization_config={"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
            ),
        ),
        r"quantization_config: quantised checkpoints are not supported yet \(compressed-tensors nvfp4-pack-quantized\)",
    ),
    "4-bit config": (
        lambda path: edit_json(
            path / "config.json", lambda config: config.update(quantization={"bits": 4, "group_size": 64})
        ),
        r"quantised checkpoints are not supported yet \(quantization: 4\)",
    ),
    "missing shard": (lambda path: first_shard(path).unlink(), r"1 of \d+ shards are missing: model-00001-of"),
    "truncated shard": (
        lambda path: first_shard(path).write_bytes(first_shard(path).read_bytes()[:-1]),
        r"model-00001-of-\d+\.safetensors: cut off",
    ),
    "index is not JSON": (lambda path: (path / "model.safetensors.index.json").write_text("["), "not valid JSON"),
    "index without a map": (lambda path: (path / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
    "index points outside": (
        weight_map(lambda places: places.update({NORM: "../x.safetensors"})),
        r"model\.norm\.weight lies in '\.\./x\.safetensors', which is not a file name",
    ),
    "index lacks a tensor": (
        weight_map(lambda places: places.pop(NORM)),
        r"model\.norm\.weight is in .* not in the index",
    ),
    "index has a tensor too many": (
        weight_map(lambda places: places.update({"x": places[NORM]})),
        r"x is not in model-.*, where the index has it",
    ),
    "index names the wrong shard": (
        weight_map(lambda places: places.update({NORM: places[EMBED]})),
        r"model\.norm\.weight is in .*, the index has it in model-00001",
    ),
    "tensor in two shards": (repeat_in_last_shard, r"model\.embed_tokens\.weight is in model-00001.* and in model-"),
    "no index": (
        lambda path: (path / "model.safetensors.index.json").unlink(),
        r"neither model\.safetensors nor model\.safetensors\.index\.json; found model-00001-of",
    ),
}


@pytest.mark.parametrize(("change", "message"), BROKEN_DIRECTORIES.values(), ids=BROKEN_DIRECTORIES.keys())
def test_broken_directories_are_named(sharded: Path, change: Callable[[Path], object], message: str) -> None:
    change(sharded)
    with pytest.raises((CheckpointError, ConfigError), match=message) as error:
        load(sharded)
    assert str(sharded) in str(error.value)


def test_index_of_a_single_file_is_accepted(pristine: Path, same_bits: SameBits, tmp_path: Path) -> None:
    path = tmp_path / "indexed"
    shutil.copytree(pristine, path)
    names = safetensors.numpy.load_file(pristine / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same_bits(load(path).params, load(pristine).params)

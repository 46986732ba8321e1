"""config.json: both spellings, every field accounted for, what is unsupported refused by name."""

from __future__ import annotations

import json

import pytest
from support import RAW_CONFIG

from north_jax.config import Config, ConfigError

# North Mini Code's own geometry, in the older spelling.
NORTH_MINI = RAW_CONFIG | {
    "vocab_size": 262144,
    "hidden_size": 2048,
    "num_hidden_layers": 49,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 768,
    "prefix_dense_intermediate_size": 3072,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "prefix_dense_sliding_window_pattern": 1,
    "num_shared_experts": 0,
    "use_qk_norm": False,
    "max_position_embeddings": 500000,
    "eos_token_id": 255001,
}


def without(raw: dict, *names: str) -> dict:
    return {name: value for name, value in raw.items() if name not in names}


def test_north_mini_pattern():
    config = Config.from_dict(NORTH_MINI)
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert full == list(range(0, 49, 4))
    assert config.mlp_layer_types == ("dense",) + ("sparse",) * 48
    assert [i for i, rope in enumerate(config.rope_layers) if not rope] == full[1:]
    assert config.window(0) is None and config.window(1) == 4096
    assert config.queries_per_kv_head == 8


def test_both_spellings_mean_the_same():
    old = Config.from_dict(NORTH_MINI)
    new = without(NORTH_MINI, "first_k_dense_replace", "sliding_window_pattern", "rope_theta") | {
        "layer_types": list(old.layer_types),
        "mlp_layer_types": list(old.mlp_layer_types),
        "rope_parameters": {"rope_theta": 50000, "rope_type": "default"},
    }
    assert Config.from_dict(new) == old


def test_to_dict_is_read_back():
    config = Config.from_dict(NORTH_MINI)
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_rope_parameters_win_over_a_default_beside_them():
    """Transformers 5 writes its class default of rope_theta beside the rope_parameters that it uses."""
    both = RAW_CONFIG | {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"}}
    assert Config.from_dict(both).rope_theta == 50000.0


def test_layer_norm_without_rms_eps():
    config = Config.from_dict(without(RAW_CONFIG, "rms_norm_eps") | {"layer_norm_eps": 3e-5})
    assert (config.norm_type, config.norm_eps) == ("layer", 3e-5)
    assert Config.from_dict(config.to_dict()) == config


def test_sliding_prefix_does_not_force_rope():
    config = Config.from_dict(RAW_CONFIG | {"first_k_dense_replace": 2, "prefix_dense_sliding_window_pattern": 2})
    assert config.layer_types[:2] == ("sliding_attention", "full_attention")
    assert config.rope_layers[:2] == (True, False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "llama"}, "model_type = 'llama'"),
        ({"num_shared_experts": 1}, "num_shared_experts = 1"),
        ({"use_qk_norm": True}, "use_qk_norm = True"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_parameters.rope_type = 'yarn'"),
        ({"rope_parameters": {"rope_theta": 50000, "factor": 2.0}}, "rope_parameters.factor"),
        ({"rope_parameters": {"rope_theta": "7"}}, "rope_parameters.rope_theta must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling"),
        ({"expert_selection_fn": "relu"}, "expert_selection_fn = 'relu'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["chunked_attention"] * 5}, "layer_types[0] = 'chunked_attention'"),
        ({"mlp_layer_types": ["dense"] * 4 + ["moe"]}, "mlp_layer_types[4] = 'moe'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads (3)"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok (17)"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, found 'many'"),
        ({"vocab_size": True}, "vocab_size"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ({"eos_token_id": 199}, "eos_token_id = 199 lies outside"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"dtype": "int8"}, "dtype = 'int8'"),
        ({"first_k_dense_replace": 6}, "first_k_dense_replace"),
        ({"moe_gizmo": 3}, "unknown fields: moe_gizmo = 3"),
        ({"use_rope": False}, "unknown fields: use_rope = False"),
    ],
)
def test_refused_by_name(change, named):
    with pytest.raises(ConfigError) as error:
        Config.from_dict(RAW_CONFIG | change)
    assert named in str(error.value)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_experts", "rope_theta", "model_type"])
def test_missing_fields_are_named(name):
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        Config.from_dict(without(RAW_CONFIG, name))


def test_unknown_fields_may_be_ignored_or_null():
    config = Config.from_dict(RAW_CONFIG)
    assert Config.from_dict(RAW_CONFIG | {"moe_gizmo": 3}, ignore={"moe_gizmo"}) == config
    assert Config.from_dict(RAW_CONFIG | {"moe_gizmo": None}) == config


def test_files(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        Config.from_json(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        Config.from_json(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        Config.from_json(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(RAW_CONFIG))
    assert Config.from_json(tmp_path) == Config.from_dict(RAW_CONFIG)


@pytest.mark.parametrize("name", ["logit_scale", "rope_theta", "rms_norm_eps"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
def test_numbers_are_finite(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be a finite number"):
        Config.from_dict(RAW_CONFIG | {name: value})


def test_sizes_fit_the_device():
    with pytest.raises(ConfigError, match=r"sliding_window must be a positive integer below 2\*\*31"):
        Config.from_dict(RAW_CONFIG | {"sliding_window": 2**31})


@pytest.mark.parametrize("text", ["[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"], ids=["nested", "digits"])
def test_json_that_python_gives_up_on_is_named(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: not valid JSON"):
        Config.from_json(file)
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match=r"config\.json: Is a directory"):
        Config.from_json(tmp_path)

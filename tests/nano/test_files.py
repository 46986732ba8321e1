"""What ships in north_jax/nano: sizes, geometry, vocabulary, the settings around it."""

import json
from pathlib import Path

import pytest

import north_jax.nano
from north_jax.config import DENSE, FULL, SLIDING, SPARSE, Config
from north_jax.text import Tokenizer

NANO = Path(north_jax.nano.__file__).parent


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(NANO)


def test_weights_fit_into_sixteen_megabytes() -> None:
    assert (NANO / "model.safetensors").stat().st_size <= 16_000_000


def test_geometry_is_that_of_the_family() -> None:
    config = Config.from_json(NANO)
    assert config.layer_types == (FULL, SLIDING, SLIDING, SLIDING) * 2
    assert config.mlp_layer_types == (DENSE,) + (SPARSE,) * 7
    assert config.rope_layers == (True, True, True, True, False, True, True, True)
    assert config.queries_per_kv_head == 8
    assert (config.num_experts, config.num_experts_per_tok) == (16, 4)
    assert (config.expert_selection_fn, config.norm_topk_prob, config.norm_type) == ("sigmoid", False, "rms")


def test_config_names_the_tokenizers_tokens(tokenizer: Tokenizer) -> None:
    config = Config.from_json(NANO)
    generation = json.loads((NANO / "generation_config.json").read_text())
    assert config.vocab_size == tokenizer.vocab_size
    ends = [tokenizer.special_id("<|END_OF_TURN_TOKEN|>"), tokenizer.special_id("<EOS_TOKEN>")]
    assert list(config.eos_token_id) == generation["eos_token_id"] == ends
    assert tokenizer.eos_id == ends[0]
    assert config.bos_token_id == generation["bos_token_id"] == tokenizer.bos_id
    assert config.pad_token_id == generation["pad_token_id"] == tokenizer.pad_id


def test_every_marker_is_one_special_token(tokenizer: Tokenizer) -> None:
    assert len(set(tokenizer.marker_ids.values())) == 13
    for marker, id in tokenizer.marker_ids.items():
        assert tokenizer.special[id] == marker
        assert id not in tokenizer.encode_text(f"x{marker}y")


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    single = {tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size) if id not in tokenizer.special}
    assert {bytes([value]) for value in range(256)} <= single
    text = "é\u4e2d\U0001f600\x00\t\r\n  \u0301 名前 = 'ß'"
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_pieces_suit_python(tokenizer: Tokenizer) -> None:
    def pieces(text: str) -> list[str]:
        return [tokenizer.decode([id]) for id in tokenizer.encode_text(text)]

    assert pieces("return 1234") == ["return", " ", "1", "2", "3", "4"]
    for depth in range(1, 5):
        indent = "\n" + " " * 4 * depth
        assert pieces(f"x:{indent}return self.x") == ["x", ":", indent, "return", " self", ".x"]

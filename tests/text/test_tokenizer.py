import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from north_jax.text import Marker, Tokenizer, TokenizerError
from tests.support.cmd4 import BOS, NAMED, PAD, byte_level_backend

BACKEND = byte_level_backend()
TOKENIZER = Tokenizer(BACKEND, NAMED)
SPELLINGS = [*TOKENIZER.special.values(), "<|END_OF_", "TURN_TOKEN|>", "<|", "|>", "<", ">"]
TEXTS = st.lists(st.one_of(st.sampled_from(SPELLINGS), st.text(max_size=8)), max_size=8).map("".join)


def write(directory, config=None, **files):
    BACKEND.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(NAMED if config is None else config))
    for name, text in files.items():
        (directory / f"{name}.json").write_text(text)
    return directory


def test_from_dir_finds_the_named_tokens_by_spelling(tmp_path):
    config = {**NAMED, "bos_token": {"content": BOS, "special": True}, "unk_token": None}
    loaded = Tokenizer.from_dir(write(tmp_path, config))
    assert loaded.special[loaded.bos_id] == BOS
    assert loaded.special[loaded.pad_id] == PAD
    assert loaded.eos_id == loaded.marker_ids[Marker.END_OF_TURN] == loaded.special_id("<|END_OF_TURN_TOKEN|>")
    assert loaded.vocab_size == TOKENIZER.vocab_size
    assert loaded.encode_text("def f():") == TOKENIZER.encode_text("def f():")


def test_special_tokens_map_is_read_when_the_config_is_silent(tmp_path):
    loaded = Tokenizer.from_dir(write(tmp_path, {}, special_tokens_map=json.dumps({"bos_token": BOS})))
    assert loaded.special[loaded.bos_id] == BOS
    assert loaded.eos_id is None


def test_wrong_files_are_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    write(tmp_path, {"eos_token": "<nowhere>"})
    with pytest.raises(TokenizerError, match="eos_token '<nowhere>' is not in"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match="expected a JSON object"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)


def test_missing_markers_are_named():
    bare = tokenizers.Tokenizer(models.BPE())
    bare.decoder = decoders.ByteLevel()
    bare.add_special_tokens([marker.value for marker in Marker if marker is not Marker.START_ACTION])
    with pytest.raises(TokenizerError, match=r"lacks the chat markers <\|START_ACTION\|>$"):
        _ = Tokenizer(bare).marker_ids
    with pytest.raises(TokenizerError, match="no special token 'x'"):
        Tokenizer(bare).special_id("x")


@given(TEXTS)
def test_text_never_becomes_a_special_token(text):
    ids = TOKENIZER.encode_text(text)
    assert TOKENIZER.special.keys().isdisjoint(ids)
    assert TOKENIZER.decode(ids) == text


def test_the_backend_alone_would_have_let_special_tokens_in():
    """Why `encode_text` does not rely on the backend's switch: half of the markers are not marked special."""
    backend = tokenizers.Tokenizer.from_str(BACKEND.to_str())
    backend.encode_special_tokens = True
    text = "".join(Marker)
    assert not TOKENIZER.special.keys().isdisjoint(backend.encode(text).ids)
    assert TOKENIZER.special.keys().isdisjoint(TOKENIZER.encode_text(text))


def test_text_is_encoded_as_if_there_were_no_added_tokens():
    model = tokenizers.Tokenizer(BACKEND.model)
    model.pre_tokenizer = BACKEND.pre_tokenizer
    assert not model.get_added_tokens_decoder()
    text = "x" + " and ".join(SPELLINGS)
    assert TOKENIZER.encode_text(text) == model.encode(text).ids


def test_a_model_that_takes_whole_words_is_respelled():
    alphabet = sorted({*"<|END>hi", *pre_tokenizers.ByteLevel.alphabet()})
    vocabulary = {piece: id for id, piece in enumerate([*alphabet, "<|END|>", "hi"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("h", "i")], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("~", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.normalizer = normalizers.NFC()
    backend.add_tokens([AddedToken("<|END|>", special=False)])
    tokenizer = Tokenizer(backend)
    assert backend.model.tokenize("<|END|>")[0].id in tokenizer.special  # the leak that is mended
    ids = tokenizer.encode_text("é~<|END|>~hi")
    assert tokenizer.special.keys().isdisjoint(ids)
    assert ids[-1] == vocabulary["hi"]
    assert tokenizer.decode(ids) == "é~<|END|>~hi"


def test_lone_surrogates_count_as_replacement_characters():
    assert TOKENIZER.decode(TOKENIZER.encode_text("a\ud83d!")) == "a\ufffd!"
    assert TOKENIZER.decode(TOKENIZER.encode_text("\ud83d\ude00")) == "😀"


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)))
def test_decoding_is_the_backends(ids):
    assert TOKENIZER.decode(ids) == BACKEND.decode(ids, skip_special_tokens=False)


def test_every_byte_has_its_token():
    singles = {TOKENIZER.token_bytes(id) for id in range(TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(id)) == 1}
    assert singles == {bytes([byte]) for byte in range(256)}


def test_unused_ids_stand_for_nothing():
    assert TOKENIZER.token_bytes(TOKENIZER.vocab_size) == TOKENIZER.token_bytes(-1) == b""
    assert TOKENIZER.decode([TOKENIZER.vocab_size + 5, *TOKENIZER.encode_text("x")]) == "x"


def test_special_tokens_are_spelled_or_skipped():
    ids = [TOKENIZER.bos_id, *TOKENIZER.encode_text("a"), *TOKENIZER.marker_ids.values(), TOKENIZER.special_id("<UNK>")]
    assert TOKENIZER.decode(ids) == BOS + "a" + "".join(Marker) + "<UNK>"
    assert TOKENIZER.decode(ids, skip_special=True) == "a"
    assert set(TOKENIZER.control) == {id for id in ids if id in TOKENIZER.special} | {TOKENIZER.pad_id}


def sentencepiece(decoder):
    pieces = ["<unk>", "<s>", "▁", "▁Hi", "x", "▁x", "<0xE6>", "<0x97>", "<0xA5>", "日"]
    backend = tokenizers.Tokenizer(models.BPE({piece: id for id, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.decoder = decoder
    backend.add_special_tokens(["<s>"])
    return backend


LLAMA_STYLE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


@pytest.mark.parametrize("decoder", [decoders.Sequence(LLAMA_STYLE), decoders.Metaspace()])
@pytest.mark.parametrize("ids", [[3, 4, 5, 9], [1, 3, 5], [2, 3], [4, 2, 2, 4]])
def test_sentencepiece_vocabularies(decoder, ids):
    backend = sentencepiece(decoder)
    assert Tokenizer(backend).decode(ids) == backend.decode(ids, skip_special_tokens=False)


def test_byte_pieces_are_bytes():
    tokenizer = Tokenizer(sentencepiece(decoders.Sequence(LLAMA_STYLE)))
    assert tokenizer.decode([6, 7, 8, 4]) == "日x"
    assert tokenizer.decode([6, 7, 4]) == "\ufffdx"


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (decoders.WordPiece(), "unsupported decoder in tokenizer.json: WordPiece"),
        (decoders.Metaspace(replacement="_"), "unsupported Metaspace decoder"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 0, 1)]), "unsupported Strip decoder"),
        (decoders.Fuse(), "unsupported decoder in tokenizer.json: Fuse"),
    ],
)
def test_other_decoders_are_refused_by_name(decoder, message):
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(sentencepiece(decoder))


def test_a_missing_decoder_is_refused():
    with pytest.raises(TokenizerError, match="has no decoder"):
        Tokenizer(tokenizers.Tokenizer(models.BPE()))

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from north_jax.text import Detokenizer, Marker, Tokenizer
from tests.support.cmd4 import cmd4_tokenizer

TOKENIZER = cmd4_tokenizer()
BYTE_OF = {TOKENIZER.token_bytes(id): id for id in range(TOKENIZER.vocab_size)}


def ids_of(data: bytes) -> list[int]:
    return [BYTE_OF[bytes([byte])] for byte in data]


@given(st.lists(st.integers(0, TOKENIZER.vocab_size + 3)))
def test_the_pieces_joined_are_the_decoded_whole(ids):
    detokenizer = Detokenizer(TOKENIZER)
    assert "".join([detokenizer.push(id) for id in ids]) + detokenizer.flush() == TOKENIZER.decode(ids)


@given(st.binary(max_size=12))
def test_arbitrary_bytes_become_what_python_reads_in_them(data):
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push_many(ids_of(data)) + detokenizer.flush() == data.decode("utf-8", "replace")


@given(st.text())
def test_valid_text_is_given_character_by_character_as_it_completes(text):
    detokenizer = Detokenizer(TOKENIZER)
    given = ""
    for character in text:
        *first, last = ids_of(character.encode())
        assert detokenizer.push_many(first) == ""
        given += detokenizer.push(last)
        assert given.endswith(character)
    assert detokenizer.flush() == ""


def test_an_incomplete_character_is_replaced_once_when_it_is_certain():
    detokenizer = Detokenizer(TOKENIZER)
    marker = TOKENIZER.marker_ids[Marker.END_TEXT]
    assert detokenizer.push_many(ids_of("😀".encode()[:3])) == ""
    assert detokenizer.push(marker) == "\ufffd<|END_TEXT|>"
    assert detokenizer.push_many(ids_of("😀".encode()[:2])) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("ids", [[1, 2, 1], [0, 1, 2], [2, 1]])
def test_sentencepiece_drops_only_the_first_space(ids):
    backend = Backend(models.BPE({"<s>": 0, "▁Hi": 1, "▁": 2}, []))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(backend)
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push_many(ids) + detokenizer.flush() == tokenizer.decode(ids)

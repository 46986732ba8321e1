"""Writes the directory of a model without weights: config.json, tokenizer, chat template, for `--random-weights`.

    python -m north_jax.bench random_model DIR
    python -m serve --model DIR --random-weights

The geometry is that of --config (by default North Mini Code), and the tokenizer has an entry for every row of its
embedding. It is byte-level BPE, made of generated merges: all bytes, all pairs of 64 characters (letters, digits, a
space, an underscore), then pairs with a third one. So every token but a byte of a longer character is whole text, and
text of random tokens streams token by token. The special tokens have the ids that config.json gives, markers follow
upon the end of the turn. The same arguments write the same bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from north_jax.config import Config
from north_jax.geometries import NORTH
from north_jax.text import Marker, Tokenizer
from north_jax.text.pieces import byte_alphabet

_PAD, _UNK, _BOS = "<PAD>", "<UNK>", "<BOS_TOKEN>"
_CHARACTERS = " _" + string.ascii_lowercase + string.ascii_uppercase + string.digits
# What is merged at most: a word with a blank before it, digits, or else what stands between them.
_PIECES = r" ?[\p{L}_]+| ?\p{N}+| ?[^\s\p{L}\p{N}_]+|\s+"


class RandomModelError(ValueError):
    """A geometry that no tokenizer can be made for; the message says why."""


def write_model(directory: Path, config_file: Path = NORTH) -> int:
    """Writes config.json, tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja.

    Args:
      directory: made if it is not there; these files in it are replaced.
      config_file: config.json of the geometry.

    Returns:
      the entries of the vocabulary.

    Raises:
      ConfigError: the geometry is not one of this family.
      RandomModelError: its vocabulary has no room for bytes and markers, or is larger than what can be generated.
    """
    config = Config.from_json(config_file)
    special = _special_ids(config)
    tokenizer = _tokenizer(config.vocab_size, special)
    directory.mkdir(parents=True, exist_ok=True)
    raw = json.loads(config_file.read_text())
    _write(directory / "config.json", raw)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, separators=(",", ":")) + "\n", encoding="utf-8")
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _BOS,
            "eos_token": Marker.END_OF_TURN.value,
            "pad_token": _PAD,
            "unk_token": _UNK,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings,
        },
    )
    ends = {"bos_token_id": special[_BOS], "eos_token_id": special[Marker.END_OF_TURN], "pad_token_id": special[_PAD]}
    _write(directory / "generation_config.json", {**ends, "do_sample": True, "temperature": 1.0, "top_p": 0.95})
    template = (files("north_jax") / "nano" / "chat_template.jinja").read_text(encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    read = Tokenizer.from_dir(directory)
    assert read.vocab_size == config.vocab_size and len(read.marker_ids) == len(Marker)
    return read.vocab_size


def _special_ids(config: Config) -> dict[str, int]:
    """Spelling → id: the named ones where config.json has them, the markers around the end of the turn."""
    end = config.eos_token_id[0] if config.eos_token_id else config.vocab_size - len(Marker) + 1
    others = [marker for marker in Marker if marker is not Marker.END_OF_TURN]
    ids: dict[str, int] = {Marker.END_OF_TURN: end}
    free = (id for id in itertools.chain(range(end + 1, config.vocab_size), range(end - 1, -1, -1)))
    named = {_PAD: config.pad_token_id, _BOS: config.bos_token_id}
    taken = {end, *(id for id in named.values() if id is not None)}
    for spelling, id in [*named.items(), *((marker, None) for marker in others), (_UNK, None)]:
        chosen = id if id is not None and id not in ids.values() else next(i for i in free if i not in taken)
        ids[spelling] = chosen
        taken.add(chosen)
    return ids


def _pieces() -> Iterator[tuple[str, tuple[str, str] | None]]:
    """Entries in the order of their merges, as byte-level BPE spells them: (piece, what it is merged of)."""
    spelled = byte_alphabet()
    yield from ((spelled[byte], None) for byte in range(256))
    characters = [spelled[ord(character)] for character in _CHARACTERS]
    words = [character for character in characters if character != spelled[ord(" ")]]
    pairs = [(first, second) for first in characters for second in words]
    yield from ((first + second, (first, second)) for first, second in pairs)
    for first, second in pairs:
        yield from ((first + second + third, (first + second, third)) for third in words)
    for (first, second), (third, fourth) in itertools.product(pairs, pairs):
        if third in words:
            yield first + second + third + fourth, (first + second, third + fourth)


def _tokenizer(size: int, special: dict[str, int]) -> dict[str, Any]:
    """tokenizer.json of so many entries."""
    spelling = {id: text for text, id in special.items()}
    if size < 256 + len(special):
        raise RandomModelError(f"a vocabulary of {size} has no room for 256 bytes and {len(special)} special tokens")
    pieces = _pieces()
    vocabulary: dict[str, int] = {}
    merges = []
    for id in range(size):
        if id in spelling:
            vocabulary[spelling[id]] = id
            continue
        piece, parts = next(pieces)
        vocabulary[piece] = id
        if parts:
            merges.append(list(parts))
    added = [
        {"id": id, "content": text}
        | {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for id, text in sorted(spelling.items())
    ]
    split = {"type": "Split", "pattern": {"Regex": _PIECES}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": model,
    }


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the files go")
    parser.add_argument("--config", type=Path, default=NORTH, help="config.json (default: North Mini Code)")


def run(options: argparse.Namespace) -> None:
    try:
        entries = write_model(options.directory, options.config)
    except RandomModelError as error:
        raise SystemExit(f"error: {error}") from None
    size = sum(file.stat().st_size for file in options.directory.iterdir())
    print(f"{options.directory}: {entries} entries, {size / 1e6:.1f} MB")

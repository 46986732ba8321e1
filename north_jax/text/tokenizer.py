"""Text to token ids and back, around the `tokenizers` package.

Ordinary text and special tokens are kept apart: `encode_text` cannot produce a special token whatever its text spells,
and the special tokens are looked up by their spelling, never by a remembered number.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from .markers import Marker
from .pieces import PieceDecoder

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenizerError(ValueError):
    """A tokenizer's files are missing, malformed, or lack a token that is needed."""


class Tokenizer:
    """The tokenizer of a checkpoint.

    `special` maps the id of every added token (`added_tokens` in tokenizer.json, marked "special" or not) to its
    spelling. `control` are those of them that are never part of an answer's text: cmd4 markers, the named tokens, and
    what is marked special. `vocab_size` is one more than the largest id.
    """

    def __init__(self, backend: tokenizers.Tokenizer, named: Mapping[str, str] | None = None) -> None:
        """`named` gives the spelling behind "bos_token", "eos_token", …; each must be in the vocabulary."""
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special: Mapping[int, str] = MappingProxyType({id: token.content for id, token in sorted(added.items())})
        try:
            self._pieces = PieceDecoder.from_state(backend.decoder)
        except ValueError as error:
            raise TokenizerError(str(error)) from None
        self.named: Mapping[str, str] = MappingProxyType(dict(named or {}))
        self.bos_id, self.eos_id, self.pad_id = (self._named_id(name) for name in _NAMED[:3])
        control = {*Marker, *self.named.values(), *(token.content for token in added.values() if token.special)}
        self.control: Mapping[int, str] = MappingProxyType({id: t for id, t in self.special.items() if t in control})
        # The same model, shared and not copied, but without any added token. The backend's own switch
        # (`encode_special_tokens`) leaves added tokens that are not marked special to be matched in text.
        self._plain = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._plain.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._plain.pre_tokenizer = backend.pre_tokenizer
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Reads tokenizer.json, and tokenizer_config.json (or special_tokens_map.json) for the named tokens.

        Raises TokenizerError naming the file or the token that is wrong.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{directory} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises bare Exception
            raise TokenizerError(f"{file}: {error}") from None
        named: dict[str, str] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the latter wins
            named.update(_named_tokens(read_json_object(directory / name)))
        return cls(backend, named)

    @functools.cached_property
    def marker_ids(self) -> Mapping[Marker, int]:
        """The id of every cmd4 marker. Raises TokenizerError naming those the vocabulary lacks."""
        known = {spelling: id for id, spelling in self.special.items()}
        missing = [marker.value for marker in Marker if marker.value not in known]
        if missing:
            raise TokenizerError(f"the tokenizer lacks the chat markers {', '.join(missing)}")
        return MappingProxyType({marker: known[marker.value] for marker in Marker})

    def special_id(self, spelling: str) -> int:
        """The id of the added token spelled so. Raises TokenizerError when there is none."""
        id = self._backend.token_to_id(spelling)
        if id is None or id not in self.special:
            raise TokenizerError(f"the tokenizer has no special token {spelling!r}")
        return id

    def encode_text(self, text: str) -> list[int]:
        """The ids of `text` as ordinary text: no special token, no BOS. Lone surrogates count as U+FFFD."""
        text = scrub_surrogates(text)
        [encoding] = self._plain.encode_batch_fast([text], add_special_tokens=False)  # without offsets: half the time
        ids: list[int] = encoding.ids
        if self.special.keys().isdisjoint(ids):
            return ids
        return self._without_special(text, ids, self._plain.encode(text, add_special_tokens=False).offsets)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of `ids`; invalid UTF-8 becomes U+FFFD. `skip_special` leaves out the tokens in `control`.

        Ids without a token (the embedding may have more rows than the vocabulary) stand for nothing.
        """
        skipped: Container[int] = self.control if skip_special else ()
        data = b"".join([self.token_bytes(id) for id in ids if id not in skipped])
        if self.strips_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for, maybe part of a character; a special token's spelling; b"" for an unused id."""
        data = self._bytes.get(id)
        if data is None:
            if id in self.special:
                data = self.special[id].encode()
            else:
                piece = self._backend.id_to_token(id) if id >= 0 else None
                data = b"" if piece is None else self._pieces.to_bytes(piece)
            self._bytes[id] = data
        return data

    @property
    def strips_first_space(self) -> bool:
        """Whether decoding drops one space at the beginning of the text (SentencePiece vocabularies)."""
        return self._pieces.strips_first_space

    def _named_id(self, name: str) -> int | None:
        if name not in self.named:
            return None
        id = self._backend.token_to_id(self.named[name])
        if id is None:
            raise TokenizerError(f"{name} {self.named[name]!r} is not in the tokenizer's vocabulary")
        return id

    def _without_special(self, text: str, ids: list[int], offsets: list[tuple[int, int]]) -> list[int]:
        """Respells what the model itself turned into a special token (it may take whole words from its vocabulary)."""
        respelled: list[int] = []
        for id, (start, end) in zip(ids, offsets, strict=True):
            if id not in self.special:
                respelled.append(id)
                continue
            for character in scrub_surrogates(text)[start:end]:
                respelled += self._plain.encode(character, add_special_tokens=False).ids
        if not self.special.keys().isdisjoint(respelled):
            raise TokenizerError("the tokenizer has no ordinary tokens for a text that spells a special token")
        return respelled


def scrub_surrogates(text: str) -> str:
    """`text` as valid Unicode: surrogate pairs joined, lone surrogates (possible in JSON) replaced by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file, {} when there is no such file. Raises TokenizerError naming the file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file}: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: expected a JSON object")
    return value


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named tokens of a tokenizer_config.json, where each is a string or an object with its `content`."""
    named = {}
    for name in _NAMED:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            named[name] = token
    return named

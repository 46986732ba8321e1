"""From a vocabulary entry, as tokenizer.json spells it, to the bytes it stands for."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_SPACE = "\u2581"  # SentencePiece's visible space
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in visible}
    hidden = (byte for byte in range(256) if byte not in visible)
    alphabet.update((chr(0x100 + rank), byte) for rank, byte in enumerate(hidden))
    return alphabet


_BYTE_OF = _byte_alphabet()


def byte_alphabet() -> dict[int, str]:
    """Byte → the character that spells it in byte-level BPE."""
    return {byte: character for character, byte in _BYTE_OF.items()}


@dataclass(frozen=True)
class PieceDecoder:
    """How a tokenizer's decoder reads its pieces: byte-level BPE, or SentencePiece's visible spaces and byte pieces."""

    byte_level: bool
    byte_pieces: bool = False  # "<0x0A>" is the byte 0x0A
    strips_first_space: bool = False  # the space that encoding put before the text is taken away again

    @classmethod
    def from_state(cls, decoder: Any) -> PieceDecoder:
        """Reads a `tokenizers` decoder. Raises ValueError naming a kind whose tokens have no bytes of their own."""
        if decoder is None:
            raise ValueError("tokenizer.json has no decoder")
        state = json.loads(decoder.__getstate__())
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        kinds = {step["type"]: step for step in steps}
        if set(kinds) == {"ByteLevel"}:
            return cls(byte_level=True)
        known = {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
        unknown = sorted(set(kinds) - known)
        if unknown or not ({"Metaspace", "Replace"} & set(kinds)):
            raise ValueError(f"unsupported decoder in tokenizer.json: {', '.join(unknown or sorted(kinds))}")
        for kind, expected in _EXPECTED.items():
            step = kinds.get(kind, expected)
            if any(step.get(key) != value for key, value in expected.items()):
                raise ValueError(f"unsupported {kind} decoder in tokenizer.json: {json.dumps(step)}")
        prepends = "Metaspace" in kinds and kinds["Metaspace"].get("prepend_scheme", "always") != "never"
        return cls(
            byte_level=False, byte_pieces="ByteFallback" in kinds, strips_first_space="Strip" in kinds or prepends
        )

    def to_bytes(self, piece: str) -> bytes:
        """The bytes of an ordinary piece (not of an added token, which is spelled as it is)."""
        if self.byte_level:
            try:
                return bytes(_BYTE_OF[character] for character in piece)
            except KeyError:  # a piece outside the byte alphabet is spelled as it is
                return piece.encode()
        if self.byte_pieces and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return piece.replace(_SPACE, " ").encode()


_EXPECTED: dict[str, dict[str, Any]] = {
    "Metaspace": {"replacement": _SPACE},
    "Replace": {"pattern": {"String": _SPACE}, "content": " "},
    "Strip": {"content": " ", "start": 1, "stop": 0},
}

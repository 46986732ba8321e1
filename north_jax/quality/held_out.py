"""Text that North Nano never saw in training: a part of CPython's standard library, and excerpts of it."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np

from ..text import Tokenizer

HELD_OUT = Path(__file__).parent / "heldout.jsonl.xz"
"""49 files of CPython 3.13.0, under the licence beside them. The model card says how they were chosen."""


def held_out_texts(path: Path = HELD_OUT) -> list[tuple[str, str]]:
    """Texts to measure on: (path, text) of each.

    Args:
      path: JSON lines with "path" and "text", compressed by xz; or a folder, of which the Python files are taken.

    Raises:
      ValueError: the file is something else, or there is no text.
      OSError: it cannot be read.
    """
    if path.is_dir():
        files = sorted(path.rglob("*.py"))
        texts = [(file.relative_to(path).as_posix(), file.read_text(encoding="utf-8")) for file in files]
    else:
        try:
            with lzma.open(path, "rt", encoding="utf-8") as file:
                rows = [json.loads(line) for line in file]
            texts = [(row["path"], row["text"]) for row in rows]
        except (lzma.LZMAError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not JSON lines with path and text, compressed by xz: {error}") from None
    if not any(text for _, text in texts):
        raise ValueError(f"{path}: no text to measure on")
    return texts


def excerpts(
    tokenizer: Tokenizer, texts: list[tuple[str, str]], *, count: int, length: int, seed: int
) -> tuple[np.ndarray, int]:
    """Pieces of texts, each from the beginning of a line on, every line as likely as any other.

    Args:
      tokenizer: the model's.
      texts: of `held_out_texts`.
      count: N, pieces.
      length: T, tokens of each.
      seed: the same one gives the same pieces.

    Returns:
      tokens [N, 1 + T] int32, a BOS token before each piece, and how many bytes of text the N · T tokens stand for.

    Raises:
      ValueError: there are too few lines that so many tokens follow.
    """
    rng = np.random.default_rng(seed)
    lines = [(number, place) for number, (_, text) in enumerate(texts) for place in line_starts(text)]
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    pieces: list[list[int]] = []
    for number in rng.permutation(len(lines)).tolist():
        text, place = lines[number]
        # At most 16 bytes a token are looked at: a tokenizer that needs longer text gives another piece.
        tokens = tokenizer.encode_text(texts[text][1][place : place + 16 * length])[:length]
        if len(tokens) == length:
            pieces.append([*start, *tokens])
        if len(pieces) == count:
            break
    if len(pieces) < count:
        raise ValueError(f"the held-out text has {len(pieces)} pieces of {length} tokens, {count} are needed")
    ids = np.array(pieces, np.int32)
    size = sum(len(tokenizer.token_bytes(token)) for token in ids[:, len(start) :].ravel().tolist())
    return ids, size


def line_starts(text: str) -> list[int]:
    """Where lines begin, in characters."""
    ends = [place + 1 for place, character in enumerate(text[:-1]) if character == "\n"]
    return [0, *ends] if text else []

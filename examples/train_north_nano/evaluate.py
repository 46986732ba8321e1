"""Compare North Nano with `xz -9` on held-out files of the standard library, in bits per byte.

    python -m examples.train_north_nano.evaluate --model north_jax/nano

The model pays for every token of a file and for the token that ends it; only BOS is given. Long texts are read through
a window of `--context` tokens that advances by half of it, so that each token but the first ones sees at least half a
window of what came before.
"""

import argparse
import functools
import json
import lzma
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import north_jax
from north_jax.config import Config
from north_jax.forward_pass import hidden_states
from north_jax.layers import Array, Params, head
from north_jax.quality.held_out import HELD_OUT, held_out_texts
from north_jax.text import Tokenizer

from .train_tokenizer import EOS

type Losses = Callable[[np.ndarray], np.ndarray]  # tokens [B, T + 1] -> nats of each next token [B, T]

SHORTEST = 512  # windows are padded to a power of two times this, and batches to full, so that few shapes compile


def encode_files(tokenizer: Tokenizer, texts: Iterable[str]) -> list[np.ndarray]:
    """Each text as [length] int32: BOS, its tokens, EOS."""
    end = tokenizer.special_id(EOS)
    return [np.array([tokenizer.bos_id, *tokenizer.encode_text(text), end], np.int32) for text in texts]


def next_token_losses(hidden: Callable[[Array], Array], config: Config, params: Params, tokens: Array) -> Array:
    """Nats of every next token: tokens [B, T + 1] → [B, T] float32, given the hidden states of tokens [B, T]."""
    logits = head(config, params, hidden(tokens[:, :-1]))
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def windows(ids: np.ndarray, context: int, stride: int) -> Iterator[tuple[np.ndarray, int]]:
    """(tokens [≤ context + 1], how many of the last to score), so that every token but the first is scored once."""
    scored = 1
    while scored < len(ids):
        end = min(max(scored + stride, context + 1), len(ids))
        yield ids[max(0, end - context - 1) : end], end - scored
        scored = end


def nats(losses: Losses, ids: np.ndarray, context: int, stride: int, batch: int) -> float:
    """Total nats of a token sequence after its first token."""
    by_shape: dict[int, list[tuple[np.ndarray, int]]] = {}
    for window, count in windows(ids, context, stride):
        size = min(context, SHORTEST << max(0, math.ceil(math.log2((len(window) - 1) / SHORTEST))))
        by_shape.setdefault(size, []).append((window, count))
    total = 0.0
    for size, items in by_shape.items():
        for start in range(0, len(items), batch):
            group = items[start : start + batch]
            tokens = np.zeros((batch, size + 1), np.int32)
            for row, (window, _) in enumerate(group):
                tokens[row, : len(window)] = window
            found = losses(tokens)
            for row, (window, count) in enumerate(group):
                total += float(np.sum(found[row, len(window) - 1 - count : len(window) - 1], dtype=np.float64))
    return total


def bits_per_byte(
    losses: Losses, sequences: list[np.ndarray], sizes: list[int], context: int, stride: int, batch: int = 1
) -> list[float]:
    """Bits per byte of each sequence, scored by itself; `sizes` are their texts' lengths in bytes."""
    return [
        nats(losses, ids, context, stride, batch) / math.log(2) / size
        for ids, size in zip(sequences, sizes, strict=True)
    ]


def xz_bits_per_byte(data: bytes) -> float:
    """What `xz -9` needs."""
    return 8 * len(lzma.compress(data, preset=9)) / len(data)


def compare(
    losses: Losses, tokenizer: Tokenizer, files: list[tuple[str, str]], context: int, batch: int
) -> dict[str, float]:
    """Bits per byte of model and `xz -9`: the files as one stream, and the mean over the files one by one."""
    texts = [text.encode() for _, text in files]
    sequences = encode_files(tokenizer, (text for _, text in files))
    stride = context // 2
    stream = np.concatenate(sequences)
    alone = bits_per_byte(losses, sequences, [len(text) for text in texts], context, stride, batch)
    joined = b"".join(texts)
    return {
        "files": len(files),
        "bytes": len(joined),
        "tokens": len(stream),
        "stream_model": bits_per_byte(losses, [stream], [len(joined)], context, stride, batch)[0],
        "stream_xz": xz_bits_per_byte(joined),
        "files_model": float(np.mean(alone)),
        "files_xz": float(np.mean([xz_bits_per_byte(text) for text in texts])),
        "files_model_worst_ratio": max(
            model / xz_bits_per_byte(text) for model, text in zip(alone, texts, strict=True)
        ),
    }


def loss_by_position(losses: Losses, stream: np.ndarray, length: int, parts: int) -> list[float]:
    """Mean nats per token in each of `parts` equal ranges of positions, over whole windows of `length` tokens."""
    count = (len(stream) - 1) // length
    rows = [losses(stream[None, i * length : (i + 1) * length + 1])[0] for i in range(count)]
    return [float(part) for part in np.mean(np.stack(rows).reshape(count, parts, -1), axis=(0, 2))]


def model_losses(config: Config, params: Params) -> Losses:
    """The `Losses` of a checkpoint, through the project's whole-sequence forward."""

    @jax.jit
    def run(params: Params, tokens: Array) -> Array:
        hidden = functools.partial(hidden_states, config, params)
        return next_token_losses(hidden, config, params, tokens)

    return lambda tokens: np.asarray(run(params, tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--held-out", type=Path, default=HELD_OUT, help="files to measure on")
    parser.add_argument("--context", type=int, default=4096, help="tokens that the model sees at once")
    parser.add_argument("--batch", type=int, default=1, help="windows computed at once")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    model = north_jax.load(arguments.model)
    tokenizer = Tokenizer.from_dir(arguments.model)
    losses = model_losses(model.config, model.params)
    files = held_out_texts(arguments.held_out)
    figures: dict[str, object] = dict(compare(losses, tokenizer, files, arguments.context, arguments.batch))
    stream = np.concatenate(encode_files(tokenizer, (text for _, text in files)))
    length = model.config.max_position_embeddings
    figures["context"] = arguments.context
    figures["nats_by_position"] = loss_by_position(losses, stream, length, parts=8)
    text = json.dumps(figures, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

"""North Nano needs fewer bits than `xz -9` on files it was not trained on."""

from pathlib import Path

import numpy as np
import pytest

import north_jax
import north_jax.nano
from examples.train_north_nano import evaluate
from north_jax.checkpoint import Checkpoint
from north_jax.quality.held_out import held_out_texts
from north_jax.text import Tokenizer

NANO = Path(north_jax.nano.__file__).parent
SAMPLE = "sched.py", "dbm/sqlite3.py", "importlib/_abc.py"  # the whole set takes an hour on a CPU


@pytest.fixture(scope="module")
def nano() -> Checkpoint:
    return north_jax.load("north-nano")


@pytest.mark.slow
def test_fewer_bits_than_xz_on_a_sample(nano: Checkpoint) -> None:
    """Each file by itself, and together even against `xz -9` of the joined files, with a window of only 512 tokens."""
    held_out = dict(held_out_texts())
    texts = [held_out[path] for path in SAMPLE]
    sizes = [len(text.encode()) for text in texts]
    sequences = evaluate.encode_files(Tokenizer.from_dir(NANO), texts)
    losses = evaluate.model_losses(nano.config, nano.params)
    bits = evaluate.bits_per_byte(losses, sequences, sizes, context=512, stride=256)
    for path, text, model in zip(SAMPLE, texts, bits, strict=True):
        xz = evaluate.xz_bits_per_byte(text.encode())
        print(f"{path}: {model:.3f} bits per byte, xz -9 {xz:.3f}")
        assert model < xz
    assert np.average(bits, weights=sizes) < evaluate.xz_bits_per_byte("".join(texts).encode())


@pytest.mark.slow
def test_whole_held_out_set(nano: Checkpoint) -> None:
    losses = evaluate.model_losses(nano.config, nano.params)
    figures = evaluate.compare(losses, Tokenizer.from_dir(NANO), held_out_texts(), context=4096, batch=1)
    print(figures)
    assert figures["stream_model"] < figures["stream_xz"]
    assert figures["files_model"] < figures["files_xz"]
    card = (NANO / "MODEL_CARD.md").read_text()
    for name in ("stream_model", "stream_xz", "files_model", "files_xz"):
        assert f"{figures[name]:.2f}" in card

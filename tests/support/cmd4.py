"""A small byte-level BPE tokenizer with the cmd4 markers, for tests of text and chat."""

from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

import north_jax
from north_jax.text import Marker, Tokenizer

NANO_TEMPLATE = Path(north_jax.__file__).parent / "nano" / "chat_template.jinja"
BOS, PAD = "<BOS_TOKEN>", "<PAD>"
NAMED = {"bos_token": BOS, "eos_token": Marker.END_OF_TURN.value, "pad_token": PAD}
_LINES = [
    "def add(a, b):\n    return a + b\n",
    "for name in names:\n    print(name, end='')\n",
    'Call the tool with {"path": "main.py", "text": "<|"} and read the result.',
    "Größe 日本語 naïve 😀 text",
]


def byte_level_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE; every second marker is an added token that is not marked special, as real checkpoints have it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=[PAD, "<UNK>", BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(_LINES * 4, trainer)
    for index, marker in enumerate(Marker):
        backend.add_tokens([AddedToken(marker.value, special=index % 2 == 0, normalized=False)])
    return backend


def cmd4_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_backend(), NAMED)

"""Train North Nano's byte-level BPE vocabulary and write its tokenizer files.

python -m examples.train_north_nano.train_tokenizer --corpus .nano/corpus.jsonl.xz --out north_jax/nano
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from north_jax.quality.held_out import held_out_texts
from north_jax.text import Marker

from .corpus import read_documents

VOCAB_SIZE = 3968
PAD, UNK, BOS, EOS = "<PAD>", "<UNK>", "<BOS_TOKEN>", "<EOS_TOKEN>"
SPECIAL = [PAD, UNK, BOS, EOS, *Marker]
# What BPE may merge: line ends with the indentation that follows; a word with one character before it (a space, a dot,
# an underscore …); one digit; punctuation with a space before it; other white space.
PIECES = r"\s*\n[ \t]*|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"


def sample(corpus: Path, every: int) -> Iterator[str]:
    """The texts of the standard library, and of every `every`-th file of the packages."""
    for number, document in enumerate(read_documents(corpus)):
        if document.source.startswith("cpython") or number % every == 0:
            yield document.text


def build(texts: Iterator[str], vocab_size: int = VOCAB_SIZE, pieces: str = PIECES) -> Tokenizer:
    """A byte-level BPE tokenizer of `vocab_size` entries, the special tokens first, all 256 bytes among the rest."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_files(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": Marker.END_OF_TURN.value,
        "pad_token": PAD,
        "unk_token": UNK,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def bytes_per_token(tokenizer: Tokenizer) -> float:
    """Bytes of the held-out files for each of their tokens."""
    texts = [text for _, text in held_out_texts()]
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False))
    return sum(len(text.encode()) for text in texts) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="corpus.jsonl.xz, as corpus.py writes it")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--every", type=int, default=6, help="use every n-th file of the packages")
    arguments = parser.parse_args()
    tokenizer = build(sample(arguments.corpus, arguments.every))
    write_files(tokenizer, arguments.out)
    print(f"{tokenizer.get_vocab_size()} entries, {bytes_per_token(tokenizer):.3f} bytes per token of held-out text")


if __name__ == "__main__":
    main()

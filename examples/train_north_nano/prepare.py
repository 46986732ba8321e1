"""Turn the corpus into token streams: the standard library, the packages, and conversations made from both.

    python -m examples.train_north_nano.prepare --corpus .nano/corpus.jsonl.xz --nano north_jax/nano --out tokens.npz

Documents are shuffled and joined; each begins with BOS and ends with EOS, a conversation with its last turn.
"""

import argparse
import itertools
import multiprocessing
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from north_jax.text import ChatTemplate, Marker, Tokenizer

from .conversations import Conversation, conversation
from .corpus import Document, read_documents
from .functions import functions
from .train_tokenizer import EOS

STREAMS = "stdlib", "packages", "conversations"
FUNCTIONS_PER_FILE = 12
BATCH = 64  # documents handed to a worker at a time


class Encoder:
    """Documents and conversations to token ids."""

    def __init__(self, nano: Path) -> None:
        self.tokenizer = Tokenizer.from_dir(nano)
        self.template = ChatTemplate.from_dir(nano, self.tokenizer)
        self._bos, self._eos = self.tokenizer.bos_id, self.tokenizer.special_id(EOS)
        markers = self.tokenizer.marker_ids
        self._chatbot = markers[Marker.CHATBOT]
        self._no_thinking = [markers[Marker.START_THINKING], markers[Marker.END_THINKING]]

    def document(self, text: str) -> np.ndarray:
        """[length] uint16: BOS, the text, EOS."""
        return np.array([self._bos, *self.tokenizer.encode_text(text), self._eos], np.uint16)

    def conversation(self, talk: Conversation) -> np.ndarray:
        """[length] uint16: the conversation as the model sees it once it has given its last answer."""
        ids = self.template.encode(talk.messages, talk.tools, add_generation_prompt=False)
        if not talk.reasoning:  # the generation prompt closed the thinking block before the answer
            last = len(ids) - ids[::-1].index(self._chatbot)
            ids[last:last] = self._no_thinking
        return np.array(ids, np.uint16)


_encoder: Encoder


def _start(nano: Path) -> None:
    global _encoder
    _encoder = Encoder(nano)


def _encode(documents: list[Document]) -> tuple[list[tuple[str, np.ndarray]], list[np.ndarray]]:
    """([(stream, ids)] of documents, [ids] of conversations); what is drawn depends on the document alone."""
    raw, talks = [], []
    for document in documents:
        stream = "stdlib" if document.source.startswith("cpython") else "packages"
        raw.append((stream, _encoder.document(document.text)))
        rng = random.Random(document.path)
        found = list(functions(document.path, document.text))
        for function in rng.sample(found, min(len(found), FUNCTIONS_PER_FILE)):
            talks.append(_encoder.conversation(conversation(function, rng)))
    return raw, talks


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    while batch := list(itertools.islice(documents, BATCH)):
        yield batch


def prepare(corpus: Path, nano: Path, every: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Every stream as one uint16 array; of every `every`-th document."""
    parts: dict[str, list[np.ndarray]] = {stream: [] for stream in STREAMS}
    documents = itertools.islice(read_documents(corpus), 0, None, every)
    with multiprocessing.get_context("spawn").Pool(initializer=_start, initargs=(nano,)) as pool:
        for raw, talks in pool.imap(_encode, _batches(documents)):
            for stream, ids in raw:
                parts[stream].append(ids)
            parts["conversations"] += talks
    rng = random.Random(seed)
    for stream in STREAMS:
        rng.shuffle(parts[stream])
    return {stream: np.concatenate(parts[stream]) for stream in STREAMS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="corpus.jsonl.xz, as corpus.py writes it")
    parser.add_argument("--nano", type=Path, required=True, help="folder with the tokenizer and the chat template")
    parser.add_argument("--out", type=Path, required=True, help="the .npz to write")
    parser.add_argument("--every", type=int, default=1, help="use only every n-th file, for a trial")
    arguments = parser.parse_args()
    streams = prepare(arguments.corpus, arguments.nano, arguments.every)
    np.savez(arguments.out, allow_pickle=False, **streams)
    print(", ".join(f"{name} {ids.size:,} tokens" for name, ids in streams.items()))


if __name__ == "__main__":
    main()

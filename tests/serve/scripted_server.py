"""The server with a scripted engine as a process of its own: `python -m tests.serve.scripted_server CHECKPOINT …`.

Prints its port, then serves until a signal, as the product does. Every answer is `--tokens` tokens of text, delivered
`--step-ms` apart.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import sys
from pathlib import Path

from north_jax.text import Marker, Tokenizer
from serve.app import TextSide, make_service
from serve.lifecycle import serve_until_signal
from serve.listen import bind
from tests.serve.scripted_engine import ScriptedEngine
from tests.serve.server_thread import MODEL, VOCABULARY
from tests.support import tiny_config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--drain-seconds", type=float, default=10.0)
    options = parser.parse_args()
    logging.basicConfig(level="INFO", stream=sys.stderr)

    tokenizer = Tokenizer.from_dir(options.checkpoint)
    text = itertools.islice(itertools.cycle(tokenizer.encode_text("def add(a, b): return a + b")), options.tokens)
    opening = [tokenizer.marker_ids[marker] for marker in (Marker.END_THINKING, Marker.START_TEXT)]
    engine = ScriptedEngine(
        [*opening, *text],
        max_context=options.tokens + 4096,
        max_queue=10_000,
        step_seconds=options.step_ms / 1e3,
        remember=False,
    )
    engine.start()
    listener = bind("127.0.0.1", 0)
    config = tiny_config(vocab_size=VOCABULARY, eos_token_id=0)
    asyncio.run(
        serve_until_signal(
            lambda: make_service(MODEL, TextSide.read(options.checkpoint), config, engine),
            listener,
            drain_seconds=options.drain_seconds,
            ready=lambda: print(listener.getsockname()[1], flush=True),
        )
    )


if __name__ == "__main__":
    main()

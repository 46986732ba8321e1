"""The whole server on a real engine whose page pool is the smallest legal one, under more than it can hold."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import openai
import pytest
from support import tiny_config, tiny_params

from north_jax.decoding import make_decoder
from north_jax.generation import generate
from north_jax.kv_cache import pages_for, ring_entries
from north_jax.sampling import SamplingParams
from north_jax.text import Tokenizer
from serve.engine.engine import JaxEngine
from serve.engine.memory import plan_cache
from tests.serve.server_thread import MODEL, VOCABULARY, RunningServer, running_server

CONFIG = tiny_config(
    vocab_size=VOCABULARY,
    eos_token_id=0,
    num_hidden_layers=3,
    layer_types=["full_attention", "sliding_attention", "full_attention"],
    mlp_layer_types=["dense", "sparse", "sparse"],
)
CLIENTS = 24
REQUESTS = 8  # of each client


class Outcome(Counter[str]):
    """Counts what became of requests; `tokens` keeps the texts of those that ended."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[tuple[int, str]] = []
        self.lock = threading.Lock()

    def note(self, what: str) -> None:
        with self.lock:
            self[what] += 1


def prompt_of(number: int) -> list[int]:
    """Some begin alike."""
    rng = random.Random(number % 5)
    return [rng.randrange(4, 400) for _ in range(rng.choice((30, 90, 150, 300)))] + [5 + number]


def client(server: RunningServer, number: int, outcome: Outcome) -> None:
    rng = random.Random(number)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=300) as api:
        for _ in range(REQUESTS):
            which = rng.randrange(12)
            leaves = rng.random() < 0.25
            try:
                text, finish = "", None
                # ignore_eos: a random model's stop token would end some of them early
                with api.completions.create(
                    model=MODEL,
                    prompt=prompt_of(which),
                    max_tokens=60,
                    seed=which,
                    stream=True,
                    extra_body={"ignore_eos": True},
                ) as stream:
                    for number_of_chunk, chunk in enumerate(stream):
                        text += chunk.choices[0].text
                        finish = chunk.choices[0].finish_reason
                        if leaves and number_of_chunk > rng.randrange(20):
                            break
                if leaves:
                    outcome.note("left")
                    continue
                assert finish == "length"
                outcome.texts.append((which, text))
                outcome.note("ended")
            except openai.RateLimitError as error:
                assert int(error.response.headers["retry-after"]) >= 1
                outcome.note("refused")
                time.sleep(rng.random() * 0.3)


@pytest.mark.slow
def test_overload_on_the_smallest_page_pool(text_checkpoint: Path) -> None:
    params = tiny_params(CONFIG)
    plan = plan_cache(CONFIG, jnp.dtype(jnp.float32), slots=4, max_context=512, budget=1 << 24)
    plan = replace(plan, full_pages=pages_for(512), sliding_pages=ring_entries(CONFIG, 512, plan.chunk))
    decoder = make_decoder(CONFIG, params, backend="jax", slots=plan.slots, max_context=plan.max_context)
    engine = JaxEngine(CONFIG, params, plan, decoder, max_queue=8)
    outcome = Outcome()
    failures: list[BaseException] = []
    with running_server(engine, text_checkpoint) as server:  # type: ignore[arg-type]

        def run(number: int) -> None:
            try:
                client(server, number, outcome)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        deadline = time.monotonic() + 20
        while (stats := engine.stats()).running + stats.queued and time.monotonic() < deadline:
            time.sleep(0.05)
        # A stream that is running when SIGTERM comes ends with what it would have said.
        last = server.client.completions.create(
            model=MODEL, prompt=prompt_of(1), max_tokens=60, seed=1, stream=True, extra_body={"ignore_eos": True}
        )
        iterator = iter(last)
        text = next(iterator).choices[0].text
        server.stop()
        text += "".join(chunk.choices[0].text for chunk in iterator)
        outcome.texts.append((1, text))
    print(dict(outcome), stats)
    assert not failures, failures
    assert sum(outcome.values()) == CLIENTS * REQUESTS
    assert outcome["ended"] and outcome["left"] and outcome["refused"], outcome
    assert stats.preemptions and stats.cached_tokens
    for now in (stats, engine.stats()):
        assert (now.running, now.queued, now.pages_used, now.failure) == (0, 0, 0, None)

    tokenizer = Tokenizer.from_dir(text_checkpoint)
    alone = {}
    for which, text in outcome.texts:
        if which not in alone:
            tokens = generate(CONFIG, params, prompt_of(which), 60, SamplingParams(top_p=0.95, seed=which), ())
            alone[which] = tokenizer.decode(list(tokens), skip_special=True)
        assert text == alone[which]

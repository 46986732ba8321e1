"""`python -m serve` answers the same text on either backend: North Nano, several chats at once, drawn by seed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
import pytest

import ffi

REQUESTS = [
    ("Write a Python function that reverses a list.", 0.0),
    ("Write a Python function `count_words(text)`.", 0.0),
    ("Write a Python function that reverses a list.", 0.8),
    ("Write a class for a bank account.", 1.0),
    ("Write a Python function `is_prime(n)`.", 0.6),
]


@contextmanager
def served(backend: str) -> Iterator[openai.OpenAI]:
    arguments = ["--backend", backend, "--dtype", "float32", "--max-context", "1024", "--slots", "4", "--port", "0"]
    arguments.append("--no-compilation-cache")
    with subprocess.Popen([sys.executable, "-m", "serve", *arguments], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            assert f"backend {backend} on " in server.stdout.readline()
            while not (line := server.stdout.readline()).startswith("ready after "):
                assert line
            address = server.stdout.readline().removeprefix("listening on ").strip()
            with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=120) as client:
                yield client
        finally:
            server.terminate()
    assert server.returncode == 0


def answer(client: openai.OpenAI, text: str, temperature: float, stream: bool) -> str:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": text}]
    fixed = {"model": "north-nano", "max_tokens": 120, "seed": 11, "temperature": temperature, "messages": messages}
    if not stream:
        return client.chat.completions.create(**fixed).choices[0].message.content or ""  # type: ignore[call-overload]
    chunks = client.chat.completions.create(stream=True, **fixed)  # type: ignore[call-overload]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def answers(backend: str) -> list[str]:
    with served(backend) as client, ThreadPoolExecutor(len(REQUESTS)) as pool:
        return list(pool.map(lambda i: answer(client, *REQUESTS[i], stream=i % 2 == 0), range(len(REQUESTS))))


@pytest.mark.slow
@pytest.mark.skipif(not ffi.available("cpu"), reason="nothing compiled")
def test_both_backends_answer_the_same_text() -> None:
    texts = answers("megakernel")
    assert all("def " in text or "class " in text for text in texts), texts
    assert texts == answers("jax")

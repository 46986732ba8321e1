"""Completions of raw text through the openai package."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from north_jax.text import Tokenizer
from tests.serve.api.conftest import ServeScript, Speak
from tests.serve.server_thread import MODEL, VOCABULARY, RunningServer

TEXT = " return a + b\n\nprint(add(1, 2))"


def complete(server: RunningServer, prompt: Any, **settings: Any) -> Any:
    settings = {"model": MODEL, "prompt": prompt, "max_tokens": 100} | settings
    return server.client.completions.create(**settings)


def test_whole_text(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    server = serve_script(TEXT + "<|END_OF_TURN_TOKEN|>")
    answer = complete(server, "def add(a, b):")
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (TEXT, "stop", 0)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    prompt = [tokenizer.bos_id, *tokenizer.encode_text("def add(a, b):")]
    assert server.engine.requests[0].prompt == tuple(prompt)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(tokenizer.encode_text(TEXT))


def test_text_never_becomes_a_special_token(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    server = serve_script(TEXT)
    complete(server, "<|END_OF_TURN_TOKEN|>")
    assert tokenizer.eos_id not in server.engine.requests[0].prompt


def test_markers_are_left_out_of_the_text(serve_script: ServeScript) -> None:
    assert complete(serve_script("a<|END_THINKING|>b<|START_TEXT|>c"), "x").choices[0].text == "abc"


def test_the_default_limit_is_openai_s(serve_script: ServeScript) -> None:
    server = serve_script(TEXT * 10)
    answer: Any = server.client.completions.create(model=MODEL, prompt="x")
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_stream_is_the_whole_text_in_pieces(serve_script: ServeScript) -> None:
    server = serve_script("Größe 😀" + TEXT)
    *chunks, last = complete(server, "x", stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Größe 😀" + TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert last.choices == []
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_several_prompts_and_choices(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    def script(request: Any) -> list[int]:
        return tokenizer.encode_text(f"{tokenizer.decode(request.prompt[1:])}{request.sampling.seed}")

    server = serve_script(script)
    answer = complete(server, ["a", "b"], n=2, seed=5)
    assert [choice.text for choice in answer.choices] == ["a5", "a6", "b5", "b6"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 4
    texts = dict.fromkeys(range(4), "")
    for chunk in complete(server, ["a", "b"], n=2, seed=5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == ["a5", "a6", "b5", "b6"]


def test_token_prompts(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    server = serve_script(TEXT)
    ids = tokenizer.encode_text("def f")
    assert complete(server, ids, echo=True).choices[0].text == "def f" + TEXT
    complete(server, [[1, 2], [3]])
    assert [request.prompt for request in server.engine.requests] == [tuple(ids), (1, 2), (3,)]
    with pytest.raises(openai.BadRequestError) as caught:
        complete(server, [[1], [VOCABULARY]])
    assert caught.value.param == "prompt[1]"


@pytest.mark.parametrize("stream", [True, False])
def test_echo(serve_script: ServeScript, stream: bool) -> None:
    answer = complete(serve_script(TEXT), ["ab", "cd"], echo=True, stream=stream)
    texts = ["", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == ["ab" + TEXT, "cd" + TEXT]


@pytest.mark.parametrize("stream", [True, False])
def test_no_tokens_asked_for(serve_script: ServeScript, stream: bool) -> None:
    server = serve_script(TEXT)
    answer = complete(server, "ab", max_tokens=0, echo=True, stream=stream)
    parts = list(answer) if stream else [answer]
    assert "".join(part.choices[0].text for part in parts) == "ab"
    assert parts[-1].choices[0].finish_reason == "length"
    assert server.engine.requests == []


def test_stop_strings(serve_script: ServeScript) -> None:
    server = serve_script(TEXT + "x" * 500, step_seconds=0.001)
    assert complete(server, "x", stop="\n\n").choices[0].text == " return a + b"
    server.engine.wait_for_cancelled()
    chunks = list(complete(server, "x", stop="\n\n", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " return a + b"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stop_string_in_what_was_held_back_is_the_reason(serve_script: ServeScript, speak: Speak) -> None:
    """The first byte of a character is cut off by the limit, and stands for U+FFFD then."""
    server = serve_script([*speak("ab"), speak("😀")[0]])
    limit = len(speak("ab")) + 1
    [choice] = complete(server, "x", stop="b\ufffd", max_tokens=limit).choices
    assert (choice.text, choice.finish_reason) == ("a", "stop")
    [choice] = complete(server, "x", stop="never", max_tokens=limit).choices
    assert (choice.text, choice.finish_reason) == ("ab\ufffd", "length")


def test_prompt_and_limit_must_fit_together(serve_script: ServeScript, speak: Speak) -> None:
    server = serve_script(TEXT, max_context=50)
    with pytest.raises(openai.BadRequestError) as caught:
        complete(server, "abc", max_tokens=49)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as caught:
        complete(server, ["a", "a" * 100], max_tokens=10)
    assert caught.value.param == "prompt[1]"
    assert server.engine.requests == []


def test_usage_counts_what_the_cache_held_once_a_prompt(serve_script: ServeScript) -> None:
    server = serve_script(TEXT, cached_tokens=64)
    assert complete(server, ["a", "b"], n=2).usage.prompt_tokens_details.cached_tokens == 128

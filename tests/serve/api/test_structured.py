"""Structured output, tool calls that must be, log-probabilities, through the openai package."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from north_jax.text import Tokenizer
from tests.serve.api.conftest import ServeScript, Speak
from tests.serve.api.test_chat import CALLS, HELLO, TOOLS, ask, stream
from tests.serve.api.test_completions import complete
from tests.serve.scripted_engine import logprobs_of

SCHEMA: Any = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
ANSWER = 'Well.<|END_THINKING|><|START_TEXT|>{"n": 5}<|END_TEXT|><|END_OF_TURN_TOKEN|>'
ONE_CALL = (
    'Well.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "read", "parameters": {}}\n]'
    "<|END_ACTION|><|END_OF_TURN_TOKEN|>"
)
NAMED: Any = {"type": "function", "function": {"name": "read"}}


def test_a_schema_is_enforced_after_thinking(serve_script: ServeScript) -> None:
    """The scripted engine fails where its script leaves the grammar."""
    server = serve_script(ANSWER)
    message = ask(server, response_format=FORMAT).choices[0].message
    assert (json.loads(message.content), message.reasoning_content) == ({"n": 5}, "Well.")
    for wrong in (HELLO, ANSWER.replace("5", '"x"'), CALLS, "<|START_TEXT|>" + ANSWER):
        with pytest.raises(openai.InternalServerError, match="the grammar forbids"):
            ask(serve_script(wrong), response_format=FORMAT)


def test_the_schema_is_shown_to_the_model(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    server = serve_script(ANSWER)
    ask(server, response_format=FORMAT)
    ask(server, response_format={"type": "json_object"})
    shown, plain = (tokenizer.decode(request.prompt) for request in server.engine.requests)
    assert json.dumps(SCHEMA) in shown and '"properties"' not in plain
    assert "JSON object" in shown and "JSON object" in plain


def test_the_package_parses_what_it_asked_for(serve_script: ServeScript) -> None:
    import pydantic

    class Answer(pydantic.BaseModel):
        n: int

    client = serve_script(ANSWER).client
    parsed = client.chat.completions.parse(
        model="scripted", messages=[{"role": "user", "content": "x"}], response_format=Answer
    )
    assert parsed.choices[0].message.parsed == Answer(n=5)


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_call_that_must_be(serve_script: ServeScript, choice: Any, reason: str) -> None:
    """A named function ends with "stop": OpenAI's rule."""
    [answer] = ask(serve_script(ONE_CALL), tools=TOOLS, tool_choice=choice).choices
    assert [call.function.name for call in answer.message.tool_calls] == ["read"]
    assert answer.finish_reason == reason
    chunks = stream(serve_script(ONE_CALL), tools=TOOLS, tool_choice=choice)
    assert chunks[-1].choices[0].finish_reason == reason
    with pytest.raises(openai.InternalServerError, match="the grammar forbids"):
        ask(serve_script(HELLO), tools=TOOLS, tool_choice=choice)


def test_a_named_function_is_the_only_one(serve_script: ServeScript) -> None:
    with pytest.raises(openai.InternalServerError, match="the grammar forbids"):
        ask(serve_script(ONE_CALL.replace("read", "list")), tools=TOOLS, tool_choice=NAMED)


def test_calls_in_parallel_can_be_forbidden(serve_script: ServeScript) -> None:
    two = ONE_CALL.replace("}}\n]", '}},\n    {"tool_call_id": "1", "tool_name": "list", "parameters": {}}\n]')
    assert len(ask(serve_script(two), tools=TOOLS).choices[0].message.tool_calls) == 2
    assert len(ask(serve_script(two), tools=TOOLS, tool_choice="required").choices[0].message.tool_calls) == 2
    with pytest.raises(openai.InternalServerError, match="the grammar forbids"):
        ask(serve_script(two), tools=TOOLS, parallel_tool_calls=False)
    assert ask(serve_script(HELLO), tools=TOOLS, parallel_tool_calls=False).choices[0].message.content
    loose: Any = [{"type": "function", "function": {"name": "read", "parameters": {"not": {}}}}]  # not enforced: no 400
    assert ask(serve_script(ONE_CALL), tools=loose, parallel_tool_calls=False).choices[0].message.tool_calls


def test_strict_tools_are_enforced_when_they_are_called(serve_script: ServeScript) -> None:
    strict: Any = [{"type": "function", "function": {"name": "read", "parameters": SCHEMA, "strict": True}}]
    good = ONE_CALL.replace("{}", '{"n": 1}')
    assert ask(serve_script(good), tools=strict).choices[0].finish_reason == "tool_calls"
    with pytest.raises(openai.InternalServerError, match="the grammar forbids"):
        ask(serve_script(ONE_CALL), tools=strict)
    assert ask(serve_script(HELLO), tools=strict).choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
            "response_format.json_schema.schema",
        ),
        (  # nothing but a reference to itself
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}
                ],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
        ({"response_format": FORMAT, "extra_body": {"ignore_eos": True}}, "ignore_eos"),
    ],
)
def test_what_cannot_be_enforced_is_a_400(serve_script: ServeScript, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(serve_script(ANSWER), **fields)
    assert caught.value.param == param


def test_logprobs_of_the_content(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    server = serve_script(HELLO)
    [choice] = ask(server, logprobs=True, top_logprobs=2).choices
    entries = choice.logprobs.content
    said = tokenizer.encode_text("Hello 😀 Größe")
    assert [entry.logprob for entry in entries] == [logprobs_of(token, 2).logprob for token in said]
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(entries)
    assert entries[0].token == tokenizer.decode(said[:1])
    chunks = stream(server, logprobs=True)
    streamed = [e for chunk in chunks for c in chunk.choices if c.logprobs for e in c.logprobs.content]
    assert [(e.token, e.logprob, e.bytes) for e in streamed] == [(e.token, e.logprob, e.bytes) for e in entries]
    assert not any(e.top_logprobs for e in streamed)
    assert ask(server).choices[0].logprobs is None
    assert server.engine.requests[0].sampling.logprobs == 2 and server.engine.requests[2].sampling.logprobs is None


def test_logprobs_of_a_character_that_begins_without_a_marker(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    smile = tokenizer.encode_text("😀")
    assert len(smile) > 1  # its first token is no text yet
    [choice] = ask(serve_script(smile), logprobs=True, extra_body={"reasoning": False}).choices
    assert b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode() == choice.message.content == "😀"


def test_logprobs_end_where_a_stop_string_cuts(serve_script: ServeScript) -> None:
    [choice] = ask(serve_script(HELLO), logprobs=True, stop="Größe").choices
    assert b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode() == choice.message.content


def test_logprobs_of_a_completion(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    text = "Größe 😀 x"
    server = serve_script(text)
    [choice] = complete(server, "x", logprobs=2).choices
    tokens = tokenizer.encode_text(text)
    logged = choice.logprobs
    assert logged.token_logprobs == [logprobs_of(token, 2).logprob for token in tokens]
    assert [len(top) for top in logged.top_logprobs] == [3] * len(tokens)  # the drawn one too
    assert all(token in top for token, top in zip(logged.tokens, logged.top_logprobs, strict=True))
    assert logged.text_offset[0] == 0 and text[logged.text_offset[-1] :] == logged.tokens[-1]
    chunks = complete(server, "x", logprobs=2, stream=True)
    pieces = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for piece in pieces for token in piece.tokens] == logged.tokens
    assert [offset for piece in pieces for offset in piece.text_offset] == logged.text_offset
    none = complete(server, "x", logprobs=0).choices[0].logprobs
    assert none.top_logprobs is None and none.tokens == logged.tokens


def test_the_end_of_the_turn_can_be_ignored(serve_script: ServeScript, speak: Speak) -> None:
    server = serve_script(HELLO + "more")
    answer = ask(server, extra_body={"ignore_eos": True}, max_tokens=len(speak(HELLO)) + 2)
    assert answer.choices[0].finish_reason == "length"
    assert server.engine.requests[0].stop_token_ids == frozenset()
    assert complete(server, "x", max_tokens=5, extra_body={"ignore_eos": True}).choices[0].finish_reason == "length"


@pytest.mark.parametrize("limit", [0, 4])
@pytest.mark.parametrize("spelled", [True, False])
def test_logprobs_of_an_echoed_prompt(
    serve_script: ServeScript, tokenizer: Tokenizer, limit: int, spelled: bool
) -> None:
    """As evaluations ask for them: of every token that the client gave, but one that nothing precedes."""
    server = serve_script("abcdefgh")
    text = "Größe 😀 def"
    tokens = tokenizer.encode_text(text)
    answer = complete(server, text if spelled else tokens, echo=True, logprobs=1, max_tokens=limit)
    [choice] = answer.choices
    said = tokenizer.encode_text("abcdefgh")[:limit]
    assert choice.text == text + tokenizer.decode(said)
    logged = choice.logprobs
    first = logprobs_of(tokens[0], 1).logprob if spelled else None  # a text follows the BOS
    assert logged.token_logprobs == [first, *(logprobs_of(token, 1).logprob for token in (*tokens[1:], *said))]
    assert (logged.top_logprobs[0] is None) == (not spelled) and len(logged.top_logprobs[1]) == 2
    assert logged.text_offset[0] == 0 and len(logged.text_offset) == len(tokens) + limit
    assert [choice.text[offset] for offset in logged.text_offset[len(tokens) :]] == list("abcdefgh"[:limit])
    assert (choice.finish_reason, answer.usage.completion_tokens) == ("length", limit)
    chunks = list(complete(server, text, echo=True, logprobs=1, max_tokens=limit, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    streamed = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
    assert streamed == logged.tokens
    assert chunks[-1].choices[0].finish_reason == "length"

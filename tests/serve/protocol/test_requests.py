"""What a body may say: accepted, refused by name, never ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve.protocol.chat import parse_chat
from serve.protocol.completions import parse_completion, prompts
from serve.protocol.errors import ApiError
from serve.protocol.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, IGNORED
from serve.protocol.sampling import SamplingDefaults, sampling_params, stop_strings

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> bytes:
    return json.dumps(CHAT | fields).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "x"} | fields).encode()


def refusal(parse: Any, body: bytes) -> tuple[str | None, str | None]:
    """The code and the parameter of the error."""
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert caught.value.status == 400
    error = caught.value.body.error
    assert error.type == "invalid_request_error"
    if error.param:
        assert error.param in error.message
    return error.code, error.param


COMMON_REFUSALS = [
    ({"temperature": 2.1}, "decimal_above_max_value", "temperature"),
    ({"temperature": -0.1}, "decimal_below_min_value", "temperature"),
    ({"temperature": "1"}, "invalid_type", "temperature"),
    ({"temperature": True}, "invalid_type", "temperature"),
    ({"top_p": 1.01}, "decimal_above_max_value", "top_p"),
    ({"top_p": -1}, "decimal_below_min_value", "top_p"),
    ({"top_k": -2}, "integer_below_min_value", "top_k"),
    ({"top_k": 1.5}, "invalid_type", "top_k"),
    ({"min_p": 1.5}, "decimal_above_max_value", "min_p"),
    ({"n": 0}, "integer_below_min_value", "n"),
    ({"n": 129}, "integer_above_max_value", "n"),
    ({"seed": 2**64}, "integer_above_max_value", "seed"),
    ({"seed": "x"}, "invalid_type", "seed"),
    ({"max_tokens": -1}, "integer_below_min_value", "max_tokens"),
    ({"max_tokens": 1.5}, "invalid_type", "max_tokens"),
    ({"stop": 3}, "invalid_type", "stop"),
    ({"stop": ["a", 3]}, "invalid_type", "stop[1]"),
    ({"stream": "yes"}, "invalid_type", "stream"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "unknown_parameter", "stream_options.usage"),
    ({"frequency_penalty": 2.5}, "decimal_above_max_value", "frequency_penalty"),
    ({"presence_penalty": -3}, "decimal_below_min_value", "presence_penalty"),
    ({"repetition_penalty": 0}, "decimal_below_min_value", "repetition_penalty"),
    ({"logit_bias": [1]}, "invalid_type", "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "invalid_type", "logit_bias"),
    ({"logprobs": "yes"}, "invalid_type", "logprobs"),
    ({"ignore_eos": 1}, "invalid_type", "ignore_eos"),
    ({"tempreature": 1}, "unknown_parameter", "tempreature"),
    ({"model": None}, "invalid_type", "model"),
]
CHAT_REFUSALS = [
    ({"messages": []}, "empty_array", "messages"),
    ({"messages": "hi"}, "invalid_type", "messages"),
    ({"messages": [{"content": "hi"}]}, "missing_required_parameter", "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "invalid_type", "messages[0].content"),
    ({"messages": [{"role": "user", "content": "hi", "mood": "good"}]}, "unknown_parameter", "messages[0].mood"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "unsupported_parameter",
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "missing_required_parameter", "messages[0].tool_call_id"),
    ({"max_tokens": 0}, "integer_below_min_value", "max_tokens"),
    ({"max_completion_tokens": 0}, "integer_below_min_value", "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 5}, "invalid_value", "max_tokens"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "unsupported_parameter", "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "missing_required_parameter", "tools[0].function.name"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "invalid_value", "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "invalid_value",
        "tool_choice.function.name",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "unsupported_parameter", "tool_choice.type"),
    ({"tool_choice": "maybe"}, "invalid_value", "tool_choice"),
    ({"parallel_tool_calls": "no"}, "invalid_type", "parallel_tool_calls"),
    ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "invalid_value",
        "response_format.json_schema.name",
    ),
    ({"reasoning_effort": "huge"}, "invalid_value", "reasoning_effort"),
    ({"reasoning": "on"}, "invalid_type", "reasoning"),
    ({"chat_template_kwargs": {"mood": 1}}, "unknown_parameter", "chat_template_kwargs.mood"),
    ({"logprobs": 1}, "invalid_type", "logprobs"),
    ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "integer_above_max_value", "top_logprobs"),
    ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
    ({"modalities": ["audio"]}, "unsupported_parameter", "modalities"),
    ({"prompt": "x"}, "unknown_parameter", "prompt"),
]
COMPLETION_REFUSALS = [
    ({"suffix": "x"}, "unsupported_parameter", "suffix"),
    ({"best_of": 3}, "unsupported_parameter", "best_of"),
    ({"logprobs": 6}, "integer_above_max_value", "logprobs"),
    ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
    ({"echo": 1}, "invalid_type", "echo"),
    ({"prompt": None}, "invalid_type", "prompt"),
    ({"messages": []}, "unknown_parameter", "messages"),
]


@pytest.mark.parametrize(("fields", "code", "param"), COMMON_REFUSALS + CHAT_REFUSALS)
def test_chat_refuses_by_name(fields: dict[str, Any], code: str, param: str) -> None:
    assert refusal(parse_chat, chat(**fields)) == (code, param)


@pytest.mark.parametrize(("fields", "code", "param"), COMMON_REFUSALS + COMPLETION_REFUSALS)
def test_completions_refuses_by_name(fields: dict[str, Any], code: str, param: str) -> None:
    assert refusal(parse_completion, completion(**fields)) == (code, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"{'model': 'm'}",
        b'{"model": NaN}',
        b'{"model": "m"} trailing',
        b'{"model": "\\ud800"}',
        b'{"user": ' + b"[" * 100_000,
        b'{"model": "\xff"}',
    ],
    ids=range(12),
)
def test_bodies_that_are_no_json_objects(body: bytes) -> None:
    assert refusal(parse_chat, body)[0] == "invalid_json"
    assert refusal(parse_completion, body)[0] == "invalid_json"


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_chat_requires(missing: str) -> None:
    body = json.dumps({name: value for name, value in CHAT.items() if name != missing}).encode()
    assert refusal(parse_chat, body) == ("missing_required_parameter", missing)


def test_null_asks_for_nothing_anywhere() -> None:
    optional: dict[str, Any] = {field: None for field in parse_chat(chat()).__struct_fields__ if field not in CHAT}
    parse_chat(chat(**optional, **dict.fromkeys([*IGNORED, *CHAT_NEUTRAL])))
    optional = dict.fromkeys(parse_completion(completion()).__struct_fields__)
    optional |= {"model": "m", "prompt": "x"}
    parse_completion(completion(**optional, **dict.fromkeys([*IGNORED, *COMPLETION_NEUTRAL])))


def test_values_that_ask_for_nothing_are_taken() -> None:
    for name, values in CHAT_NEUTRAL.items():
        for value in values:
            parse_chat(chat(**{name: value}))
    for name, values in COMPLETION_NEUTRAL.items():
        for value in values:
            parse_completion(completion(**{name: value}))


def test_an_answer_fits_into_the_history_unchanged() -> None:
    """As the openai package's `message.model_dump()` gives it."""
    answer = {
        "content": None,
        "refusal": None,
        "role": "assistant",
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": [{"id": "call_1", "function": {"arguments": "{}", "name": "f"}, "type": "function", "index": 0}],
        "reasoning_content": "thought",
    }
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "done"}]}
    body = parse_chat(chat(messages=[{"role": "user", "content": "hi"}, answer, result], tools=[TOOL]))
    user, assistant, tool = body.plain_messages
    assert user == {"role": "user", "content": "hi"}
    assert assistant["reasoning_content"] == "thought"
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert tool == result
    tools = body.plain_tools
    assert tools is not None
    assert tools[0]["function"]["name"] == "f"


def test_a_refusal_in_the_history_is_its_content() -> None:
    body = parse_chat(chat(messages=[{"role": "assistant", "content": None, "refusal": "no"}, *CHAT["messages"]]))
    assert body.plain_messages[0]["content"] == "no"


@pytest.mark.parametrize(
    ("fields", "switch"),
    [
        ({}, None),
        ({"reasoning": False}, False),
        ({"chat_template_kwargs": {"reasoning": True}}, True),
        ({"reasoning": False, "chat_template_kwargs": {"reasoning": True}}, False),
    ],
)
def test_reasoning_switch(fields: dict[str, Any], switch: bool | None) -> None:
    assert parse_chat(chat(**fields)).reasoning_switch is switch


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, ()), ("a", ("a",)), ([], ()), (["a", "b", "c", "d"], ("a", "b", "c", "d"))]
)
def test_stop_strings(stop: Any, strings: tuple[str, ...]) -> None:
    assert stop_strings(parse_chat(chat(stop=stop))) == strings


@pytest.mark.parametrize("stop", ["", ["a", ""], list("abcde"), "x" * 5000])
def test_stop_strings_that_are_refused(stop: Any) -> None:
    assert refusal(lambda body: stop_strings(parse_chat(body)), chat(stop=stop))[1] == "stop"


def test_sampling_defaults_and_values() -> None:
    defaults = SamplingDefaults(temperature=0.5, top_k=7)
    [params] = sampling_params(parse_chat(chat()), defaults, 1, vocab_size=9)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.95, 7, 0.0)
    body = parse_chat(chat(temperature=1e-9, top_p=0, top_k=-1, min_p=0.25, seed=-1))
    [params] = sampling_params(body, defaults, 1, vocab_size=9)
    assert params.temperature == 0, "too small to divide by: greedy"
    assert 0 < params.top_p < 1e-6
    assert (params.top_k, params.min_p, params.seed) == (0, 0.25, 2**64 - 1)


def test_choices_have_seeds_of_their_own_and_the_first_one_is_the_request_s() -> None:
    body = parse_chat(chat(seed=5))
    assert [params.seed for params in sampling_params(body, SamplingDefaults(), 3, vocab_size=9)] == [5, 6, 7]
    unseeded = parse_chat(chat())
    seeds = {sampling_params(unseeded, SamplingDefaults(), 1, vocab_size=9)[0].seed for _ in range(4)}
    assert len(seeds) == 4


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("", [""]),
    ],
)
def test_forms_of_a_prompt(prompt: Any, parsed: Any) -> None:
    assert prompts(parse_completion(completion(prompt=prompt)), 10) == parsed


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([10], "prompt"),
        ([-1], "prompt"),
        ([[1], [10]], "prompt[1]"),
        (["a", [1]], "prompt"),
        ([1, "a"], "prompt"),
        (["a"] * 1025, "prompt"),
    ],
)
def test_prompts_that_are_refused(prompt: Any, param: str) -> None:
    assert refusal(lambda body: prompts(parse_completion(body), 10), completion(prompt=prompt))[1] == param


@pytest.mark.parametrize(
    ("bias", "code"),
    [
        ({"9": 1}, "invalid_value"),
        ({"-1": 1}, "invalid_value"),
        ({"x": 1}, "invalid_value"),
        ({"1": 1, "01": 1}, "invalid_value"),
        ({"\u0661": 1}, "invalid_value"),
        ({"1": 101}, "decimal_above_max_value"),
        ({str(number): 1 for number in range(301)}, "object_above_max_properties"),
    ],
)
def test_logit_bias_names_the_tokens_of_the_vocabulary(bias: dict[str, float], code: str) -> None:
    body = parse_chat(chat(logit_bias=bias))
    with pytest.raises(ApiError) as caught:
        sampling_params(body, SamplingDefaults(), 1, vocab_size=9)
    error = caught.value.body.error
    assert error.code == code and error.param.startswith("logit_bias")


def test_what_changes_logits_reaches_the_engine() -> None:
    body = parse_chat(
        chat(presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.2, logit_bias={"3": -100, "1": 2.5})
    )
    [params] = sampling_params(body, SamplingDefaults(), 1, vocab_size=9, logprobs=2)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -1, 1.2)
    assert params.logit_bias == ((1, 2.5), (3, -100))
    assert params.logprobs == 2

"""Chat completions through the openai package, the model's part being played by a script."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from north_jax.text import Marker, Tokenizer
from tests.serve.api.conftest import ServeScript, Speak
from tests.serve.server_thread import MODEL, RunningServer

HELLO = "Think first.<|END_THINKING|><|START_TEXT|>Hello 😀 Größe<|END_TEXT|><|END_OF_TURN_TOKEN|>"
CALLS = (
    "I need both.<|END_THINKING|><|START_ACTION|>["
    '{"tool_call_id": "0", "tool_name": "read", "parameters": {"path": "main.py"}}, '
    '{"tool_call_id": "1", "tool_name": "list", "parameters": {}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>'
)
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("read", "list")
]
USER: Any = [{"role": "user", "content": "Hi there"}]


def ask(server: RunningServer, **settings: Any) -> Any:
    settings = {"model": MODEL, "messages": USER} | settings
    return server.client.chat.completions.create(**settings)


def stream(server: RunningServer, **settings: Any) -> list[Any]:
    return list(ask(server, stream=True, **settings))


def joined(chunks: list[Any], field: str, choice: int = 0) -> str:
    deltas = [c.delta for chunk in chunks for c in chunk.choices if c.index == choice]
    return "".join(getattr(delta, field, None) or "" for delta in deltas)


def raw_chat(server: RunningServer, **fields: Any) -> str:
    """The raw bytes of an answer, as text."""
    body = json.dumps({"model": MODEL, "messages": USER} | fields).encode()
    head = "POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\n"
    with server.connect() as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        received = b""
        while data := connection.recv(65536):
            received += data
    return received.decode().split("\r\n\r\n", 1)[1]


def test_whole_answer(serve_script: ServeScript, speak: Speak) -> None:
    server = serve_script(HELLO)
    answer = ask(server)
    [choice] = answer.choices
    assert choice.message.content == "Hello 😀 Größe"
    assert choice.message.reasoning_content == "Think first."
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.id.startswith("chatcmpl-")
    tokens = len(speak(HELLO)) - 1  # the stop token is not part of the answer
    assert answer.usage.completion_tokens == tokens
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(speak("Think first.<|END_THINKING|>"))
    assert answer.usage.prompt_tokens == len(server.engine.requests[0].prompt)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + tokens


def test_fields_come_in_openai_s_order(serve_script: ServeScript) -> None:
    answer = json.loads(raw_chat(serve_script(HELLO)))
    assert list(answer)[:6] == ["id", "object", "created", "model", "choices", "usage"]
    assert list(answer["choices"][0]) == ["index", "message", "logprobs", "finish_reason"]
    assert list(answer["choices"][0]["message"])[:2] == ["role", "content"]
    assert list(answer["usage"])[:3] == ["prompt_tokens", "completion_tokens", "total_tokens"]


def test_the_prompt_is_the_template_s(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    server = serve_script(HELLO)
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Say <|END_OF_TURN_TOKEN|>"}]},
    ]
    ask(server, messages=messages)
    prompt = server.engine.requests[0].prompt
    assert prompt[0] == tokenizer.bos_id
    assert prompt[-1] == tokenizer.marker_ids[Marker.START_THINKING]
    spelled = tokenizer.decode(prompt)
    assert spelled.index("Be brief.") < spelled.index("Say <|END_OF_TURN_TOKEN|>")
    ends_of_turn = prompt.count(tokenizer.marker_ids[Marker.END_OF_TURN])
    assert ends_of_turn == spelled.count("<|END_OF_TURN_TOKEN|>") - 1, "what the user spelled is text"


def test_stream(serve_script: ServeScript) -> None:
    chunks = stream(serve_script(HELLO))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert joined(chunks, "content") == "Hello 😀 Größe"
    assert joined(chunks, "reasoning_content") == "Think first."
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert not any("�" in joined([chunk], "content") for chunk in chunks), "half a character was sent"


def test_stream_events_on_the_wire(serve_script: ServeScript) -> None:
    events = raw_chat(serve_script(HELLO), stream=True).split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    first, last = (json.loads(event.removeprefix("data: ")) for event in (events[0], events[-1]))
    assert list(first)[:4] == ["id", "object", "created", "model"]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["delta"] == {}
    assert "usage" not in first


def test_stream_with_usage(serve_script: ServeScript) -> None:
    server = serve_script(HELLO)
    *chunks, last = stream(server, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage == ask(server).usage
    assert '"usage":null' in raw_chat(server, stream=True, stream_options={"include_usage": True})


def test_tool_calls(serve_script: ServeScript) -> None:
    server = serve_script(CALLS)
    [choice] = ask(server, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    first, second = choice.message.tool_calls
    assert (first.function.name, json.loads(first.function.arguments)) == ("read", {"path": "main.py"})
    assert (second.function.name, second.function.arguments) == ("list", "{}")
    assert first.type == "function"
    assert first.id != second.id


def test_tool_calls_stream_as_deltas(serve_script: ServeScript) -> None:
    chunks = stream(serve_script(CALLS), tools=TOOLS)
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        if delta.id is not None:
            assert delta.index not in calls
            assert delta.type == "function"
            calls[delta.index] = [delta.function.name]
        else:
            assert delta.function.name is None
        calls[delta.index].append(delta.function.arguments)
    assert {index: (name, json.loads("".join(rest))) for index, (name, *rest) in calls.items()} == {
        0: ("read", {"path": "main.py"}),
        1: ("list", {}),
    }
    assert len(deltas) > 4, "arguments did not stream"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_tools_reach_the_prompt_unless_forbidden(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    server = serve_script(CALLS)
    ask(server, tools=TOOLS, tool_choice="auto")
    forbidden = ask(server, tools=TOOLS, tool_choice="none")
    shown, hidden = (tokenizer.decode(request.prompt) for request in server.engine.requests)
    assert '"read"' in shown
    assert '"read"' not in hidden
    assert forbidden.choices[0].message.tool_calls is None
    assert "main.py" in forbidden.choices[0].message.content, "a call that was not allowed is text"
    assert forbidden.choices[0].finish_reason == "stop"


def test_a_tool_conversation_goes_on(serve_script: ServeScript, speak: Speak, tokenizer: Tokenizer) -> None:
    scripts = [speak(CALLS), speak(HELLO)]
    server = serve_script(lambda request: scripts.pop(0))
    message = ask(server, tools=TOOLS).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in message.tool_calls]
    answer = ask(server, tools=TOOLS, messages=[*USER, message.model_dump(), *results])
    assert answer.choices[0].message.content == "Hello 😀 Größe"
    assert '"results": {' in tokenizer.decode(server.engine.requests[1].prompt)


def test_a_call_cut_off_by_the_limit_is_reported_as_cut(serve_script: ServeScript, speak: Speak) -> None:
    limit = len(speak(CALLS[: CALLS.index("main.py")]))
    server = serve_script(CALLS)
    [choice] = ask(server, tools=TOOLS, max_tokens=limit).choices
    assert choice.finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice.message.tool_calls[0].function.arguments)
    assert stream(server, tools=TOOLS, max_tokens=limit)[-1].choices[0].finish_reason == "length"


def test_token_limits(serve_script: ServeScript) -> None:
    server = serve_script(HELLO, max_context=300)
    limited = ask(server, max_completion_tokens=5)
    assert limited.choices[0].finish_reason == "length"
    assert limited.usage.completion_tokens == 5
    ask(server)
    ask(server, max_tokens=100_000)
    prompt = limited.usage.prompt_tokens
    assert [request.max_tokens for request in server.engine.requests] == [5, 300 - prompt, 300 - prompt]


def test_a_prompt_that_leaves_no_room(serve_script: ServeScript) -> None:
    server = serve_script(HELLO, max_context=300)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, messages=[{"role": "user", "content": "word " * 300}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert server.engine.requests == []


def test_stop_strings_end_the_answer_and_the_engine_request(serve_script: ServeScript, speak: Speak) -> None:
    long = "stop here is only a thought.<|END_THINKING|><|START_TEXT|>one two stop here three four" + " five" * 200
    server = serve_script(long, step_seconds=0.001)
    answer = ask(server, stop=["never", "stop here"])
    [choice] = answer.choices
    assert choice.message.content == "one two "
    assert choice.message.reasoning_content == "stop here is only a thought."
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == len(speak(long[: long.index(" three")]))
    server.engine.wait_for_cancelled(1)
    chunks = stream(server, stop="stop here")
    assert joined(chunks, "content") == "one two "
    assert chunks[-1].choices[0].finish_reason == "stop"
    server.engine.wait_for_cancelled(2)
    server.engine.wait_until_idle()
    assert max(server.engine.produced.values()) < len(speak(long))


def test_what_only_begins_a_stop_string_is_given_out(serve_script: ServeScript) -> None:
    server = serve_script("<|END_THINKING|><|START_TEXT|>ab<|END_TEXT|><|END_OF_TURN_TOKEN|>")
    assert ask(server, stop="abc").choices[0].message.content == "ab"
    assert joined(stream(server, stop="abc"), "content") == "ab"


def test_held_back_text_comes_before_the_call_that_follows_it(serve_script: ServeScript) -> None:
    call = CALLS[CALLS.index("<|START_ACTION|>") :].replace("<|END_OF_TURN_TOKEN|>", "")
    text = f"<|END_THINKING|><|START_TEXT|>ab<|END_TEXT|>{call}<|START_TEXT|>c<|END_TEXT|><|END_OF_TURN_TOKEN|>"
    chunks = stream(serve_script(text), tools=TOOLS, stop="abc")
    assert joined(chunks, "content") == "abc", "a stop string does not reach across a tool call"
    kinds = ["call" if chunk.choices[0].delta.tool_calls else chunk.choices[0].delta.content for chunk in chunks]
    assert kinds.index("ab") < kinds.index("call") < kinds.index("c")


def test_n_choices(serve_script: ServeScript, speak: Speak) -> None:
    def script(request: Any) -> list[int]:
        return speak(f"<|END_THINKING|><|START_TEXT|>{request.sampling.seed}<|END_TEXT|><|END_OF_TURN_TOKEN|>")

    server = serve_script(script)
    answer = ask(server, n=3, seed=7, temperature=0.5)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, "7"), (1, "8"), (2, "9")]
    assert answer.usage.prompt_tokens == len(server.engine.requests[0].prompt), "the prompt is counted once"
    chunks = stream(server, n=3, seed=7)
    assert [joined(chunks, "content", index) for index in range(3)] == ["7", "8", "9"]
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert finishes == ["stop"] * 3


def test_reasoning_can_be_switched_off(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    server = serve_script("<|START_TEXT|>Hello<|END_TEXT|><|END_OF_TURN_TOKEN|>")
    for switch in (
        {"reasoning_effort": "none"},
        {"extra_body": {"reasoning": False}},
        {"extra_body": {"chat_template_kwargs": {"reasoning": False}}},
    ):
        message = ask(server, **switch).choices[0].message
        assert message.content == "Hello"
        assert not hasattr(message, "reasoning_content")
        assert server.engine.requests[-1].prompt[-1] == tokenizer.marker_ids[Marker.END_THINKING]
    ask(server, reasoning_effort="high")
    assert server.engine.requests[-1].prompt[-1] == tokenizer.marker_ids[Marker.START_THINKING]


def test_sampling_reaches_the_engine(serve_script: ServeScript) -> None:
    server = serve_script(HELLO)
    ask(server)
    ask(server, temperature=0.25, top_p=0.5, seed=11, extra_body={"top_k": 20, "min_p": 0.125})
    default, chosen = (request.sampling for request in server.engine.requests)
    assert (default.temperature, default.top_p, default.top_k, default.min_p) == (1.0, 0.95, 0, 0.0)
    assert (chosen.temperature, chosen.top_p, chosen.top_k, chosen.min_p, chosen.seed) == (0.25, 0.5, 20, 0.125, 11)


def test_stop_tokens_are_the_checkpoint_s(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    server = serve_script(HELLO)
    ask(server)
    assert server.engine.requests[0].stop_token_ids >= {tokenizer.eos_id, 0}


def test_usage_counts_what_the_cache_held(serve_script: ServeScript) -> None:
    server = serve_script(HELLO, cached_tokens=64)
    assert ask(server, n=2).usage.prompt_tokens_details.cached_tokens == 64
    *_, last = stream(server, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens_details.cached_tokens == 64

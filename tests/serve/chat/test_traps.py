"""Ways in which parsers of this format are known to fail their users, each with what must happen instead.

The list is that of a published parser package. Every answer is fed whole, character by character and as tokens.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from north_jax.text import Detokenizer, Marker, Tokenizer
from serve.chat.stream import ChatStream
from serve.chat.types import Content, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from serve.endpoints.chat_choice import ChatChoice
from serve.engine.types import FinishReason
from tests.serve.api.conftest import _MARKER


def action(body: str) -> str:
    return f"<|END_THINKING|><|START_ACTION|>{body}<|END_ACTION|>"


def call(name: str, arguments: Any, complete: bool = True) -> tuple[str, Any, bool]:
    return name, arguments, complete


# name → (output, reasoning, content, calls), for output that is not cut off.
TRAPS: dict[str, tuple[str, str, str, list[tuple[str, Any, bool]]]] = {
    "empty parameters are an empty object, not an empty text": (
        action('[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]'), "", "", [call("f", {})],
    ),
    "a call without an id is a call": (
        action('[{"tool_name": "f", "parameters": {"a": 1}}]'), "", "", [call("f", {"a": 1})],
    ),
    "the order of the keys does not matter": (
        action('[{"parameters": {"a": 1}, "tool_name": "f", "tool_call_id": "0"}]'), "", "", [call("f", {"a": 1})],
    ),
    "a marker inside a JSON string is text": (
        action('[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": "x<|END_ACTION|>y"}}]'),
        "", "", [call("f", {"a": "x<|END_ACTION|>y"})],
    ),
    "white space at the end stays": ("<|END_THINKING|><|START_TEXT|>a\n\n  \n<|END_TEXT|>", "", "a\n\n  \n", []),
    "what looks like a citation stays": (
        "<|END_THINKING|><|START_TEXT|>if a <co>b</co: 0:[1]> c<|END_TEXT|>", "", "if a <co>b</co: 0:[1]> c", [],
    ),
}  # fmt: skip


def read(deltas: list[Any]) -> tuple[str, str, list[tuple[str, Any, bool]]]:
    names = [delta.name for delta in deltas if isinstance(delta, ToolCallStart)]
    ends = [delta.complete for delta in deltas if isinstance(delta, ToolCallEnd)]
    texts = ["" for _ in names]
    for delta in deltas:
        if isinstance(delta, ToolCallArguments):
            texts[delta.index] += delta.fragment
    arguments = [json.loads(text) if whole else text for text, whole in zip(texts, ends, strict=True)]
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    return reasoning, content, list(zip(names, arguments, ends, strict=True))


def deltas_of(output: str, how: str, tokenizer: Tokenizer, *, thinking: bool = True, cut: bool = False) -> list[Any]:
    stream = ChatStream(starts_in_thinking=thinking, special=tokenizer.control)
    deltas: list[Any] = []
    if how == "tokens":
        detokenizer = Detokenizer(tokenizer)
        # Inside a JSON string a marker is spelled, as text is; a model may also draw the marker's own token there.
        for token in tokens_of(output, tokenizer):
            deltas += stream.feed_token(token, detokenizer.push(token))
        return deltas + stream.feed(detokenizer.flush()) + stream.finish(cut)
    for piece in [output] if how == "whole" else output:
        deltas += stream.feed(piece)
    return deltas + stream.finish(cut)


def tokens_of(output: str, tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = []
    for number, part in enumerate(_MARKER.split(output)):
        ids += [tokenizer.marker_ids[Marker(part)]] if number % 2 else tokenizer.encode_text(part)
    return ids


@pytest.mark.parametrize("how", ["whole", "characters", "tokens"])
@pytest.mark.parametrize("name", TRAPS)
def test_traps(name: str, how: str, tokenizer: Tokenizer) -> None:
    output, *expected = TRAPS[name]
    assert list(read(deltas_of(output, how, tokenizer))) == expected


@pytest.mark.parametrize("how", ["whole", "characters", "tokens"])
def test_text_without_a_marker_is_content_where_thinking_is_off(how: str, tokenizer: Tokenizer) -> None:
    assert read(deltas_of("Plain text.", how, tokenizer, thinking=False)) == ("", "Plain text.", [])


@pytest.mark.parametrize("how", ["whole", "characters", "tokens"])
def test_a_call_that_is_cut_off_is_not_whole(how: str, tokenizer: Tokenizer) -> None:
    output = action('[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": "x"}}]').removesuffix(
        '"}}]<|END_ACTION|>'
    )
    assert read(deltas_of(output, how, tokenizer, cut=True)) == ("", "", [("f", '{"a": "x', False)])


def test_stop_strings_do_not_fire_inside_thinking_or_calls(tokenizer: Tokenizer) -> None:
    stream = ChatStream(starts_in_thinking=True, special=tokenizer.control)
    choice = ChatChoice(tokenizer, stream, ("stop",))
    output = "do not stop here" + action('[{"tool_call_id": "0", "tool_name": "stop", "parameters": {"a": "stop"}}]')
    deltas = [delta for token in tokens_of(output, tokenizer) for delta in choice.push(token, None)]
    assert not choice.stopped
    deltas += choice.end(FinishReason.STOP)
    assert read(deltas) == ("do not stop here", "", [("stop", {"a": "stop"}, True)])
    assert choice.finish_name(FinishReason.STOP) == "tool_calls"

"""Tool calls. The cases marked "trap" are those that a published parser of this format gets wrong."""

import json

import pytest

from serve.chat.stream import ChatStream
from serve.chat.types import ToolCallEnd
from tests.support.deltas import Answer, Call, gather


def read(body, cut=False, closed=True, length=None):
    """The answer whose action is `body`, fed at once or in pieces of `length` characters."""
    stream = ChatStream(starts_in_thinking=False)
    text = "<|START_ACTION|>" + body + "<|END_ACTION|>" * closed
    length = length or len(text)
    deltas = [delta for start in range(0, len(text), length) for delta in stream.feed(text[start : start + length])]
    answer = gather(deltas + stream.finish(cut))
    assert stream.tool_calls == len(answer.calls)
    if answer.calls and not all(call.complete for call in answer.calls):
        assert not stream.tool_calls_complete
    return answer


def one(arguments, name="f"):
    return Answer(calls=[Call(name, arguments, True)])


CALLS = {
    "as the model writes it": (
        '[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"b": 1.0, "a":[ null,"\\u00e9"]}}\n]',
        one('{"b": 1.0, "a":[ null,"\\u00e9"]}'),
    ),
    "trap: no parameters inside": ('[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]', one("{}")),
    "trap: no tool_call_id": ('[{"tool_name": "f", "parameters": {"a": 1}}]', one('{"a": 1}')),
    "trap: parameters first": ('[{"parameters": {"a": 1}, "tool_call_id": "0", "tool_name": "f"}]', one('{"a": 1}')),
    "trap: name last, id first": (
        '[{"tool_call_id": "0", "parameters": {"a": "}"}, "tool_name": "f"}]',
        one('{"a": "}"}'),
    ),
    "trap: a marker in a string": (
        '[{"tool_name": "f", "parameters": {"a": "<|END_ACTION|> \\" <|END_OF_TURN_TOKEN|>"}}]',
        one('{"a": "<|END_ACTION|> \\" <|END_OF_TURN_TOKEN|>"}'),
    ),
    "trap: a marker in a key": (
        '[{"tool_name": "f", "parameters": {"<|END_ACTION|>": 1}}]',
        one('{"<|END_ACTION|>": 1}'),
    ),
    "trap: white space at the ends": ('[{"tool_name": "f", "parameters": {"a": " b\\n "}}]', one('{"a": " b\\n "}')),
    "trap: citation tags in code": (
        '[{"tool_name": "f", "parameters": {"a": "<co>x</co: 0:[1]>"}}]',
        one('{"a": "<co>x</co: 0:[1]>"}'),
    ),
    "several": (
        '[{"tool_name": "f", "parameters": {"a": 1}},\n{"tool_name": "g", "parameters": {}}]',
        Answer(calls=[Call("f", '{"a": 1}', True), Call("g", "{}", True)]),
    ),
    "no parameters at all": ('[{"tool_name": "f"}]', one("{}")),
    "parameters null": ('[{"tool_name": "f", "parameters": null}]', one("{}")),
    "parameters of another type": ('[{"parameters": "x \\"", "tool_name": "f"}]', one('"x \\""')),
    "a list of parameters": ('[{"tool_name": "f", "parameters": [1, 2]}]', one("[1, 2]")),
    "parameters twice": ('[{"tool_name": "f", "parameters": {"a": 1}, "parameters": {"b": 2}}]', one('{"a": 1}')),
    "a name twice": ('[{"tool_name": "f", "tool_name": "g"}]', one("{}")),
    "further keys": ('[{"x": {"tool_name": "no"}, "y": [1, "]"], "tool_name": "f", "z": -1.5e3}]', one("{}")),
    "an escaped name": ('[{"tool_n\\u0061me": "\\u0066\\n\\ud800"}]', one("{}", name="f\n\ufffd")),
    "escapes at the end of strings": (
        '[{"tool_name": "f", "parameters": {"a": "\\\\", "b": "\\""}}]',
        one('{"a": "\\\\", "b": "\\""}'),
    ),
    "line breaks in strings": ('[{"tool_name": "f", "parameters": {"a": "x\ny"}}]', one('{"a": "x\ny"}')),
    "broken inside parameters": ('[{"tool_name": "f", "parameters": {"a": tru, }}]', one('{"a": tru, }')),
    "no list": ('{"tool_name": "f", "parameters": {"a": 1}}', one('{"a": 1}')),
    "a brace too many": ('[{"tool_name": "f", "parameters": {"a": 1}}}]', one('{"a": 1}')),
    "a brace too few": ('[{"tool_name": "f", "parameters": {"a": 1}', one('{"a": 1}')),
    "an unclosed list": ('[{"tool_name": "f", "parameters": {"a": 1}}', one('{"a": 1}')),
    "empty list": ("[ ]", Answer()),
    "nothing": (" ", Answer()),
}


@pytest.mark.parametrize("length", [None, 1, 2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_calls(name, length):
    body, expected = CALLS[name]
    assert read(body, length=length) == expected


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith(("as", "trap", "several"))])
def test_arguments_are_json_again(name):
    for call in read(CALLS[name][0]).calls:
        assert isinstance(json.loads(call.arguments), dict)


def malformed(text, *calls):
    return Answer(content=text, malformed=text, calls=list(calls))


MALFORMED = {
    "prose": ("I call f.", malformed("I call f.")),
    "a fence": ('```json\n[{"tool_name": "f"}]\n```', malformed('```json\n[{"tool_name": "f"}]\n```')),
    "no name": ('[ {"parameters": {"a": 1}} ]', malformed('[ {"parameters": {"a": 1}}')),
    "a name that is none": ('[{"tool_name": 1}]', malformed('[{"tool_name": 1}')),
    "an empty name": ('[{"tool_name": ""}]', malformed('[{"tool_name": ""}')),
    "no object": ("[1, 2]", malformed("[1, 2]")),
    "no colon": ('[{"tool_name" "f"}]', malformed('[{"tool_name" "f"}]')),
    "no value": ('[{"tool_name": }]', malformed('[{"tool_name": }]')),
    "no quotes": ("[{tool_name: 1}]", malformed("[{tool_name: 1}]")),
    "after a good call": (
        '[{"tool_name": "f", "parameters": {"a": 1}}, {"x": 1}, {"tool_name": "g"}]',
        malformed(', {"x": 1}', Call("f", '{"a": 1}', True), Call("g", "{}", True)),
    ),
    "prose after the list": ('[{"tool_name": "f"}] and so on', malformed("] and so on", Call("f", "{}", True))),
    "prose inside a call": (
        '[{"tool_name": "f", "parameters": {"a": 1} and so on}]',
        malformed("and so on}]", Call("f", '{"a": 1}', True)),
    ),
    "prose for parameters": (
        '[{"tool_name": "f", and so on}]',
        malformed("and so on}]", Call("f", "", False)),
    ),
    "ends inside a nameless item": ('[{"tool_call_id": "0", "para', malformed('[{"tool_call_id": "0", "para')),
}


@pytest.mark.parametrize("length", [None, 1, 2, 3])
@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_call_is_handed_on_as_text(name, length):
    body, expected = MALFORMED[name]
    assert read(body, closed=not body.endswith("para"), length=length) == expected


WHOLE = '[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": {"b": "c"}}}, {"tool_name": "g"}]'


@pytest.mark.parametrize("length", range(len(WHOLE) + 1))
def test_a_call_that_is_cut_off_is_never_reported_as_whole(length):
    answer = read(WHOLE[:length], cut=True, closed=False)
    assert not answer.content
    ends = [index + 1 for index, character in enumerate(WHOLE) if character == "}"]
    assert [call.complete for call in answer.calls] == [
        length >= ends[end] for end, name in ((2, '"f"'), (3, '"g"')) if length >= WHOLE.index(name) + 3
    ]
    for call, whole in zip(answer.calls, ['{"a": {"b": "c"}}', "{}"], strict=False):
        assert call.arguments == whole if call.complete else whole.startswith(call.arguments)


def test_a_call_that_the_model_left_unfinished_is_not_whole():
    answer = read('[{"tool_name": "f", "parameters": {"a": [1', closed=True)
    assert answer == Answer(calls=[Call("f", '{"a": [1', False)])


def test_calls_that_are_whole_stay_so_when_the_next_is_cut():
    stream = ChatStream(starts_in_thinking=False)
    deltas = stream.feed('<|START_ACTION|>[{"tool_name": "f"}, {"tool_name": "g", "para')
    assert stream.tool_calls_complete
    deltas += stream.finish(cut=True)
    assert not stream.tool_calls_complete
    assert deltas[-1] == ToolCallEnd(1, complete=False)
    assert stream.tool_calls == 2


def test_a_cut_before_the_name_is_noticed_too():
    stream = ChatStream(starts_in_thinking=False)
    assert stream.feed('<|START_ACTION|>[{"tool_call_id": "0", ') + stream.finish(cut=True) == []
    assert not stream.tool_calls_complete


def test_long_arguments_cost_linear_time():
    """A quarter of a million characters in small pieces; quadratic work would take minutes."""
    stream = ChatStream(starts_in_thinking=False)
    stream.feed('<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": "')
    total = 0
    for _ in range(60_000):
        (delta,) = stream.feed("abc ")
        total += len(delta.fragment)
    assert total == 240_000
    stream.feed('"}}]')
    assert stream.finish(cut=False) == []
    assert stream.tool_calls_complete

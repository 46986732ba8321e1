"""However an answer is cut into pieces, its deltas joined are the same."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from north_jax.text import Marker
from serve.chat.stream import ChatStream
from tests.support.deltas import gather

CALL = '{"tool_call_id": "0", "tool_name": "edit", "parameters": {"text": "<|END_ACTION|> \\"}", "n": [1, {}]}}'
FRAGMENTS = [
    *Marker,
    *(marker[:-3] for marker in list(Marker)[:4]),
    CALL,
    f"<|START_ACTION|>[{CALL}, {CALL}]<|END_ACTION|>",
    "<|START_ACTION|>[",
    '{"tool_name": "f"',
    '"parameters": ',
    *'[]{},:"\\<|> \n',
    "null",
    "text",
    "<co>é</co: 0:[1]>",
]
JSON = st.recursive(
    st.one_of(
        st.none(), st.integers(), st.text(max_size=4), st.text('"\\{}[],<|>', max_size=4), st.sampled_from(Marker)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)
ITEMS = st.permutations(["tool_call_id", "tool_name", "parameters", "other"]).flatmap(
    lambda keys: st.fixed_dictionaries(
        {
            key: {"tool_name": st.text(min_size=1, max_size=4), "parameters": st.dictionaries(st.text(), JSON)}.get(
                key, JSON
            )
            for key in keys
        }
    )
)
ACTIONS = st.lists(ITEMS, min_size=1, max_size=2).map(
    lambda items: f"{Marker.START_ACTION}{json.dumps(items, ensure_ascii=False)}{Marker.END_ACTION}"
)
PIECES = st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4), ITEMS.map(json.dumps), ACTIONS)
OUTPUTS = st.one_of(ACTIONS, st.lists(PIECES, max_size=12).map("".join))


def whole(text, starts_in_thinking, cut, tools_allowed):
    stream = ChatStream(starts_in_thinking=starts_in_thinking, tools_allowed=tools_allowed)
    return gather(stream.feed(text) + stream.finish(cut)), stream.tool_calls, stream.tool_calls_complete


def in_pieces(text, cuts, starts_in_thinking, cut, tools_allowed):
    stream = ChatStream(starts_in_thinking=starts_in_thinking, tools_allowed=tools_allowed)
    deltas = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        deltas += stream.feed(text[start:end])
    return gather(deltas + stream.finish(cut)), stream.tool_calls, stream.tool_calls_complete


@settings(max_examples=150, deadline=None)
@given(text=OUTPUTS, data=st.data(), thinking=st.booleans(), cut=st.booleans(), tools=st.booleans())
def test_any_split_gives_the_same_answer(text, data, thinking, cut, tools):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    expected = whole(text, thinking, cut, tools)
    assert in_pieces(text, cuts, thinking, cut, tools) == expected
    assert in_pieces(text, list(range(1, len(text))), thinking, cut, tools) == expected


@pytest.mark.slow
@settings(max_examples=5_000, deadline=None)
@given(text=OUTPUTS, data=st.data(), thinking=st.booleans(), cut=st.booleans(), tools=st.booleans())
def test_any_split_gives_the_same_answer_at_length(text, data, thinking, cut, tools):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    assert in_pieces(text, cuts, thinking, cut, tools) == whole(text, thinking, cut, tools)


@given(text=st.text(), thinking=st.booleans(), cut=st.booleans())
@example(text=" <|END_TEX", thinking=False, cut=True)
def test_text_without_markers_is_kept_whole(text, thinking, cut):
    answer, _, complete = whole(text, thinking, cut, tools_allowed=True)
    assert (answer.reasoning if thinking else answer.content) == text
    assert complete


@settings(max_examples=50, deadline=None)
@given(items=st.lists(ITEMS, max_size=3), indent=st.sampled_from([None, 4]), ascii=st.booleans(), cut=st.booleans())
def test_any_valid_action_is_read_as_json_reads_it(items, indent, ascii, cut):
    body = json.dumps(items, indent=indent, ensure_ascii=ascii)
    answer, _, complete = whole(f"<|START_ACTION|>{body}<|END_ACTION|>", False, cut, tools_allowed=True)
    assert [call.name for call in answer.calls] == [item["tool_name"] for item in items]
    assert [json.loads(call.arguments) for call in answer.calls] == [item["parameters"] for item in items]
    assert complete
    assert answer.content == ""

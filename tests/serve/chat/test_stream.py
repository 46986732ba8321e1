import re

import pytest

from north_jax.text import Detokenizer, Marker
from serve.chat.stream import ChatStream, new_call_id
from serve.chat.types import Content, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from tests.support.deltas import Answer, Call, gather


def read(text, starts_in_thinking=False, cut=False, **options):
    stream = ChatStream(starts_in_thinking=starts_in_thinking, **options)
    return gather(stream.feed(text) + stream.finish(cut))


THOUGHT = "Let me see.<|END_THINKING|>"
ANSWERS = {
    "text": ("<|START_TEXT|>Hello<|END_TEXT|><|END_OF_TURN_TOKEN|>", Answer(content="Hello")),
    "no marker at all": ("Hello\n", Answer(content="Hello\n")),
    "white space alone": (" \n", Answer(content=" \n")),
    "trailing white space": ("<|START_TEXT|>  a \n\n<|END_TEXT|>", Answer(content="  a \n\n")),
    "white space between blocks": ("\n <|START_TEXT|>a<|END_TEXT|>\n<|END_OF_TURN_TOKEN|>\n", Answer(content="a")),
    "text between blocks": ("<|START_TEXT|>a<|END_TEXT|> b <|START_TEXT|>c<|END_TEXT|>", Answer(content="a b c")),
    "citations are text": (
        "<|START_TEXT|><co>a</co: 0:[1]> <co>b</co><|END_TEXT|>",
        Answer(content="<co>a</co: 0:[1]> <co>b</co>"),
    ),
    "almost a marker": ("<|START_TEXT|>a <|END_TEX|> <|<|END_TEXT|>", Answer(content="a <|END_TEX|> <|")),
    "unclosed": ("<|START_TEXT|>a", Answer(content="a")),
    "half a marker at the end": ("<|START_TEXT|>a<|END_TE", Answer(content="a<|END_TE")),
    "a wrong end": ("<|START_TEXT|>a<|END_THINKING|>b<|END_ACTION|>c<|END_TEXT|>", Answer(content="abc")),
    "thinking again": ("<|START_TEXT|>a<|START_THINKING|>b<|START_TEXT|>c", Answer(reasoning="b", content="ac")),
    "past the turn": ("a<|END_OF_TURN_TOKEN|>\n<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>b", Answer(content="ab")),
    "a tool result": ("<|START_TOOL_RESULT|>[]<|END_TOOL_RESULT|>", Answer(content="[]")),
    "an action cuts a text": (
        '<|START_TEXT|>a<|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>',
        Answer(content="a", calls=[Call("f", "{}", True)]),
    ),
    "two actions": (
        '<|START_ACTION|>[{"tool_name": "f"}]<|END_ACTION|><|START_ACTION|>[{"tool_name": "g"}]<|END_ACTION|>',
        Answer(calls=[Call("f", "{}", True), Call("g", "{}", True)]),
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name):
    text, expected = ANSWERS[name]
    assert read(text) == expected


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_after_thinking(name):
    text, expected = ANSWERS[name]
    answer = read(THOUGHT + text, starts_in_thinking=True)
    if name == "white space alone":  # the answer had a marker
        assert answer == Answer(reasoning="Let me see.")
    else:
        expected = Answer("Let me see." + expected.reasoning, expected.content, expected.malformed, expected.calls)
        assert answer == expected


def test_an_answer_that_never_stops_thinking_is_reasoning():
    assert read("I wonder", starts_in_thinking=True) == Answer(reasoning="I wonder")


def test_thinking_that_leads_straight_to_an_action():
    text = 'Look.\n<|START_ACTION|>[{"tool_name": "ls"}]<|END_ACTION|>'
    assert read(text, starts_in_thinking=True) == Answer(reasoning="Look.\n", calls=[Call("ls", "{}", True)])


def test_in_thinking_follows_the_blocks():
    stream = ChatStream(starts_in_thinking=True)
    assert stream.in_thinking
    stream.feed("a<|END_THINKING|>")
    assert not stream.in_thinking
    stream.feed("<|START_THINKING|>")
    assert stream.in_thinking


def test_deltas_come_as_early_as_they_can():
    stream = ChatStream(starts_in_thinking=True, make_id=lambda: "id")
    assert stream.feed("Hm") == [Reasoning("Hm")]
    assert stream.feed(" <") == [Reasoning(" ")]
    assert stream.feed("3<|END_THINK") == [Reasoning("<3")]
    assert stream.feed("ING|><|START_TEXT|>Hi ") == [Content("Hi ")]
    assert stream.feed('<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f') == []
    assert stream.feed('", "parameters"') == [ToolCallStart(0, "id", "f")]
    assert stream.feed(': {"a": [1') == [ToolCallArguments(0, '{"a": [1')]
    assert stream.feed(', "<|"') == [ToolCallArguments(0, ', "<|"')]
    assert stream.feed("]}") == [ToolCallArguments(0, "]}")]
    assert stream.feed("}") == [ToolCallEnd(0, True)]
    assert stream.finish(cut=False) == []


def test_a_delta_is_not_split_without_need():
    stream = ChatStream(starts_in_thinking=False, make_id=lambda: "id")
    assert stream.feed("<|START_TEXT|>a <|b> c<|END_THINKING|> d") == [Content("a <|b> c d")]
    text = '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": {"b": ["c", 1]}}}]'
    arguments = ToolCallArguments(0, '{"a": {"b": ["c", 1]}}')
    assert stream.feed(text) == [ToolCallStart(0, "id", "f"), arguments, ToolCallEnd(0, True)]


def test_call_ids_are_unique_and_look_like_openais():
    ids = {new_call_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch("call_[A-Za-z0-9]{24}", id) for id in ids)


ACTION = '<|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>'


def test_an_action_without_tools_is_text():
    body = ACTION.removeprefix("<|START_ACTION|>").removesuffix("<|END_ACTION|>")
    assert read(ACTION + "<|START_TEXT|>x", tools_allowed=False) == Answer(content=body + "x", malformed=body)


class TestTokens:
    """Markers known by their token ids."""

    def feed(self, tokenizer, ids, **options):
        stream = ChatStream(starts_in_thinking=False, special=tokenizer.control, **options)
        detokenizer = Detokenizer(tokenizer)
        deltas = []
        for id in ids:
            deltas += stream.feed_token(id, detokenizer.push(id))
        deltas += stream.feed(detokenizer.flush())
        return gather(deltas + stream.finish(cut=False))

    def ids(self, tokenizer, *parts):
        """Markers and other special tokens as their tokens, strings as text."""
        ids = []
        for part in parts:
            ids += [tokenizer.marker_ids[part]] if isinstance(part, Marker) else tokenizer.encode_text(part)
        return ids

    def test_text_that_spells_a_marker_stays_text(self, tokenizer):
        text = "".join(Marker) + " <|END_TE"
        ids = self.ids(tokenizer, Marker.START_THINKING, text, Marker.START_TEXT, text, Marker.END_TEXT)
        assert self.feed(tokenizer, ids) == Answer(reasoning=text, content=text)

    def test_other_control_tokens_are_dropped(self, tokenizer):
        ids = self.ids(tokenizer, Marker.START_TEXT, "a")
        answer = self.feed(tokenizer, [*ids, tokenizer.pad_id, *tokenizer.encode_text("b"), tokenizer.bos_id])
        assert answer == Answer(content="ab")

    def test_an_incomplete_character_before_a_marker(self, tokenizer):
        byte_of = {tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size)}
        half = [byte_of[bytes([byte])] for byte in "é".encode()[:1]]
        ids = [*self.ids(tokenizer, Marker.START_TEXT, "a"), *half, *self.ids(tokenizer, Marker.END_TEXT), *half]
        assert self.feed(tokenizer, ids) == Answer(content="a\ufffd\ufffd")

    def test_a_marker_token_inside_a_json_string_is_text(self, tokenizer):
        parts = ('[{"tool_name": "f", "parameters": {"a": "x', Marker.END_ACTION, 'y"}}]')
        ids = self.ids(tokenizer, Marker.START_ACTION, *parts, Marker.END_ACTION, Marker.START_TEXT, "z")
        arguments = '{"a": "x<|END_ACTION|>y"}'
        assert self.feed(tokenizer, ids) == Answer(content="z", calls=[Call("f", arguments, True)])

    def test_a_whole_answer(self, tokenizer):
        json = '[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"é": "<|END_ACTION|>"}}\n]'
        parts = (Marker.START_THINKING, "Hm 😀", Marker.END_THINKING, Marker.START_ACTION, json, Marker.END_ACTION)
        answer = self.feed(tokenizer, self.ids(tokenizer, *parts, Marker.END_OF_TURN))
        assert answer == Answer(reasoning="Hm 😀", calls=[Call("f", '{"é": "<|END_ACTION|>"}', True)])

"""What may be drawn under a demand: random walks through the masks end in what was demanded, and in nothing else."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from north_jax.text import Detokenizer, Marker, Tokenizer
from serve.chat.stream import ChatStream
from serve.chat.types import Content, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from serve.grammar.compiler import DemandError, GrammarCompiler
from serve.grammar.demand import Demand, json_text, tool_calls

VOCABULARY = 640  # more rows than tokens
POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 999},
        "label": {"enum": ["a", "b", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "next": {"$ref": "#/$defs/name"},
    },
    "required": ["x", "label", "tags", "next"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 6}},
}
TOOLS: Any = [("read", POINT, "tools[0].function.parameters"), ("list", None, "tools[1].function.parameters")]
CALL = tool_calls(TOOLS, several=False)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCABULARY, [tokenizer.eos_id])


class Walk:
    """An answer of a model that draws any allowed token, and closes what it may after a while."""

    def __init__(self, compiler: GrammarCompiler, tokenizer: Tokenizer, demand: Demand, seed: int, *, thinking: bool):
        rng = np.random.default_rng(seed)
        [gate] = compiler.gates(demand, 1, thinking=thinking)
        ends = {tokenizer.marker_ids[m] for m in (Marker.END_THINKING, Marker.END_TEXT, Marker.END_ACTION)}
        stream = ChatStream(starts_in_thinking=thinking, special=tokenizer.control)
        detokenizer = Detokenizer(tokenizer)
        self.deltas: list[Any] = []
        self.tokens: list[int] = []
        while not self.tokens or self.tokens[-1] != tokenizer.eos_id:
            bits = np.unpackbits(gate.mask().view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[:VOCABULARY])
            assert len(allowed) and not bits[VOCABULARY:].any()
            closing = [token for token in allowed if token in ends]
            token = int(closing[0] if closing and rng.random() < 0.2 else rng.choice(allowed))
            gate.accept(token)
            self.tokens.append(token)
            self.deltas += stream.feed_token(token, detokenizer.push(token))
            assert len(self.tokens) < 5000
        self.deltas += stream.finish(cut=False)

    def joined(self, kind: Any, field: str = "text") -> str:
        return "".join(getattr(delta, field) for delta in self.deltas if isinstance(delta, kind))

    def calls(self) -> list[tuple[str, Any]]:
        starts = [delta for delta in self.deltas if isinstance(delta, ToolCallStart)]
        ends = [delta for delta in self.deltas if isinstance(delta, ToolCallEnd)]
        assert [(end.index, end.complete) for end in ends] == [(start.index, True) for start in starts]
        arguments = [
            "".join(d.fragment for d in self.deltas if isinstance(d, ToolCallArguments) and d.index == start.index)
            for start in starts
        ]
        return [(start.name, json.loads(text)) for start, text in zip(starts, arguments, strict=True)]


def check_point(value: Any) -> None:
    assert set(value) == {"x", "label", "tags", "next"}
    assert 0 <= value["x"] <= 999 and value["label"] in ("a", "b", None)
    assert all(isinstance(tag, bool) for tag in value["tags"]) and len(value["tags"]) <= 3
    assert len(value["next"]) <= 6


@pytest.mark.parametrize("thinking", [True, False])
def test_json_of_a_schema(compiler: GrammarCompiler, tokenizer: Tokenizer, thinking: bool) -> None:
    demand = Demand(text=json_text(POINT, "f"), may_call=False)
    for seed in range(25):
        walk = Walk(compiler, tokenizer, demand, seed, thinking=thinking)
        check_point(json.loads(walk.joined(Content)))
        assert not walk.calls()
    assert bool(walk.joined(Reasoning)) or not thinking


@pytest.mark.parametrize("several", [True, False])
def test_a_call_that_must_be(compiler: GrammarCompiler, tokenizer: Tokenizer, several: bool) -> None:
    demand = Demand(action=tool_calls(TOOLS, several=several), may_speak=False)
    names = set()
    for seed in range(25):
        walk = Walk(compiler, tokenizer, demand, seed, thinking=True)
        assert not walk.joined(Content)
        calls = walk.calls()
        assert len(calls) == 1 or (several and calls)
        for name, arguments in calls:
            names.add(name)
            if name == "read":
                check_point(arguments)
            else:
                assert arguments == {}
    assert names == {"read", "list"}


def test_calls_of_a_strict_tool_leave_the_text_free(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    spoken = called = silent = 0
    for seed in range(40):
        walk = Walk(compiler, tokenizer, Demand(action=CALL), seed, thinking=True)
        for name, arguments in walk.calls():
            called += 1
            check_point(arguments) if name == "read" else None
        spoken += bool(walk.joined(Content))
        silent += not walk.calls() and not walk.joined(Content)
    assert spoken and called and silent


def test_json_or_a_call(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    kinds = set()
    for seed in range(30):
        walk = Walk(compiler, tokenizer, Demand(text=json_text(POINT, "f"), action=CALL), seed, thinking=True)
        calls, content = walk.calls(), walk.joined(Content)
        assert bool(calls) != bool(content)
        if content:
            check_point(json.loads(content))
        kinds.add(bool(calls))
    assert kinds == {True, False}


def test_any_object(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    text = '{"a": [1, {"b": "<|END_TEXT|>"}],\n  "c": null}'
    [gate] = compiler.gates(Demand(text=json_text(None, "f"), may_call=False), 1, thinking=False)
    for token in [tokenizer.marker_ids[Marker.START_TEXT], *tokenizer.encode_text(text)]:
        assert gate.mask()[token // 32] >> np.uint32(token % 32) & 1
        gate.accept(token)
    end = tokenizer.marker_ids[Marker.END_TEXT]
    assert gate.mask()[end // 32] >> np.uint32(end % 32) & 1
    [gate] = compiler.gates(Demand(text=json_text(None, "f"), may_call=False), 1, thinking=False)
    for token in [tokenizer.marker_ids[Marker.START_TEXT], *tokenizer.encode_text("{ ")]:
        gate.accept(token)
    blank = tokenizer.encode_text(" ")[0]
    assert not gate.mask()[blank // 32] >> np.uint32(blank % 32) & 1  # no second one


def test_choices_go_their_own_ways(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    one, other = compiler.gates(Demand(text=json_text(POINT, "f"), may_call=False), 2, thinking=False)
    before = other.mask().copy()
    one.accept(tokenizer.marker_ids[Marker.START_TEXT])
    one.accept(tokenizer.encode_text("{")[0])
    assert (other.mask() == before).all()


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"type": "nonsense"}, "Invalid type"),
        ({"type": "string", "pattern": "(?=x)"}, "look-around"),
        ({"$ref": "#/$defs/x"}, "does not exist"),
        ({"enum": []}, "Unsatisfiable"),
    ],
)
def test_what_cannot_be_enforced_is_refused(compiler: GrammarCompiler, schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(DemandError, match=reason) as caught:
        compiler.gates(Demand(text=json_text(schema, "the field")), 1, thinking=True)
    assert caught.value.field == "the field"
    with pytest.raises(DemandError):
        compiler.gates(
            Demand(
                action=tool_calls([("f", {"properties": {"a": schema}, "required": ["a"]}, "the field")], several=True)
            ),
            1,
            thinking=True,
        )

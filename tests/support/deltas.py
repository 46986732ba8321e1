"""Deltas of a chat stream, put together as a client would."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from serve.chat.types import Content, Delta, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart


@dataclass
class Call:
    name: str
    arguments: str = ""
    complete: bool | None = None  # None: no ToolCallEnd has come


@dataclass
class Answer:
    reasoning: str = ""
    content: str = ""
    malformed: str = ""  # content marked as a malformed action
    calls: list[Call] = field(default_factory=list)
    ids: list[str] = field(default_factory=list, compare=False)


def gather(deltas: Iterable[Delta]) -> Answer:
    """The whole answer; fails when the deltas break what their types promise."""
    answer = Answer()
    for delta in deltas:
        match delta:
            case Reasoning(text):
                assert text
                answer.reasoning += text
            case Content(text, malformed):
                assert text
                answer.content += text
                answer.malformed += text if malformed else ""
            case ToolCallStart(index, id, name):
                assert index == len(answer.calls)
                assert all(call.complete is not None for call in answer.calls)
                answer.calls.append(Call(name))
                answer.ids.append(id)
            case ToolCallArguments(index, fragment):
                assert fragment
                assert index == len(answer.calls) - 1
                assert answer.calls[-1].complete is None
                answer.calls[-1].arguments += fragment
            case ToolCallEnd(index, complete):
                assert index == len(answer.calls) - 1
                assert answer.calls[-1].complete is None
                answer.calls[-1].complete = complete
    assert len(set(answer.ids)) == len(answer.ids)
    return answer

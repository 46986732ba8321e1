"""A model's output, as it streams, to reasoning, content and tool calls."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto

from north_jax.text.markers import Marker

from .action import ActionScanner
from .types import Content, Delta, Reasoning, ToolCallArguments

_ALPHABET = string.ascii_letters + string.digits
_MARKERS = frozenset(marker.value for marker in Marker)
_MARKER = re.compile("|".join(re.escape(marker) for marker in Marker))
_BEGINNINGS = frozenset(marker[:length] for marker in Marker for length in range(1, len(marker)))
_LONGEST_BEGINNING = max(map(len, _BEGINNINGS))


class _Block(Enum):
    NONE = auto()  # between blocks
    THINKING = auto()
    TEXT = auto()
    ACTION = auto()


_OPENS = {
    Marker.START_THINKING: _Block.THINKING,
    Marker.START_TEXT: _Block.TEXT,
    Marker.START_ACTION: _Block.ACTION,
}
_CLOSES = {
    Marker.END_THINKING: _Block.THINKING,
    Marker.END_TEXT: _Block.TEXT,
    Marker.END_ACTION: _Block.ACTION,
}


def new_call_id() -> str:
    """An id that no other tool call has."""
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(24))


class ChatStream:
    """Splits one answer in the cmd4 format into deltas.

    Feed it tokens (`feed_token`), where a marker is known by its id and text that spells one stays text, or text alone
    (`feed`), in which markers may be cut anywhere. However the output is cut, the deltas joined are the same, and text
    that is in the wrong place is handed on as content rather than lost:

    - Text outside every block is content. White space alone is not, unless the answer has no marker at all.
    - A block that is not closed ends where the next one begins; an end marker of another block means nothing.
    - Inside a JSON string of an action every marker is text: an answer may write about markers.
    - An action is content, marked malformed, if `tools_allowed` is false or it cannot be read.
    """

    def __init__(
        self,
        *,
        starts_in_thinking: bool,
        tools_allowed: bool = True,
        special: Mapping[int, str] | None = None,
        make_id: Callable[[], str] = new_call_id,
    ) -> None:
        """`special` (`Tokenizer.control`): `feed_token` reads the markers in it by their ids and drops the others."""
        self._block = _Block.THINKING if starts_in_thinking else _Block.NONE
        self._tools_allowed = tools_allowed
        self._special = special or {}
        self._make_id = make_id
        self._action: ActionScanner | None = None  # the open action, when tools are allowed
        self._held = ""  # the end of the text fed so far, when a marker may begin there
        self._space = ""  # white space between blocks
        self._saw_marker = False
        self._tool_calls = 0  # in the actions already closed
        self._complete = True

    @property
    def in_thinking(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._block is _Block.THINKING

    @property
    def in_text(self) -> bool:
        """Whether what comes next is content, inside a block of it."""
        return self._block is _Block.TEXT

    @property
    def tool_calls(self) -> int:
        """How many tool calls have ended, whole or not."""
        return self._action.next_index if self._action else self._tool_calls

    @property
    def tool_calls_complete(self) -> bool:
        """False once a tool call, or what was to become one, has been left half done."""
        return self._complete and (self._action is None or self._action.complete)

    def feed(self, text: str) -> list[Delta]:
        """The deltas of the next piece of text. A piece that may begin a marker is held back."""
        out: list[Delta] = []
        text, self._held = self._held + text, ""
        position = 0
        while match := _MARKER.search(text, position):
            self._text(text[position : match.start()], out)
            if self._in_json_string:
                position = match.start() + 1
                self._text(text[match.start() : position], out)
            else:
                position = match.end()
                self._marker(Marker(match[0]), out)
        hold = _length_of_beginning(text[position:])
        self._text(text[position : len(text) - hold], out)
        if self._in_json_string:
            self._text(text[len(text) - hold :], out)
        else:
            self._held = text[len(text) - hold :]
        return _joined(out)

    def feed_token(self, id: int, text: str) -> list[Delta]:
        """The deltas of the next token, where `text` is what the detokenizer gave for it: text may precede a marker."""
        out: list[Delta] = []
        self._release(out)
        spelling = self._special.get(id)
        if spelling is None:
            self._text(text, out)
            return _joined(out)
        self._text(text.removesuffix(spelling), out)
        if spelling in _MARKERS:
            if self._in_json_string:
                self._text(spelling, out)
            else:
                self._marker(Marker(spelling), out)
        return _joined(out)

    def finish(self, cut: bool) -> list[Delta]:
        """The last deltas: after the end of the answer, or (`cut`) where a limit or a stop string cut it off.

        A call that is open ends with `ToolCallEnd(complete=False)`. Nothing may be fed afterwards.
        """
        out: list[Delta] = []
        self._release(out)
        self._leave(out, cut)
        if self._space and not self._saw_marker:
            out.append(Content(self._space))
        return _joined(out)

    @property
    def _in_json_string(self) -> bool:
        return self._action is not None and self._action.in_string

    def _release(self, out: list[Delta]) -> None:
        held, self._held = self._held, ""
        self._text(held, out)

    def _text(self, text: str, out: list[Delta]) -> None:
        if not text:
            return
        if self._block is _Block.THINKING:
            out.append(Reasoning(text))
        elif self._block is _Block.TEXT:
            out.append(Content(text))
        elif self._action is not None:
            out.extend(self._action.feed(text))
        elif self._block is _Block.ACTION:
            out.append(Content(text, malformed_action=True))
        elif text.isspace():
            self._space += text
        else:
            self._block = _Block.TEXT
            out.append(Content(self._space + text))
            self._space = ""

    def _marker(self, marker: Marker, out: list[Delta]) -> None:
        self._saw_marker = True
        self._space = ""
        if _CLOSES.get(marker, self._block) is self._block:  # roles, turns and tool results close any block
            self._leave(out, cut=False)
        if marker in _OPENS:
            self._block = _OPENS[marker]
            if self._block is _Block.ACTION and self._tools_allowed:
                self._action = ActionScanner(self._tool_calls, self._make_id)

    def _leave(self, out: list[Delta], cut: bool) -> None:
        """Closes whatever block is open."""
        if self._action is not None:
            out.extend(self._action.close(cut))
            self._tool_calls = self._action.next_index
            self._complete &= self._action.complete
            self._action = None
        self._block = _Block.NONE


def _length_of_beginning(text: str) -> int:
    """The length of the longest end of `text` that may be the beginning of a marker."""
    for start in range(max(0, len(text) - _LONGEST_BEGINNING), len(text)):
        if text[start:] in _BEGINNINGS:
            return len(text) - start
    return 0


def _joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The same deltas with neighbours of one kind put together."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(delta, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + delta.text)
        elif (
            isinstance(delta, Content) and isinstance(last, Content) and last.malformed_action == delta.malformed_action
        ):
            out[-1] = Content(last.text + delta.text, delta.malformed_action)
        elif isinstance(delta, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == delta.index:
            out[-1] = ToolCallArguments(last.index, last.fragment + delta.fragment)
        else:
            out.append(delta)
    return out

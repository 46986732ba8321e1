"""Tool calls out of a cmd4 action, while its JSON is still being written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from north_jax.text.tokenizer import scrub_surrogates

from .types import Content, Delta, ToolCallArguments, ToolCallEnd, ToolCallStart

_SPACE = " \t\r\n"
_STRING_STOP = re.compile(r'["\\]')  # what ends or escapes inside a JSON string
_NESTED_STOP = re.compile(r'["{}\[\]]')  # what matters inside an object or array
_SCALAR_STOP = re.compile(r"[,}\]\s]")  # what ends a number, true, false or null


class ActionScanner:
    """Reads `[{"tool_call_id": …, "tool_name": …, "parameters": {…}}, …]` from pieces of text cut anywhere.

    A call starts as soon as its name is known, whatever the order of the keys, and from then on its parameters are
    handed on verbatim as they arrive. Only the outer structure is parsed: inside the parameters nothing but strings
    and brackets is followed. Text that is no call is handed on as `Content` marked malformed, and stray brackets and
    commas between calls are forgiven.
    """

    def __init__(self, first_index: int, make_id: Callable[[], str]) -> None:
        self.in_string = False  # inside a JSON string: no marker is meant there
        self.complete = True  # no call or item has been left half done
        self.next_index = first_index  # index of the next call to start
        self._make_id = make_id
        self._read: Callable[[str, int], int] = self._before_list
        self._out: list[Delta] = []
        self._raw: list[str] = []  # the text that would be lost if what is being read turned out to be no call
        self._settled = False  # what was read up to here has been handed on
        self._escaped = False  # the next character of the string follows a backslash
        self._depth = 0  # open brackets of the value being read
        self._parts: list[str] = []  # the string or value being read
        self._key = ""
        self._begin_item()
        self._in_item = False

    def feed(self, text: str) -> list[Delta]:
        """What the next piece of the action's text adds."""
        position = 0
        while position < len(text):
            end = self._read(text, position)
            if self._settled:
                self._settled = False
                self._raw = []
            elif not self._started:
                self._raw.append(text[position:end])
            position = end
        return self._take()

    def close(self, cut: bool) -> list[Delta]:
        """Ends the action: at its end marker or the end of the turn, or (`cut`) where the output was cut off.

        An item that has no name yet is handed on as text, except when cut off: half an item is no answer.
        """
        if self._started:
            self._end_call(complete=self._has_arguments and not cut)
        elif self._in_item:
            self.complete = False
            if not cut:
                self._give_up_item()
        return self._take()

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    # Each reader below consumes at least one character from `position`, or hands over to another reader.

    def _before_list(self, text: str, position: int) -> int:
        if text[position] == "[":
            self._read = self._between_items
        elif text[position] == "{":  # a call without its list
            return self._between_items(text, position)
        elif text[position] not in _SPACE:
            return self._malformed(position)
        return position + 1

    def _between_items(self, text: str, position: int) -> int:
        if text[position] == "{":
            self._begin_item()
            self._read = self._between_members
        elif text[position] not in _SPACE + ",]}":
            return self._malformed(position)
        return position + 1

    def _between_members(self, text: str, position: int) -> int:
        character = text[position]
        if character == '"':
            self._begin_string(self._key_done)
        elif character == "}":
            self._item_done()
        elif character not in _SPACE + ",":
            return self._malformed(position)
        return position + 1

    def _colon(self, text: str, position: int) -> int:
        if text[position] == ":":
            self._read = self._value_start
        elif text[position] not in _SPACE:
            return self._malformed(position)
        return position + 1

    def _value_start(self, text: str, position: int) -> int:
        character = text[position]
        if character in _SPACE:
            return position + 1
        if character in ",:}]":
            return self._malformed(position)
        self._streams = self._key == "parameters" and not self._has_parameters and character in "{["
        self._has_parameters |= self._streams
        if character == '"':
            self._begin_string(self._value_done)
            return position + 1
        self._parts = []
        self._depth = 0
        self._read = self._nested if character in "{[" else self._scalar
        return position

    def _nested(self, text: str, position: int) -> int:
        """An object or an array: to the next bracket or quote, and past it."""
        stop = _NESTED_STOP.search(text, position)
        if stop is None:
            self._value_piece(text[position:])
            return len(text)
        self._value_piece(text[position : stop.end()])
        if stop[0] == '"':
            self.in_string = True
            self._read = self._nested_string
        else:
            self._depth += 1 if stop[0] in "{[" else -1
            if self._depth == 0:
                self._value_done()
        return stop.end()

    def _nested_string(self, text: str, position: int) -> int:
        end = self._string_end(text, position)
        self._value_piece(text[position:end])
        if not self.in_string:
            self._read = self._nested
        return end

    def _scalar(self, text: str, position: int) -> int:
        stop = _SCALAR_STOP.search(text, position)
        end = len(text) if stop is None else stop.start()
        self._value_piece(text[position:end])
        if stop is not None:
            self._value_done()
        return end

    def _begin_string(self, done: Callable[[], None]) -> None:
        """Reads a string that stands by itself, its opening quote being consumed, into `_parts`; then calls `done`."""
        self._parts = ['"']
        self.in_string = True

        def read(text: str, position: int) -> int:
            end = self._string_end(text, position)
            self._parts.append(text[position:end])
            if not self.in_string:
                done()
            return end

        self._read = read

    def _string_end(self, text: str, position: int) -> int:
        """The position after the string's closing quote (`in_string` is then false), or the end of the text."""
        if self._escaped:
            self._escaped = False
            return position + 1
        while (stop := _STRING_STOP.search(text, position)) is not None:
            if stop[0] == '"':
                self.in_string = False
                return stop.end()
            if stop.end() == len(text):
                self._escaped = True
                return stop.end()
            position = stop.end() + 1
        return len(text)

    # What follows when a part has been read.

    def _begin_item(self) -> None:
        self._in_item = True
        self._started = False  # the call's ToolCallStart has been given
        self._streams = False  # the value being read goes to the client as it comes
        self._has_parameters: bool = False  # an object or array of parameters has begun
        self._has_arguments = False  # the arguments are whole
        self._early: list[str] = []  # arguments that came before the name

    def _key_done(self) -> None:
        self._key = _load_string("".join(self._parts)) or ""
        self._read = self._colon

    def _value_piece(self, piece: str) -> None:
        if self._streams:
            self._arguments(piece)
        else:
            self._parts.append(piece)

    def _value_done(self) -> None:
        self._read = self._between_members
        if self._streams:
            self._streams = False
            self._has_arguments = True
            return
        value = "".join(self._parts)
        if self._key == "parameters" and not self._has_parameters:
            self._has_parameters = self._has_arguments = True
            self._arguments("{}" if value == "null" else value)
        elif self._key == "tool_name" and not self._started and (name := _load_string(value)):
            self._started = self._settled = True
            self._out.append(ToolCallStart(self.next_index, self._make_id(), name))
            self._arguments("".join(self._early))

    def _arguments(self, fragment: str) -> None:
        if not self._started:
            self._early.append(fragment)
        elif fragment:
            self._out.append(ToolCallArguments(self.next_index, fragment))

    def _item_done(self) -> None:
        self._read = self._between_items
        if not self._started:
            self._raw.append("}")
            self._give_up_item()
            return
        if not self._has_parameters:
            self._arguments("{}")
        self._end_call(complete=True)

    def _end_call(self, complete: bool) -> None:
        self._out.append(ToolCallEnd(self.next_index, complete))
        self.complete &= complete
        self.next_index += 1
        self._started = self._in_item = False
        self._settled = True

    def _give_up_item(self) -> None:
        self._out.append(Content("".join(self._raw), malformed_action=True))
        self._in_item = False
        self._settled = True

    def _malformed(self, position: int) -> int:
        """What is read cannot be part of a call: from here on, everything is text."""
        if self._started:
            self._end_call(complete=self._has_arguments)
        elif self._raw:
            self._give_up_item()
        self._read = self._as_text
        return position

    def _as_text(self, text: str, position: int) -> int:
        self._out.append(Content(text[position:], malformed_action=True))
        return len(text)


def _load_string(text: str) -> str | None:
    """The string that a JSON text is, None when it is none."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return scrub_surrogates(value) if isinstance(value, str) else None

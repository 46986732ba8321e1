"""What a request demands of the form of its answer, and the grammars (llguidance's Lark) that describe it.

Schemas are taken as they are; what llguidance cannot enforce it refuses, and nothing is skipped silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Between JSON's tokens: a blank, or a new line and its indentation. With more a model could go on blank for ever.
_SPACE = "( |\\n[ \\t]{0,40})?"
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Described:
    """A grammar, and the field of the request that it comes from."""

    lark: str
    field: str


@dataclass(frozen=True, slots=True)
class Demand:
    """The form of an answer after its thinking.

    Attributes:
      text: what a text must be; None leaves it free.
      action: what a list of tool calls must be; None leaves it free.
      may_speak: whether the answer may have a text.
      may_call: whether the answer may have tool calls.
    """

    text: Described | None = None
    action: Described | None = None
    may_speak: bool = True
    may_call: bool = True

    @property
    def asks(self) -> bool:
        """Whether it asks for anything at all."""
        return self != Demand()

    @property
    def may_be_silent(self) -> bool:
        """Whether the answer may end with neither text nor call."""
        return self.may_speak and self.text is None


def json_text(schema: Mapping[str, Any] | None, field: str) -> Described:
    """One JSON value of a schema; any object without one."""
    return Described(f"start: {_json({'type': 'object'} if schema is None else schema)}", field)


def tool_calls(tools: Sequence[tuple[str, Mapping[str, Any] | None, str]], *, several: bool) -> Described:
    """A list of calls as the chat template writes it.

    Args:
      tools: name, schema of the parameters (None: there are none), and the request's field of each tool that may be
        called.
      several: whether the list may have more than one call.
    """
    lines = [
        f'start: "[" SPACE call {"(SEPARATOR call)*" if several else ""} SPACE "]"',
        f"SPACE: /{_SPACE}/",
        f"SEPARATOR: /{_SPACE},{_SPACE}/",
        'ID: /"[0-9]{1,4}"/',
        "call: " + " | ".join(f"call_{number}" for number in range(len(tools))),
    ]
    for number, (name, parameters, _) in enumerate(tools):
        head, middle = json.dumps('{"tool_call_id": '), json.dumps(f', "tool_name": {json.dumps(name)}, "parameters": ')
        schema = _NO_PARAMETERS if parameters is None else {"type": "object", **parameters}
        lines.append(f'call_{number}: {head} ID {middle} parameters_{number} "}}"')
        lines.append(f"parameters_{number}: {_json(schema)}")
    return Described("\n".join(lines), tools[0][2] if len(tools) == 1 else "tools")


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _SPACE}})

"""What a chat completion is made of while it streams: the deltas a `ChatStream` gives."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text the model thought, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text the model answered, never empty.

    `malformed_action` marks text that the model wrote as a tool call and that could not be read as one
    (or was not allowed to be one): it is handed on verbatim rather than lost.
    """

    text: str
    malformed_action: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. `index` counts calls of one answer from 0; `id` is unique for the client."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments, never empty: JSON text exactly as the model wrote it."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call ends. `complete` is false when the output stopped inside it: its arguments may then be half a JSON text.

    Every `ToolCallStart` is followed by exactly one `ToolCallEnd` of the same index, at the latest from `finish`.
    """

    index: int
    complete: bool


Delta = Reasoning | Content | ToolCallStart | ToolCallArguments | ToolCallEnd

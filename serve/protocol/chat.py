"""A chat completion as it is asked for."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .decode import BodyDecoder
from .errors import invalid_value, unsupported
from .fields import CHAT_NEUTRAL
from .sampling import CommonFields, check_common, check_range

_EFFORTS = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class _Part(msgspec.Struct, tag_field="type", forbid_unknown_fields=True, omit_defaults=True):
    cache_control: Any = None  # caching hints, without effect
    prompt_cache_breakpoint: Any = None


class TextPart(_Part, tag="text", kw_only=True):
    text: str


class RefusalPart(_Part, tag="refusal", kw_only=True):
    """An assistant's refusal in a history."""

    refusal: str


class ThinkingPart(_Part, tag="thinking", kw_only=True):
    """Reasoning in an assistant's history, for clients that keep it inside the content."""

    thinking: str


class _Message(msgspec.Struct, tag_field="role", forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    name: str | None = None  # of the participant; the chat template has no place for it
    cache_control: Any = None


class SystemMessage(_Message, tag="system"):
    content: str | list[TextPart]


class DeveloperMessage(_Message, tag="developer"):
    content: str | list[TextPart]


class UserMessage(_Message, tag="user"):
    content: str | list[TextPart]


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # left over from streaming


class AssistantMessage(_Message, tag="assistant"):
    """Accepts what this server and OpenAI's answer, so that a client can put an answer into its history unchanged."""

    content: str | list[TextPart | RefusalPart | ThinkingPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: None = None
    function_call: None = None


class ToolMessage(_Message, tag="tool"):
    content: str | list[TextPart]
    tool_call_id: str


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Any = None


class TemplateSwitches(msgspec.Struct, forbid_unknown_fields=True):
    """`chat_template_kwargs`: the template's variables that a request may set."""

    reasoning: bool | None = None


class ChatRequest(CommonFields, kw_only=True):
    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: _EFFORTS | None = None
    reasoning: bool | None = None
    chat_template_kwargs: TemplateSwitches | None = None

    @property
    def token_limit(self) -> int | None:
        """The most tokens the client wants; None for the rest of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def reasoning_switch(self) -> bool | None:
        """The switch in either of its places; None where the effort, or else the template, decides."""
        if self.reasoning is None and self.chat_template_kwargs is not None:
            return self.chat_template_kwargs.reasoning
        return self.reasoning

    @property
    def may_call_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"


_DECODER = BodyDecoder(ChatRequest, CHAT_NEUTRAL)


def parse_chat(data: bytes) -> ChatRequest:
    """Decodes and checks a body. Raises ApiError 400."""
    body = _DECODER.decode(data)
    check_common(body)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise invalid_value("max_tokens", "not together with 'max_completion_tokens'")
    check_range(body.token_limit_name, body.token_limit, 1)
    if not body.messages:
        raise invalid_value("messages", "expected at least one message", "empty_array")
    for index, tool in enumerate(body.tools or []):
        if tool.function.strict:
            raise unsupported(f"tools[{index}].function.strict", "this server does not enforce a tool's schema")
    if body.tool_choice == "required" or isinstance(body.tool_choice, dict):
        raise unsupported("tool_choice", "this server does not enforce a tool call; use 'auto' or 'none'")
    if body.tool_choice not in (None, "none", "auto"):
        raise invalid_value("tool_choice", "expected 'none' or 'auto'")
    return body


def plain_messages(body: ChatRequest) -> list[dict[str, Any]]:
    """The messages as plain JSON values, for the chat template's renderer."""
    for message in body.messages:
        if isinstance(message, AssistantMessage) and message.content is None:
            message.content = message.refusal
    return msgspec.to_builtins(body.messages)


def plain_tools(body: ChatRequest) -> list[dict[str, Any]] | None:
    return None if body.tools is None else msgspec.to_builtins(body.tools)

"""A chat completion as it is asked for."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from north_jax.sampling import MAX_LOGPROBS

from ..grammar.demand import Demand, json_text, tool_calls
from .decode import BodyDecoder
from .errors import invalid_value
from .fields import CHAT_NEUTRAL
from .sampling import CommonFields, check_common, check_range

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # OpenAI's rule
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


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


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    pass


class NamedSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None  # a schema is enforced in either case


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    json_schema: NamedSchema


class FunctionChoice(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class ToolChoice(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """The function that must be called."""

    function: FunctionChoice


class TemplateSwitches(msgspec.Struct, forbid_unknown_fields=True):
    """`chat_template_kwargs`: the template's variables that a request may set."""

    reasoning: bool | None = None


class Conversation:
    """What the chat template shows, of every request that has these fields."""

    __slots__ = ()

    messages: list[Message]
    tools: list[FunctionTool] | None
    reasoning: bool | None
    chat_template_kwargs: TemplateSwitches | None

    @property
    def reasoning_switch(self) -> bool | None:
        """The switch in either of its places; None where the effort, or else the template, decides."""
        if self.reasoning is None and self.chat_template_kwargs is not None:
            return self.chat_template_kwargs.reasoning
        return self.reasoning

    @property
    def plain_messages(self) -> list[dict[str, Any]]:
        """The messages as plain JSON values, for the chat template's renderer."""
        for message in self.messages:
            if isinstance(message, AssistantMessage) and message.content is None:
                message.content = message.refusal
        return msgspec.to_builtins(self.messages)

    @property
    def plain_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tools is None else msgspec.to_builtins(self.tools)


class ChatRequest(CommonFields, Conversation, kw_only=True):
    messages: list[Message]
    tools: list[FunctionTool] | None = None
    reasoning_effort: Effort | None = None
    reasoning: bool | None = None
    chat_template_kwargs: TemplateSwitches | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def token_limit(self) -> int | None:
        """The most tokens the client wants; None for the rest of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def reported_logprobs(self) -> int | None:
        """How many alternatives each token of the content is reported with; None reports nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None

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
    check_range("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
    if body.top_logprobs and not body.logprobs:
        raise invalid_value("top_logprobs", "only allowed when 'logprobs' is true")
    _check_tool_choice(body)
    if isinstance(body.response_format, JsonSchemaFormat):
        name = body.response_format.json_schema.name
        if not _NAME.fullmatch(name):
            raise invalid_value("response_format.json_schema.name", "expected 1 to 64 letters, digits, '_' or '-'")
    return body


def _check_tool_choice(body: ChatRequest) -> None:
    if body.tool_choice in (None, "none", "auto"):
        return
    if not body.tools:
        raise invalid_value("tool_choice", "only allowed when 'tools' are given")
    if isinstance(body.tool_choice, ToolChoice):
        name = body.tool_choice.function.name
        if name not in (tool.function.name for tool in body.tools):
            raise invalid_value("tool_choice.function.name", f"there is no tool {name[:80]!r}")


def demand_of(body: ChatRequest) -> Demand:
    """What a checked request demands of the form of its answer. Raises ApiError 400."""
    forced = body.tool_choice == "required" or isinstance(body.tool_choice, ToolChoice)
    text = None
    if isinstance(body.response_format, JsonSchemaFormat):
        text = json_text(body.response_format.json_schema.schema, "response_format.json_schema.schema")
    elif isinstance(body.response_format, JsonObjectFormat):
        text = json_text(None, "response_format")
    several = body.parallel_tool_calls is not False
    tools = [(f"tools[{index}].function", tool.function) for index, tool in enumerate(body.tools or [])]
    if isinstance(body.tool_choice, ToolChoice):
        tools = [(at, tool) for at, tool in tools if tool.name == body.tool_choice.function.name]
    enforced = forced or (body.may_call_tools and (not several or any(tool.strict for _, tool in tools)))
    action = None
    if enforced:
        for at, tool in tools:
            if tool.parameters is not None and tool.parameters.get("type", "object") != "object":
                raise invalid_value(f"{at}.parameters", "expected a schema of type 'object'")
        shapes = [
            (tool.name, tool.parameters if forced or tool.strict else {"type": "object"}, f"{at}.parameters")
            for at, tool in tools
        ]
        action = tool_calls(shapes, several=several)
    demand = Demand(text, action, may_speak=not forced, may_call=body.may_call_tools or text is None)
    if demand.asks and body.ignore_eos:
        raise invalid_value("ignore_eos", "not together with 'response_format' or tool calls that are enforced")
    return demand


def plain_tool_choice(body: ChatRequest) -> Any:
    return msgspec.to_builtins(body.tool_choice)


def plain_response_format(body: ChatRequest) -> dict[str, Any] | None:
    return None if body.response_format is None else msgspec.to_builtins(body.response_format)

"""OpenAI chat messages to prompt tokens, through the checkpoint's own chat template."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

from north_jax.text.chat_template import ChatTemplate, TemplateError
from north_jax.text.markers import Marker
from north_jax.text.tokenizer import Tokenizer

_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # OpenAI's rule
_REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")
_OURS = frozenset({"messages", "tools", "add_generation_prompt", "response_format", "regen_tool_call_ids"})


class RenderError(ValueError):
    """A conversation that cannot be rendered; `param` names the part of the request that is wrong."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a prompt, and whether the answer to it begins inside thinking."""

    tokens: list[int]
    starts_in_thinking: bool


class ChatRenderer:
    """Renders chat requests for one checkpoint."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        """Raises TokenizerError when the tokenizer lacks a cmd4 marker."""
        self._template = template
        self._markers = {id: marker for marker, id in tokenizer.marker_ids.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tool_choice: Any = None,
        reasoning: bool | None = None,
        reasoning_effort: str | None = None,
        response_format: Mapping[str, Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The prompt of a chat completion request, whose fields the arguments are (as plain JSON values).

        `reasoning` switches thinking on or off; without it `reasoning_effort` "none" switches it off, and else the
        template's own default holds. `tool_choice` "none" leaves the tools out. `template_kwargs` are further variables
        for the template. Raises RenderError.
        """
        extra = dict(template_kwargs or {})
        for name in extra:
            if name in _OURS:
                raise RenderError(
                    f"'{name}' cannot be set through chat_template_kwargs", f"chat_template_kwargs.{name}"
                )
        extra.setdefault("documents", None)
        if not extra["documents"]:
            # Our ids are the template's own numbers already, and its search for them is quadratic in the conversation.
            # (With documents it counts differently, and must do so itself.)
            extra["regen_tool_call_ids"] = False
        if reasoning_effort is not None:
            extra["reasoning_effort"] = reasoning_effort
            if reasoning is None and reasoning_effort == "none":
                reasoning = False
        if reasoning is not None:
            extra["reasoning"] = reasoning
        if (format_value := _response_format(response_format)) is not None:
            extra["response_format"] = format_value
        shown = None if tool_choice == "none" or not tools else _tools(tools)
        try:
            tokens = self._template.encode(_Messages(messages).converted, shown, **extra)
        except TemplateError as error:
            # The error begins with the template's variable at fault; those that are not named so come of the messages.
            raise RenderError(str(error), "tools" if str(error).startswith("tools ") else "messages") from None
        return Prompt(tokens, self._ends_in_thinking(tokens))

    def _ends_in_thinking(self, tokens: Sequence[int]) -> bool:
        last = next((self._markers[token] for token in reversed(tokens) if token in self._markers), None)
        return last is Marker.START_THINKING


class _Messages:
    """Converts messages in order, keeping track of the tool calls that wait for their results."""

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self.converted: list[dict[str, Any]] = []
        self._calls = 0  # tool calls so far; the model knows them by number
        self._waiting: dict[str, str] = {}  # client's id -> number, of the calls that have no result yet
        self._answered: set[str] = set()  # client's ids of the same assistant message that have one
        self._asked_at = ""  # where that message's calls are
        if not messages:
            raise RenderError("messages must not be empty", "messages")
        for index, message in enumerate(messages):
            self._add(message, f"messages[{index}]")
        self._require_results()

    def _add(self, message: Mapping[str, Any], at: str) -> None:
        if not isinstance(message, Mapping):
            raise RenderError(f"{at} must be an object", at)
        role = message.get("role")
        if role == "tool":
            self.converted.append(self._tool_result(message, at))
            return
        self._require_results()
        if role in ("system", "developer"):
            self.converted.append({"role": "system", "content": _text(message.get("content"), f"{at}.content")})
        elif role == "user":
            self.converted.append({"role": "user", "content": _text(message.get("content"), f"{at}.content")})
        elif role == "assistant":
            self.converted.append(self._assistant(message, at))
        else:
            raise RenderError(
                f"{at}.role must be one of system, developer, user, assistant, tool, not {role!r}", f"{at}.role"
            )

    def _assistant(self, message: Mapping[str, Any], at: str) -> dict[str, Any]:
        result: dict[str, Any] = {"role": "assistant", "content": ""}
        content, reasoning = message.get("content"), None
        for field in _REASONING_FIELDS:
            if (text := message.get(field)) is not None and not isinstance(text, str):
                raise RenderError(f"{at}.{field} must be a string", f"{at}.{field}")
            reasoning = reasoning or text
        if isinstance(content, Sequence) and not isinstance(content, str):
            thoughts = [part for part in content if isinstance(part, Mapping) and part.get("type") == "thinking"]
            for part in thoughts:
                if not isinstance(part.get("thinking"), str):
                    raise RenderError(f"{at}.content: a thinking part needs a string 'thinking'", f"{at}.content")
            reasoning = reasoning or "".join(part["thinking"] for part in thoughts)
        if reasoning:
            result["reasoning"] = reasoning
        calls = message.get("tool_calls")
        if calls is not None and not _is_list(calls):
            raise RenderError(f"{at}.tool_calls must be an array", f"{at}.tool_calls")
        if content is not None:
            result["content"] = _text(content, f"{at}.content", extra={"refusal": "refusal", "thinking": None})
        elif not calls and not reasoning:
            raise RenderError(f"{at}.content is required unless tool_calls are given", f"{at}.content")
        if calls:
            self._asked_at, self._answered = f"{at}.tool_calls", set()
            result["tool_calls"] = [self._call(call, f"{at}.tool_calls[{j}]") for j, call in enumerate(calls)]
        return result

    def _call(self, call: Any, at: str) -> dict[str, Any]:
        if not isinstance(call, Mapping):
            raise RenderError(f"{at} must be an object", at)
        if call.get("type", "function") != "function":
            raise RenderError(f"{at}.type must be 'function'", f"{at}.type")
        id, function = call.get("id"), call.get("function")
        if not isinstance(id, str) or not id:
            raise RenderError(f"{at}.id must be a string that is not empty", f"{at}.id")
        if id in self._waiting:
            raise RenderError(f"{at}.id {id!r} is the id of another call of the same message", f"{at}.id")
        if not isinstance(function, Mapping):
            raise RenderError(f"{at}.function must be an object", f"{at}.function")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise RenderError(f"{at}.function.name must be a string that is not empty", f"{at}.function.name")
        arguments = _arguments(function.get("arguments"), f"{at}.function.arguments")
        number = self._waiting[id] = str(self._calls)
        self._calls += 1
        return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _tool_result(self, message: Mapping[str, Any], at: str) -> dict[str, Any]:
        id = message.get("tool_call_id")
        if not isinstance(id, str):
            raise RenderError(f"{at}.tool_call_id must be a string", f"{at}.tool_call_id")
        if id in self._answered:
            raise RenderError(f"{at}.tool_call_id {id!r} has its result already", f"{at}.tool_call_id")
        if id not in self._waiting:
            raise RenderError(
                f"{at}.tool_call_id {id!r} is not the id of a tool call of the assistant message before it",
                f"{at}.tool_call_id",
            )
        self._answered.add(id)
        content = message.get("content")
        if _is_list(content):  # each part is a document of its own
            parts = [_part(part, f"{at}.content[{j}]", {}) for j, part in enumerate(content)]
            content = [{"type": "text", "text": text} for text in parts]
        else:
            content = _text(content, f"{at}.content")
        return {"role": "tool", "tool_call_id": self._waiting.pop(id), "content": content}

    def _require_results(self) -> None:
        if self._waiting:
            missing = ", ".join(repr(id) for id in self._waiting)
            raise RenderError(
                f"{self._asked_at} must be followed by a tool message for each call; missing: {missing}", self._asked_at
            )
        self._answered = set()


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _text(content: Any, at: str, extra: Mapping[str, str | None] | None = None) -> str:
    """Content as one string: parts are joined without anything between them, as the template of the family does.

    `extra` maps further part types to the field that holds their text, or to None if they hold none of it.
    """
    if isinstance(content, str):
        return content
    if not _is_list(content):
        raise RenderError(f"{at} must be a string or an array of content parts", at)
    return "".join(_part(part, f"{at}[{index}]", extra or {}) for index, part in enumerate(content))


def _part(part: Any, at: str, extra: Mapping[str, str | None]) -> str:
    fields = {"text": "text", **extra}
    if not isinstance(part, Mapping) or not isinstance(kind := part.get("type"), str):
        raise RenderError(f"{at} must be an object with a 'type'", at)
    if kind not in fields:
        raise RenderError(f"{at}.type {kind!r} is not supported: this model reads text only", f"{at}.type")
    if (field := fields[kind]) is None:
        return ""
    if not isinstance(text := part.get(field), str):
        raise RenderError(f"{at}.{field} must be a string", f"{at}.{field}")
    return text


def _arguments(value: Any, at: str) -> Mapping[str, Any]:
    """A call's arguments as an object; the template must not get the JSON text, or it would be encoded twice."""
    if isinstance(value, str):
        if not value.strip():  # what many clients send for a call without arguments
            return {}
        try:
            value = json.loads(value, parse_constant=_no_constant, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise RenderError(f"{at} is not valid JSON: {error}", at) from None
    if not isinstance(value, Mapping):
        raise RenderError(f"{at} must be the JSON text of an object", at)
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits[:32]} is out of range")
    return number


def _tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools as the template reads them: name, description and parameters are always there."""
    shown = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        at = f"tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
            raise RenderError(f"{at}.type must be 'function'", f"{at}.type")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise RenderError(f"{at}.function must be an object", f"{at}.function")
        name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
        if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
            raise RenderError(f"{at}.function.name must be 1 to 64 letters, digits, '_' or '-'", f"{at}.function.name")
        if name in names:
            raise RenderError(f"{at}.function.name {name!r} is given twice", f"{at}.function.name")
        if description is not None and not isinstance(description, str):
            raise RenderError(f"{at}.function.description must be a string", f"{at}.function.description")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise RenderError(f"{at}.function.parameters must be an object", f"{at}.function.parameters")
        names.add(name)
        schema = {"type": "object", "properties": {}} if parameters is None else parameters
        function = {"name": name, "description": description or "", "parameters": schema}
        shown.append({"type": "function", "function": function})
    return shown


def _response_format(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """OpenAI's response_format as the template reads it: the schema is given as JSON text, ready to be printed."""
    if value is None or value.get("type") == "text":
        return None
    if value.get("type") == "json_object":
        return {"type": "json_object"}
    schema = (value.get("json_schema") or {}).get("schema")
    if value.get("type") != "json_schema" or not isinstance(schema, Mapping):
        raise RenderError("response_format must be text, json_object, or json_schema with a schema", "response_format")
    return {"type": "json_schema", "json_schema": json.dumps(schema, ensure_ascii=False)}

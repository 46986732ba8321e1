"""What /tokenize and /detokenize are asked. OpenAI has neither; the form is the one that other open servers share."""

from __future__ import annotations

from typing import Any

import msgspec

from .chat import Conversation, Effort, FunctionTool, Message, TemplateSwitches
from .decode import BodyDecoder
from .errors import ApiError, invalid_value


class TokenizeRequest(msgspec.Struct, Conversation, kw_only=True):
    """Either a text, or a conversation as a chat completion would have it."""

    messages: list[Message] = []
    tools: list[FunctionTool] | None = None
    reasoning_effort: Effort | None = None
    reasoning: bool | None = None
    chat_template_kwargs: TemplateSwitches | None = None
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None  # whether a text gets its BOS; true
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


_TOKENIZE = BodyDecoder(TokenizeRequest, {"add_generation_prompt": (True,)})
_DETOKENIZE = BodyDecoder(DetokenizeRequest, {})


def parse_tokenize(data: bytes) -> TokenizeRequest:
    """Decodes and checks a body. Raises ApiError 400."""
    body = _TOKENIZE.decode(data)
    if (body.prompt is None) == (not body.messages):
        raise ApiError("Give either 'prompt' or 'messages'", param="prompt", code="invalid_value")
    if body.prompt is None and body.add_special_tokens is not None:
        raise invalid_value("add_special_tokens", "only for a 'prompt': a conversation has the template's tokens")
    return body


def parse_detokenize(data: bytes, vocab_size: int) -> DetokenizeRequest:
    """Decodes and checks a body. Raises ApiError 400."""
    body = _DETOKENIZE.decode(data)
    wrong: Any = next((id for id in body.tokens if not 0 <= id < vocab_size), None)
    if wrong is not None:
        raise invalid_value("tokens", f"token ids go from 0 to {vocab_size - 1}, but got {wrong}")
    return body

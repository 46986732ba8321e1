"""A completion of raw text: asked for and answered."""

from __future__ import annotations

from typing import Literal, cast

import msgspec
from msgspec import UNSET, UnsetType

from .decode import BodyDecoder
from .errors import invalid_value
from .fields import COMPLETION_NEUTRAL
from .logprobs import TextLogprobs
from .sampling import CommonFields, check_common, check_range
from .usage import Usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's
_MAX_LOGPROBS = 5  # OpenAI's, for this endpoint
_MAX_CHOICES = 1024  # prompts times n

Prompt = str | list[int]


class CompletionRequest(CommonFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def reports_prompt(self) -> bool:
        """Whether the echoed prompt comes with its tokens' log-probabilities."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def token_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None


class Completion(msgspec.Struct, kw_only=True):
    """The whole answer, and also a chunk of it: OpenAI gives both the same form."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: None = None
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


_DECODER = BodyDecoder(CompletionRequest, COMPLETION_NEUTRAL)


def parse_completion(data: bytes) -> CompletionRequest:
    """Decodes and checks a body. Raises ApiError 400."""
    body = _DECODER.decode(data)
    check_common(body)
    check_range("max_tokens", body.max_tokens, 0)
    check_range("logprobs", body.logprobs, 0, _MAX_LOGPROBS)
    return body


def prompts(body: CompletionRequest, vocab_size: int) -> list[Prompt]:
    """The prompts in order, each a text or token ids. Raises ApiError 400 naming the one at fault."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid_value("prompt", "expected at least one prompt", "empty_array")
    if {*map(type, prompt)} == {int}:  # without a loop of Python's over what may be a hundred thousand tokens
        return [_token_ids(cast(list[int], prompt), vocab_size, "prompt")]
    if len(prompt) * body.choices > _MAX_CHOICES:
        message = f"at most {_MAX_CHOICES} prompts times 'n', but got {len(prompt)} times {body.choices}"
        raise invalid_value("prompt", message, "array_above_max_length")
    parsed: list[Prompt] = []
    for index, item in enumerate(prompt):
        if isinstance(item, int) or type(item) is not type(prompt[0]):
            raise invalid_value("prompt", "expected texts, or lists of token ids, not a mixture", "invalid_type")
        parsed.append(item if isinstance(item, str) else _token_ids(item, vocab_size, f"prompt[{index}]"))
    return parsed


def _token_ids(ids: list[int], vocab_size: int, where: str) -> list[int]:
    if not ids:
        raise invalid_value(where, "expected at least one token id", "empty_array")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(id for id in ids if not 0 <= id < vocab_size)
        raise invalid_value(where, f"token ids go from 0 to {vocab_size - 1}, but got {wrong}")
    return ids

"""Token counts of an answer."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionDetails | UnsetType = UNSET

    @classmethod
    def of(cls, prompt: int, completion: int, reasoning: int | None = None) -> Usage:
        """`reasoning`: how many of the completion's tokens were thought and not said; None where nobody thinks."""
        details = UNSET if reasoning is None else CompletionDetails(reasoning)
        total = prompt + completion
        return cls(
            prompt_tokens=prompt, completion_tokens=completion, total_tokens=total, completion_tokens_details=details
        )

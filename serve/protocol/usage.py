"""Token counts of an answer."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET

    @classmethod
    def of(cls, prompt: int, completion: int, *, cached: int, reasoning: int | None = None) -> Usage:
        """Counts of an answer.

        Args:
          prompt: tokens of the prompt.
          completion: tokens that were generated.
          cached: how many of the prompt's tokens the KV cache still held.
          reasoning: how many of the completion's tokens were thought and not said; None where nobody thinks.
        """
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached),
            completion_tokens_details=UNSET if reasoning is None else CompletionDetails(reasoning),
        )

    def notes(self) -> dict[str, object]:
        """The counts as the access log has them."""
        cached = self.prompt_tokens_details.cached_tokens
        return {"prompt": self.prompt_tokens, "cached": cached, "completion": self.completion_tokens}

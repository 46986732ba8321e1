"""Log-probabilities in the two forms in which OpenAI reports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from north_jax.logprobs import Logprobs
from north_jax.text import Tokenizer


class LoggedToken(NamedTuple):
    """A generated token, with where its text begins in the text it is part of."""

    token: int
    offset: int  # characters before it
    logprobs: Logprobs | None  # None for the first token of a prompt, which nothing precedes


class Alternative(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]  # may be part of a character, which `token` cannot show


class TokenLogprob(Alternative):
    top_logprobs: list[Alternative]


class ChatLogprobs(msgspec.Struct):
    """Of the tokens of a message's content. What was thought, and calls, are not part of it."""

    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """Of the tokens of a completion, in parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None  # None where no alternatives were asked for
    text_offset: list[int]


def chat_logprobs(tokenizer: Tokenizer, logged: Sequence[LoggedToken]) -> ChatLogprobs:
    def named(token: int, logprob: float) -> tuple[str, float, list[int]]:
        data = tokenizer.token_bytes(token)
        return data.decode("utf-8", "replace"), logprob, list(data)

    return ChatLogprobs(
        [
            TokenLogprob(
                *named(token, logprobs.logprob), top_logprobs=[Alternative(*named(*pair)) for pair in logprobs.top]
            )
            for token, _, logprobs in logged
            if logprobs is not None
        ]
    )


def text_logprobs(tokenizer: Tokenizer, logged: Sequence[LoggedToken], count: int) -> TextLogprobs:
    """`count` alternatives were asked for. The drawn token is among them even if it is less likely, says OpenAI."""

    def spelled(token: int) -> str:
        """Different for different tokens, as keys must be: OpenAI spells what is no text so."""
        data = tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    return TextLogprobs(
        tokens=[spelled(token) for token, _, _ in logged],
        token_logprobs=[None if logprobs is None else logprobs.logprob for _, _, logprobs in logged],
        top_logprobs=[
            None
            if logprobs is None
            else {spelled(one): value for one, value in (*logprobs.top, (token, logprobs.logprob))}
            for token, _, logprobs in logged
        ]
        if count
        else None,
        text_offset=[offset for _, offset, _ in logged],
    )

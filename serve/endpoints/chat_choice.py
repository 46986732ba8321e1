"""One choice of a chat completion as it grows: tokens to deltas, stop strings applied to what is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from north_jax.logprobs import Logprobs
from north_jax.text import Detokenizer, Tokenizer

from ..chat.stream import ChatStream
from ..chat.types import Content, Delta
from ..engine.types import FinishReason
from ..protocol.chat_response import FinishName
from ..protocol.logprobs import LoggedToken
from ..protocol.stop import StopMatcher
from .logged_text import LoggedText


@dataclass(frozen=True, slots=True)
class LoggedContent(Content):
    """Content with the tokens that it consists of; the text may be empty."""

    logged: tuple[LoggedToken, ...] = ()


class ChatChoice:
    """Stop strings count in the answer's content alone: what the model thinks or passes to a tool is not the answer."""

    def __init__(
        self, tokenizer: Tokenizer, stream: ChatStream, stops: tuple[str, ...], *, named_tool: bool = False
    ) -> None:
        """`named_tool`: the request forces the call of one function, which makes "stop" the reason of its end."""
        self.tokens = self.cached_tokens = 0
        self.reasoning_tokens = 0
        self._control = tokenizer.control
        self._detokenizer = Detokenizer(tokenizer)
        self._stream = stream
        self._stop = StopMatcher(stops)
        self._named_tool = named_tool
        self._logged = LoggedText()
        self._unsure: list[tuple[int, Logprobs]] = []  # tokens that may be content

    @property
    def stopped(self) -> bool:
        return self._stop.stopped

    def begin(self, prompt: Sequence[Logprobs]) -> list[Delta]:
        return []  # a chat never asks

    def push(self, token: int, logprobs: Logprobs | None) -> list[Delta]:
        self.tokens += 1
        self.reasoning_tokens += self._stream.in_thinking
        deltas = self._stream.feed_token(token, self._detokenizer.push(token))
        if logprobs is not None:
            self._note(token, logprobs, deltas)
        return self._until_stop(deltas)

    def _note(self, token: int, logprobs: Logprobs, deltas: Sequence[Delta]) -> None:
        """Keeps the log-probabilities of what is said. What a token is of may show later: where text begins without a
        marker, or a character has only begun.
        """
        if token in self._control or self._stream.in_thinking:
            self._unsure.clear()
            return
        self._unsure.append((token, logprobs))
        if self._stream.in_text or any(isinstance(delta, Content) for delta in deltas):
            for of_token in self._unsure:
                self._logged.note(*of_token)
        elif not deltas:
            return
        self._unsure.clear()

    def end(self, finish: FinishReason) -> list[Delta]:
        deltas = self._stream.feed(self._detokenizer.flush())
        deltas += self._stream.finish(cut=finish is FinishReason.LENGTH)
        out = [*self._until_stop(deltas), *self._held()]
        if not self.stopped and (rest := self._logged.rest()):
            out.append(LoggedContent("", logged=rest))
        return out

    def finish_name(self, finish: FinishReason) -> FinishName:
        """Tool calls are the reason only if all of them are whole."""
        if finish is FinishReason.LENGTH:
            return "length"
        called = self._stream.tool_calls > 0 and self._stream.tool_calls_complete and not self.stopped
        return "tool_calls" if called and not self._named_tool else "stop"

    def _until_stop(self, deltas: list[Delta]) -> list[Delta]:
        """`deltas` up to the first stop string in their content."""
        out: list[Delta] = []
        for delta in deltas:
            if not isinstance(delta, Content):
                out += self._held()
                out.append(delta)
                continue
            self._logged.grow(delta.text)
            if text := self._stop.push(delta.text):
                out.append(self._content(text))
            if self._stop.stopped:
                break
        return out

    def _held(self) -> list[Delta]:
        """Content that was held back as the possible beginning of a stop string; something else follows it."""
        text = self._stop.flush()
        return [self._content(text)] if text else []

    def _content(self, text: str) -> Content:
        logged = self._logged.give(text)
        return LoggedContent(text, logged=logged) if logged else Content(text)

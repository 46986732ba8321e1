"""One choice of a chat completion as it grows: tokens to deltas, stop strings applied to what is said."""

from __future__ import annotations

from north_jax.text import Detokenizer, Tokenizer

from ..chat.stream import ChatStream
from ..chat.types import Content, Delta
from ..engine.types import FinishReason
from ..protocol.chat_response import FinishName
from ..protocol.stop import StopMatcher


class ChatChoice:
    """Stop strings count in the answer's content alone: what the model thinks or passes to a tool is not the answer."""

    def __init__(self, tokenizer: Tokenizer, stream: ChatStream, stops: tuple[str, ...]) -> None:
        self.tokens = self.cached_tokens = 0
        self.reasoning_tokens = 0
        self._detokenizer = Detokenizer(tokenizer)
        self._stream = stream
        self._stop = StopMatcher(stops)

    @property
    def stopped(self) -> bool:
        return self._stop.stopped

    def push(self, token: int) -> list[Delta]:
        self.tokens += 1
        self.reasoning_tokens += self._stream.in_thinking
        return self._until_stop(self._stream.feed_token(token, self._detokenizer.push(token)))

    def end(self, finish: FinishReason) -> list[Delta]:
        deltas = self._stream.feed(self._detokenizer.flush())
        deltas += self._stream.finish(cut=finish is FinishReason.LENGTH)
        return [*self._until_stop(deltas), *self._held()]

    def finish_name(self, finish: FinishReason) -> FinishName:
        """Tool calls are the reason only if all of them are whole."""
        if finish is FinishReason.LENGTH:
            return "length"
        called = self._stream.tool_calls > 0 and self._stream.tool_calls_complete and not self.stopped
        return "tool_calls" if called else "stop"

    def _until_stop(self, deltas: list[Delta]) -> list[Delta]:
        """`deltas` up to the first stop string in their content."""
        out: list[Delta] = []
        for delta in deltas:
            if not isinstance(delta, Content):
                out += self._held()
                out.append(delta)
                continue
            if text := self._stop.push(delta.text):
                out.append(Content(text))
            if self._stop.stopped:
                break
        return out

    def _held(self) -> list[Delta]:
        """Content that was held back as the possible beginning of a stop string; something else follows it."""
        text = self._stop.flush()
        return [Content(text)] if text else []

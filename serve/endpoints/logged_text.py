"""Which tokens' log-probabilities belong to the text that a client has been given."""

from __future__ import annotations

from collections import deque

from north_jax.logprobs import Logprobs

from ..protocol.logprobs import LoggedToken


class LoggedText:
    """Follows one text while it grows.

    Text may be held back, as the beginning of a stop string or of a character: a token is reported with the text that
    it begins, and not at all when that text is cut off.
    """

    def __init__(self, begin: int = 0) -> None:
        """`begin`: characters that come before the text, which offsets count too."""
        self._length = begin  # characters of the text, held back or not
        self._given = begin
        self._waiting: deque[LoggedToken] = deque()

    def note(self, token: int, logprobs: Logprobs) -> None:
        """The text goes on with this token."""
        self._waiting.append(LoggedToken(token, self._length, logprobs))

    def grow(self, text: str) -> None:
        """The text has this piece more."""
        self._length += len(text)

    def give(self, text: str) -> tuple[LoggedToken, ...]:
        """The client gets this piece of it; gives the tokens to be reported with it."""
        self._given += len(text)
        taken = []
        while self._waiting and self._waiting[0].offset < self._given:
            taken.append(self._waiting.popleft())
        return tuple(taken)

    def rest(self) -> tuple[LoggedToken, ...]:
        """Tokens that never became text, at the end of a text that was not cut off."""
        rest, self._waiting = tuple(self._waiting), deque()
        return rest

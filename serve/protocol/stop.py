"""Stop strings over text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on up to the first stop string that is complete, holding back what may be the beginning of one.

    The outcome does not depend on how the text was cut into pieces: the stop string that ends first counts, and of
    those that end together the longest. Cost is linear in the text (one Knuth-Morris-Pratt automaton per stop string).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty strings; there may be none of them."""
        self.stopped = False
        self._stops = tuple(stops)
        self._failures = tuple(_failure_function(stop) for stop in stops)
        self._matched = [0] * len(self._stops)  # characters of each stop string that the text so far ends with
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is now known to be part of the answer. After `stopped` is set, nothing more."""
        if not self._stops:
            return text
        if self.stopped:
            return ""
        held = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = 0
            for index, stop in enumerate(self._stops):
                matched, failure = self._matched[index], self._failures[index]
                while matched and stop[matched] != character:
                    matched = failure[matched - 1]
                matched += stop[matched] == character
                if matched == len(stop):
                    complete = max(complete, matched)
                    matched = failure[matched - 1]
                self._matched[index] = matched
            if complete:
                self.stopped = True
                self._held = ""
                return held[: end - complete]
        cut = len(held) - max(self._matched)
        self._held = held[cut:]
        return held[:cut]

    def flush(self) -> str:
        """What was held back, once no text follows; the next text starts afresh."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _failure_function(pattern: str) -> list[int]:
    """For each prefix, the length of the longest proper prefix of `pattern` that it ends with."""
    failure = [0] * len(pattern)
    matched = 0
    for index in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[index]:
            matched = failure[matched - 1]
        matched += pattern[matched] == pattern[index]
        failure[index] = matched
    return failure

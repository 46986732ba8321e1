from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.protocol.stop import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    out = [matcher.push(piece) for piece in pieces]
    return [*out, matcher.flush()], matcher.stopped


def expected(stops: list[str], text: str) -> tuple[str, bool]:
    """By definition: the stop string that ends first, and the longest of those."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@pytest.mark.parametrize(
    ("stops", "pieces", "given_out", "stopped"),
    [
        (["END"], ["abE", "N", "Dxyz"], ["ab", "", "", ""], True),
        (["END"], ["abE", "N", "xyz"], ["ab", "", "ENxyz", ""], False),
        (["END"], ["abEN"], ["ab", "EN"], False),
        (["aab"], ["aaa", "ab"], ["a", "a", ""], True),
        (["abcd", "bc"], ["abc"], ["a", ""], True),
        (["c", "abc"], ["ab", "c"], ["", "", ""], True),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", "", ""], True),
        ([], ["a", "b"], ["a", "b", ""], False),
    ],
)
def test_what_is_given_out_when(stops: list[str], pieces: list[str], given_out: list[str], stopped: bool) -> None:
    assert run(stops, pieces) == (given_out, stopped)


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=6), max_size=8),
)
def test_any_cut_gives_the_same(stops: list[str], pieces: list[str]) -> None:
    out, stopped = run(stops, pieces)
    assert ("".join(out), stopped) == expected(stops, "".join(pieces))


@given(st.text("ab", min_size=1, max_size=6), st.lists(st.text("ab", min_size=1, max_size=3), max_size=8))
def test_nothing_is_held_back_without_need(stop: str, pieces: list[str]) -> None:
    matcher = StopMatcher([stop])
    seen = given_out = ""
    for piece in pieces:
        seen += piece
        given_out += matcher.push(piece)
        if matcher.stopped:
            return
        longest = max(length for length in range(len(stop)) if seen.endswith(stop[:length]))
        assert given_out == seen[: len(seen) - longest]


def test_text_after_a_flush_starts_afresh() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("a") == ""
    assert matcher.flush() == "a"
    assert matcher.push("b") == "b"
    assert not matcher.stopped

"""The code task: which functions are asked for, and what counts as a body."""

from __future__ import annotations

import pytest

from north_jax.quality.functions import Function, Verdict, body_of, choose, functions_of, judge

SOURCE = '''
import os

class Shelf:
    def put(self, book):
        """Puts a book."""
        place = len(self.books)
        self.books[place] = book

    @property
    def size(self):
        count = 1
        return count

def one(x): return x

def short(x):
    return x

async def later(x):
    y = x
    return y

def join(*words, sep=" "):
    text = sep.join(words)
    return text
'''


def test_functions_with_parameters_and_bodies_are_found():
    found = functions_of(SOURCE)
    assert [sorted(function.parameters) for function in found] == [["sep", "words"], ["book"]]
    join, put = found
    assert join.before.endswith('\n\ndef join(*words, sep=" "):') and join.indentation == 0
    assert put.head == '    def put(self, book):\n        """Puts a book."""' and put.indentation == 4
    assert functions_of("def broken(:") == [] and functions_of("\0") == []


def test_the_choice_follows_the_seed():
    texts = [("a.py", SOURCE)]
    assert choose(texts, 2, 0) == choose(texts, 2, 0)
    assert {function.indentation for function in choose(texts, 2, 1)} == {0, 4}
    with pytest.raises(ValueError, match="has 2 functions to complete, 3 are needed"):
        choose(texts, 3, 0)


def test_a_body_ends_where_the_indentation_does():
    [join, put] = functions_of(SOURCE)
    assert body_of(join, "\n    return 1\n\ndef f(): pass", whole=False) == "\n    return 1\n\n"
    assert body_of(join, "  # so\n    return 1\n", whole=False) is None
    assert body_of(join, "\n    return 1\n", whole=True) == "\n    return 1\n"
    assert body_of(put, "\n        self.x = book\n    def", whole=False) == "\n        self.x = book\n"
    assert (
        body_of(join, '\n    x = """\nflush\n"""\n    return x\nz', whole=False)
        == '\n    x = """\nflush\n"""\n    return x\n'
    )


@pytest.mark.parametrize(
    ("written", "whole", "expected"),
    [
        ("\n    return sep.join(words)\n\nx = (", True, Verdict(True, True)),
        ("\n    return 1\n", True, Verdict(True, False)),
        ("\n    pass\n", True, Verdict(False, False)),
        ('\n    """Words."""\n    ...\n', True, Verdict(False, False)),
        ("\n    return (sep\n", True, Verdict(False, False)),
        ("\n    words = 1\n    return 2", True, Verdict(True, False)),
        ("\n    return sep\n    return (words", False, Verdict(True, True)),  # cut off: complete lines count
        ("", True, Verdict(False, False)),
        ("\n    x = " + "(" * 5000, True, Verdict(False, False)),
        ("\n  return sep\n      return words\n", True, Verdict(False, False)),
    ],
)
def test_verdicts(written, whole, expected):
    [join, _] = functions_of(SOURCE)
    assert judge(join, written, whole=whole) == expected


def test_methods_are_judged_like_functions():
    [_, put] = functions_of(SOURCE)
    assert judge(put, "\n        self.x = book\n\n    def next(", whole=True) == Verdict(True, True)


def test_nothing_is_run(tmp_path):
    function = Function("def f(x):", "def f(x):", 0, frozenset({"x"}))
    target = tmp_path / "ran"
    judge(function, f"\n    return x\n\nopen({str(target)!r}, 'w')\n", whole=True)
    assert not target.exists()

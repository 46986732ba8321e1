"""A code task: the model is shown a file up to the head of a function, and writes the body.

What it wrote is parsed, never run. A body counts as *valid* if the function parses and does something (not a lone
docstring, `pass` or `...`), and as *sensible* if it also reads at least one of the function's parameters.
"""

from __future__ import annotations

import ast
import dataclasses
import textwrap
import warnings

import numpy as np

_FEWEST, _MOST = 2, 25  # lines of the bodies that are asked for


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """A function to complete.

    Attributes:
      before: the file's text up to and with the function's head, and its docstring, but for the end of the line:
        tokenizers make one token of that and the indentation that follows.
      head: the part of `before` that is the function's own.
      indentation: columns of its `def`.
      parameters: names, without self and cls; at least one.
    """

    before: str
    head: str
    indentation: int
    parameters: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """On a completion; see the module."""

    valid: bool
    sensible: bool


def functions_of(text: str) -> list[Function]:
    """The functions of a file that are worth asking for; none where it is not Python."""
    tree = _parsed(text)
    if tree is None:
        return []
    lines = text.splitlines(keepends=True)
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) == 0:
            continue
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        names = parameters(node)
        if not body or not names or node.end_lineno is None:
            continue
        first = body[0].lineno - 1  # of a decorated function: the decorator's line would be earlier, and is in `before`
        alone = first > node.lineno - 1 and lines[first][: body[0].col_offset].isspace()
        if alone and _FEWEST <= node.end_lineno - first <= _MOST:
            head = "".join(lines[node.lineno - 1 : first]).rstrip()
            found.append(Function("".join(lines[:first]).rstrip(), head, node.col_offset, names))
    return found


def parameters(node: ast.FunctionDef) -> frozenset[str]:
    """Names of a function's parameters, without self and cls."""
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return frozenset(one.arg for one in every if one is not None) - {"self", "cls"}


def choose(texts: list[tuple[str, str]], count: int, seed: int) -> list[Function]:
    """Some functions of some files, every one as likely as any other. Raises ValueError if there are too few."""
    every = [function for _, text in texts for function in functions_of(text)]
    if len(every) < count:
        raise ValueError(f"the held-out text has {len(every)} functions to complete, {count} are needed")
    return [every[number] for number in np.random.default_rng(seed).permutation(len(every))[:count]]


def body_of(function: Function, written: str, *, whole: bool) -> str | None:
    """The lines that belong to the function.

    Args:
      function: what was asked for.
      written: what followed.
      whole: whether the text ended by itself; else its last line may be half of one, and does not count.

    Returns:
      None as long as a longer text could still be of the function: no line out of it has been seen, and `whole` is
      False.
    """
    kept: list[str] = []
    for line in written.splitlines(keepends=True):
        depth = len(line) - len(line.lstrip())
        # The first line is the rest of the head's.
        if kept and line.strip() and depth <= function.indentation and not _in_string(kept):
            return "".join(kept)
        kept.append(line)
    return "".join(kept) if whole else None


def _in_string(lines: list[str]) -> bool:
    """Whether the next line is inside a string of several lines, where depth says nothing."""
    text = "".join(lines)
    return text.count('"""') % 2 == 1 or text.count("'''") % 2 == 1


def judge(function: Function, written: str, *, whole: bool) -> Verdict:
    """Says how good a completion is.

    Args:
      function: what was asked for.
      written: what followed; text after the function is ignored.
      whole: as for `body_of`; where the function has not ended, complete lines alone are judged.
    """
    body = body_of(function, written, whole=whole)
    if body is None:
        body = written[: written.rfind("\n") + 1]
    tree = _parsed(textwrap.dedent(function.head + body))
    if tree is None or len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        return Verdict(False, False)
    node = tree.body[0]
    valid = any(not _says_nothing(statement) for statement in node.body)
    read = {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)}
    return Verdict(valid, valid and bool(read & function.parameters))


def _says_nothing(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _parsed(text: str) -> ast.Module | None:
    """The syntax tree; None for what is not Python, or too deep to parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in strings
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None

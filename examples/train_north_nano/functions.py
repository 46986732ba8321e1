"""Find the documented functions of a source file: what conversations about code are made from."""

import ast
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

CODE_LINES = 2, 60  # of a function without its docstring
DOCSTRING_LENGTH = 20, 700
LINE_LENGTH = 120


@dataclass(frozen=True)
class Function:
    """A function with a docstring; its texts are dedented and end without a newline.

    `signature` runs up to the colon, `docstring` is the cleaned text, `bare` the function without docstring, `full`
    with it. `path` and `line` say where it was found.
    """

    name: str
    signature: str
    docstring: str
    bare: str
    full: str
    path: str
    line: int

    @property
    def stub(self) -> str:
        """Signature and docstring, without a body."""
        return self.full[: len(self.full) - len(self.body)].rstrip("\n")

    @property
    def body(self) -> str:
        """The indented statements after the docstring."""
        return self.bare[len(self.signature) :].lstrip("\n")

    @property
    def summary(self) -> str:
        """The first sentence of the docstring, on one line, ending in a full stop."""
        paragraph = " ".join(self.docstring.split("\n\n")[0].split())
        return paragraph.split(". ")[0].rstrip(".: ") + "."


def functions(path: str, text: str) -> Iterator[Function]:
    """The documented functions and methods of a file that are of ordinary size and do something, without its tests.

    There are none when the file does not parse.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("test"):
            function = _function(path, lines, node)
            if function is not None:
                yield function


def _function(path: str, lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function | None:
    docstring = ast.get_docstring(node)
    if docstring is None or not DOCSTRING_LENGTH[0] <= len(docstring) <= DOCSTRING_LENGTH[1]:
        return None
    quoted, statements = node.body[0], node.body[1:]
    if all(isinstance(statement, ast.Pass | ast.Raise) or _is_ellipsis(statement) for statement in statements):
        return None
    if node.end_lineno is None or quoted.end_lineno is None or docstring.startswith((">>>", "..")):
        return None
    # Statements must begin on lines of their own, or the pieces below are not the pieces of the text.
    if not node.lineno < quoted.lineno <= quoted.end_lineno < statements[0].lineno:
        return None
    head = lines[node.lineno - 1 : quoted.lineno - 1]
    doc = lines[quoted.lineno - 1 : quoted.end_lineno]
    body = lines[quoted.end_lineno : node.end_lineno]
    while body and not body[0].strip():
        body.pop(0)
    code = head + body
    if not CODE_LINES[0] <= len(code) <= CODE_LINES[1] or max(map(len, code + doc)) > LINE_LENGTH:
        return None
    if not head[-1].rstrip().endswith(":"):  # a comment after the colon
        return None

    def text(part: list[str]) -> str:
        return textwrap.dedent("\n".join(part)).rstrip()

    signature = text(head)
    bare, full = text(code), text(head + doc + body)
    if not bare.startswith(signature + "\n"):  # dedenting was thwarted by a multi-line string
        return None
    return Function(node.name, signature, docstring, bare, full, path, node.lineno)


def _is_ellipsis(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)

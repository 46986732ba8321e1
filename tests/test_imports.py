"""Who may import whom: DESIGN.md, "Folders". All imports count, those within functions and for types too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import north_jax

ROOT = Path(north_jax.__file__).parents[1]
MEASUREMENTS = tuple(f"north_jax.{name}" for name in ("bench", "compare", "quality"))


def imported(source: str, module: str, *, package: bool) -> Iterator[str]:
    """The full names of all that a module imports, names out of modules included."""
    parents = module.split(".") if package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = parents[: len(parents) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def within(name: str, rooms: tuple[str, ...]) -> bool:
    """Whether a module or name lies in one of these packages."""
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def forbidden(module: str) -> tuple[str, ...]:
    """The packages that a module of north_jax, serve or ffi may not import."""
    if within(module, ("ffi",)):
        return "north_jax", "serve", "tests", "examples"
    if within(module, ("serve",)):
        return *MEASUREMENTS, "tests", "examples"
    return *(() if within(module, MEASUREMENTS) else MEASUREMENTS), "serve", "tests", "examples"


@pytest.mark.parametrize("room", ["north_jax", "serve", "ffi"])
def test_imports_point_one_way(room):
    wrong = []
    for file in sorted((ROOT / room).rglob("*.py")):
        package = file.name == "__init__.py"
        parts = file.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if package else parts)
        names = imported(file.read_text(), module, package=package)
        wrong += [f"{module} imports {name}" for name in names if within(name, forbidden(module))]
    assert not wrong


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import serve.start", "serve.start"),
        ("from ..bench import weights", "north_jax.bench.weights"),
        ("from .. import bench", "north_jax.bench"),
        ("def f():\n    from north_jax.bench.weights import truncated", "north_jax.bench.weights.truncated"),
    ],
)
def test_every_form_of_import_is_seen(source, name):
    assert list(imported(source, "north_jax.packed.chunk", package=False)) == [name]
    assert within(name, forbidden("north_jax.packed.chunk"))

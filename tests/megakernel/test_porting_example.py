"""docs/porting_a_kernel.md does what it says: its Python blocks run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ffi

PAGE = Path(__file__).parents[2] / "docs" / "porting_a_kernel.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.skipif(not ffi.available("cpu"), reason="nothing compiled")
def test_the_page_runs():
    text = PAGE.read_text()
    namespace: dict[str, object] = {}
    for block in _BLOCK.finditer(text):
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), namespace)  # lines of an error are those of the page
    steps = re.findall(r"^## (\d)\.", text, re.MULTILINE)
    assert steps == ["1", "2", "3", "4"]
    assert len(namespace["found"]) == 5  # the last block ran

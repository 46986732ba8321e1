"""The programs in docs/warp_decode.md run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOC = Path(__file__).parents[2] / "docs" / "warp_decode.md"


@pytest.mark.slow
def test_the_python_blocks_run():
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(DOC), "exec"), names)
    assert names["out"].shape == (4, 256)
    assert names["text"]

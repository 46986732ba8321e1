"""What a compiled program exchanges between devices, read off its HLO."""

from __future__ import annotations

import math
import re

import jax

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"


def exchanges(compiled: jax.stages.Compiled) -> list[tuple[str, int]]:
    """The kind, such as "all-gather", and the number of values that a device has after it, of every array exchanged."""
    found = []
    for line in (compiled.as_text() or "").splitlines():
        if match := re.search(rf"= (.*?) ({_KINDS})(-start)?\(", line):
            result, kind, begun = match.groups()
            sizes = [
                math.prod(map(int, filter(None, shape.split(",")))) for shape in re.findall(r"\[([\d,]*)\]", result)
            ]
            if begun and kind != "all-reduce":  # names what it reads before what it writes
                sizes = sizes[len(sizes) // 2 :]
            found += [(kind, size) for size in sizes]
    return found

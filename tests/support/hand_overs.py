"""What a block of the pipelined kernel hands over in shared memory, and what orders it: docs/memory_order.md.

One table for three tests: the race detector under the emulated kernel, which knows these barriers; compute-sanitizer's
racecheck, which does not; and the page that lists them.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re


@dataclasses.dataclass(frozen=True)
class HandOver:
    """A region of shared memory.

    Attributes:
      region: its name in tests/megakernel/warps/pipeline.cc.
      writers, readers: functions, as racecheck names who accesses it; patterns of fnmatch. KERNEL stands for code of
        which the compiler has kept no line.
      filled: who reads waits for it.
      freed: who writes again waits for it.
    """

    region: str
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    filled: str
    freed: str

    def explains(self, writer: str, reader: str) -> bool:
        """Whether these may be two accesses to this region."""
        return _any(writer, self.writers) and _any(reader, self.readers)


def _any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


KERNEL = "decode_kernel"
COPIES = ("bulk_copy", "copy", "run", "stage_input", KERNEL)  # of the loader
ANYBODY = ("*",)
HAND_OVERS = (
    HandOver(
        "pages",
        ("bulk_copy_once",),
        ("load_matrices", "load_matrices_transposed", "clear_shared"),
        "page_full",
        "page_empty",
    ),
    HandOver("stages", ("store_shared", *COPIES), ("load_shared", "load_shared_words"), "stage_full", "stage_empty"),
    HandOver("input", ("norm", *COPIES), ("load_shared",), "input_full", "input_empty"),
    HandOver("tasks", ("bulk_copy", "fetch_list"), ANYBODY, "tasks_full", "tasks_empty"),
    HandOver("sums", ("hand_over",), ("fold",), "sums_full", "sums_empty"),
    HandOver("scores", ("store_scores",), ("attend",), "scores_full", "scores_empty"),
    HandOver("self_score", ("attend",), ("attend",), "consumers_met", "consumers_met"),
    HandOver("routing", ("choose", "choose_row", "list_active"), ANYBODY, "routing_full", "routing_empty"),
    HandOver("best", ("run",), ("run", "finish", "beaten_by"), "head_stored", "step_begins"),
    # The parameters of a step: rows, rotation, pages_of_rows, splits, attention_items, live_rows, ended, step.
    HandOver("rows", ("open", "attention_splits"), ANYBODY, "step_begins", "step_begins"),
    HandOver("norm_sums", ("total", KERNEL), ("total", KERNEL), "team 1", "team 1"),
    HandOver("combined", ("fold", KERNEL), ("fold", "add", KERNEL), "team 2", "team 2"),
)


def explained(writer: str, reader: str) -> list[HandOver]:
    """The hand-overs that two accesses may belong to."""
    return [each for each in HAND_OVERS if each.explains(writer, reader)]


_FUNCTION = re.compile(r"(?:Write|Read) access at .*?(\w+)(?:<[^()]*>)?\(")


def races(said: str) -> set[tuple[str, str]]:
    """The functions of each two accesses that racecheck reports: who wrote, and who read or wrote."""
    found: set[tuple[str, str]] = set()
    writer = ""
    for line in said.splitlines():
        match = _FUNCTION.search(line)
        if match is None:
            continue
        if "Race reported between" in line:
            writer = match[1]
        else:
            found.add((writer, match[1]))
    return found

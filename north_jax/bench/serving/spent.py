"""What a server of ours did with its time during a scenario, from the difference of its counters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PART = re.compile(r'north_engine_seconds_total\{part="(\w+)"\}')
_CHUNK = re.compile(r'north_prefill_chunks_total\{tokens="(\d+)"\}')


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """Fields for a row; none where the endpoint has no such counters.

    Args:
      before, after: metrics by name and labels.

    Returns:
      engine_s: seconds by what the engine did.
      chunks: of prefill, by the size that they ran in, in tokens.
      padding: part of these sizes' tokens that no prompt had.
      decode_only_tok_s: tokens that decoding drew over the time that it took, without prefill and the host's work
        between device calls. (Each answer's first token comes from prefill.)
    """

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    seconds = {found[1]: round(grown(name), 3) for name in after if (found := _PART.fullmatch(name))}
    if not seconds:
        return {}
    counts = {int(found[1]): int(grown(name)) for name in after if (found := _CHUNK.fullmatch(name))}
    chunks = {size: count for size, count in sorted(counts.items()) if count}
    row: dict[str, Any] = {"engine_s": seconds, "chunks": {str(size): count for size, count in chunks.items()}}
    if computed := sum(size * count for size, count in chunks.items()):
        row["padding"] = round(1 - grown('north_prompt_tokens_total{source="computed"}') / computed, 4)
    first = "north_time_to_first_token_seconds_count"
    drawn = grown("north_generated_tokens_total") - (grown(first) if first in after else 0.0)
    if seconds.get("decode"):
        row["decode_only_tok_s"] = round(drawn / seconds["decode"], 1)
    return row

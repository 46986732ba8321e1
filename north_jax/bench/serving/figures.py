"""From answers to figures: throughput, latencies, hits of the prefix cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .endpoint import Answer

_PERCENTILES = (50, 90, 99)


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """One row of results.

    wall_s is from the first request to the last token; output_tok_s all tokens over that; decode_tok_s the mean over
    the answers of their tokens after the first over the time that those took: what a single reader sees. Milliseconds
    to the first token count from sending; those between tokens are the gaps between the events of one answer.
    """
    good = [answer for answer in answers if not answer.error and answer.times]
    row: dict[str, Any] = {
        "requests": len(answers),
        "errors": sum(bool(answer.error) for answer in answers),
        "left": sum(answer.left for answer in answers),
    }
    if not good:
        return row
    wall = max(answer.times[-1] for answer in good) - min(answer.sent for answer in good)
    tokens, prompt = (sum(getattr(answer, name) for answer in good) for name in ("completion_tokens", "prompt_tokens"))
    rates = [rate for answer in good if (rate := decode_rate(answer)) is not None]
    cached = [answer.cached_tokens for answer in good]
    known = [count for count in cached if count is not None]
    return row | {
        "prompt_tokens": prompt,
        "output_tokens": tokens,
        "events": sum(len(answer.times) for answer in good),
        "wall_s": round(wall, 3),
        "output_tok_s": round(tokens / wall, 1),
        "prompt_tok_s": round(prompt / wall, 1),
        "decode_tok_s": round(float(np.mean(rates)), 1) if rates else None,
        "ttft_ms": spread([(answer.times[0] - answer.sent) * 1e3 for answer in good]),
        "inter_token_ms": spread(gaps(good)),
        "prefix_hit_rate": round(sum(known) / prompt, 4) if known and prompt else None,
    }


def decode_rate(answer: Answer) -> float | None:
    """Tokens a second after the first one; None for an answer that is too short."""
    if answer.completion_tokens < 2 or answer.times[-1] <= answer.times[0]:
        return None
    return (answer.completion_tokens - 1) / (answer.times[-1] - answer.times[0])


def gaps(answers: Sequence[Answer], begin: float = float("-inf"), end: float = float("inf")) -> list[float]:
    """Milliseconds between an answer's events, of those gaps that overlap [begin, end]."""
    return [
        (later - earlier) * 1e3
        for answer in answers
        for earlier, later in itertools.pairwise(answer.times)
        if later >= begin and earlier <= end
    ]


def tokens_between(answers: Sequence[Answer], begin: float, end: float) -> int:
    """Events that came in [begin, end)."""
    return sum(begin <= time < end for answer in answers for time in answer.times)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum; None of nothing."""
    if not values:
        return None
    array = np.asarray(values)
    named = {f"p{q}": round(float(np.percentile(array, q)), 3) for q in _PERCENTILES}
    return {"mean": round(float(array.mean()), 3), **named, "max": round(float(array.max()), 3)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as Markdown."""
    names = ("scenario", "requests", "errors", "wall s", "output tok/s", "decode tok/s", "TTFT p50", "p99")
    heads = [*names, "inter-token p50", "p99 ", "max", "prefix hits", "must be", "met"]
    lines = ["| " + " | ".join(heads) + " |", "| --- " + "| ---: " * (len(heads) - 1) + "|"]
    for row in rows:
        first, between = row.get("ttft_ms") or {}, row.get("inter_token_ms") or {}
        cells = [row["scenario"], row["requests"], row["errors"], row.get("wall_s"), row.get("output_tok_s")]
        cells += [row.get("decode_tok_s"), first.get("p50"), first.get("p99")]
        cells += [between.get("p50"), between.get("p99"), between.get("max"), row.get("prefix_hit_rate")]
        cells += [row.get("must"), {True: "yes", False: "NO"}.get(row.get("met"))]  # type: ignore[arg-type]
        lines.append("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(lines)

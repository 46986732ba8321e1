"""A scenario as a picture, in plain SVG: tokens a second, and waits for tokens, over time."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence

from .endpoint import Answer

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 860, 190, 70, 44, 60
_BINS = 160
_COLOURS = {"output tok/s": "#1f6fb2", "p50": "#2a8a4a", "longest": "#c2452d"}


def svg(title: str, answers: Sequence[Answer]) -> str:
    """Two panels over the seconds of the run: tokens of all answers a second; gaps between tokens, median and longest.

    Gaps belong to the bin in which they end.
    """
    events = [(later, later - earlier) for a in answers for earlier, later in itertools.pairwise(a.times)]
    times = [time for answer in answers for time in answer.times]
    begin = min((answer.sent for answer in answers), default=0.0)
    span = max(max(times, default=begin) - begin, 1e-6)
    width = span / _BINS
    counts = [0] * _BINS
    waits: list[list[float]] = [[] for _ in range(_BINS)]
    for time in times:
        counts[_bin(time - begin, width)] += 1
    for time, gap in events:
        waits[_bin(time - begin, width)].append(gap * 1e3)
    middle = [(i + 0.5) * width for i in range(_BINS)]
    rates = [(x, count / width) for x, count in zip(middle, counts, strict=True)]
    medians = [(x, sorted(w)[len(w) // 2]) for x, w in zip(middle, waits, strict=True) if w]
    longest = [(x, max(w)) for x, w in zip(middle, waits, strict=True) if w]
    total = 2 * (_HEIGHT + _GAP) + _TOP
    body = [
        f'<text x="{_LEFT}" y="22" font-size="15" font-weight="bold">{html.escape(title)}</text>',
        _panel(_TOP, "tokens a second", span, {"output tok/s": rates}),
        _panel(_TOP + _HEIGHT + _GAP, "ms between tokens", span, {"longest": longest, "p50": medians}),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + _LEFT + 24}" height="{total}" '
        'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _bin(second: float, width: float) -> int:
    return min(max(int(second / width), 0), _BINS - 1)


def _panel(top: float, label: str, span: float, lines: dict[str, list[tuple[float, float]]]) -> str:
    """One diagram, from 0 to a round number above its largest value."""
    most = _round_up(max((y for points in lines.values() for _, y in points), default=1.0))
    parts = [f'<text x="{_LEFT}" y="{top - 5}">{label}</text>']
    for part in range(5):
        y = top + _HEIGHT * (1 - part / 4)
        x = _LEFT + _WIDTH * part / 4
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{most * part / 4:g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{top + _HEIGHT + 15}" text-anchor="middle">{span * part / 4:.3g} s</text>')
    for number, (name, points) in enumerate(lines.items()):
        path = " ".join(
            f"{_LEFT + x / span * _WIDTH:.1f},{top + _HEIGHT * (1 - min(y / most, 1)):.1f}" for x, y in points
        )
        colour = _COLOURS[name]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
        x = _LEFT + _WIDTH - 90 * number
        parts.append(f'<text x="{x}" y="{top - 5}" text-anchor="end" fill="{colour}">{name}</text>')
    return "\n".join(parts)


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 8, 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(value, 1e-9)))
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value * (1 - 1e-9))

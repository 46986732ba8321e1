"""The errors of all backends as a picture: layers × tensors, an SVG that any browser shows.

Two panels a backend: the error over all positions, which a single other expert moves, and that of the median position.
Pointing at a cell shows its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from .comparison import Comparison
from .measures import Difference
from .passes import TENSORS

LOWEST, HIGHEST = 1e-6, 1.0  # errors at the ends of the colour scale, which is logarithmic
# Equal steps of the scale, from small to large: dark blue to yellow, as bright as they are large.
_COLOURS = ((11, 22, 70), (52, 60, 140), (42, 120, 142), (53, 170, 110), (160, 200, 60), (253, 231, 60))
_NAN = "#ff00ff"
_CELL, _LINE = 34, 16  # a cell's width and height
_LEFT, _TOP, _GAP = 70, 92, 26
_LEGEND = 40
_SHORT = {"attention": "attn", "output": "out", "router_logits": "router"}


def heat_map(results: Sequence[Comparison], title: str) -> str:
    """The SVG's text.

    Args:
      results: of `comparison.compare`, at least one.
      title: a line above the picture.
    """
    columns, lines = len(TENSORS), len(results[0].layers) + 1
    panel = columns * _CELL + _GAP
    width = _LEFT + 2 * len(results) * panel
    height = _TOP + lines * _LINE + _LEGEND + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="36">relative error beside JAX in float32, by layer and tensor</text>',
    ]
    parts += _layer_names(lines)
    for number, result in enumerate(results):
        for side, measure in enumerate(("error", "median")):
            parts += _panel(result, measure, _LEFT + (2 * number + side) * panel)
    parts += _legend(_TOP + lines * _LINE + 16)
    return "\n".join([*parts, "</svg>", ""])


def colour(error: float) -> str:
    """Of the logarithmic scale from LOWEST to HIGHEST; magenta for NaN."""
    if math.isnan(error):
        return _NAN
    span = math.log(HIGHEST / LOWEST)
    place = min(max(math.log(max(error, LOWEST) / LOWEST) / span, 0), 1) * (len(_COLOURS) - 1)
    low = min(int(place), len(_COLOURS) - 2)
    mixed = (a + (b - a) * (place - low) for a, b in zip(_COLOURS[low], _COLOURS[low + 1], strict=True))
    return "#" + "".join(f"{round(channel):02x}" for channel in mixed)


def _layer_names(lines: int) -> Iterator[str]:
    for line in range(lines):
        name = "logits" if line == lines - 1 else f"layer {line}"
        yield f'<text x="{_LEFT - 6}" y="{_TOP + line * _LINE + 12}" text-anchor="end">{name}</text>'


def _panel(result: Comparison, measure: str, x: int) -> Iterator[str]:
    kind = "all positions" if measure == "error" else "median position"
    yield f'<text x="{x}" y="{_TOP - 34}" font-weight="bold">{escape(result.label)}</text>'
    yield f'<text x="{x}" y="{_TOP - 21}">{kind}</text>'
    for column, name in enumerate(TENSORS):
        middle = x + column * _CELL + _CELL // 2
        yield f'<text x="{middle}" y="{_TOP - 5}" text-anchor="middle">{_SHORT.get(name, name)}</text>'
        for line, layer in enumerate(result.layers):
            place = x + column * _CELL, _TOP + line * _LINE, _CELL - 1
            yield _cell(*place, layer.get(name), measure, f"layer {line} {name}")
    line = len(result.layers)
    yield _cell(x, _TOP + line * _LINE, len(TENSORS) * _CELL - 1, result.logits, measure, "logits")


def _cell(x: int, y: int, width: int, found: Difference | None, measure: str, name: str) -> str:
    """One rectangle; an outline where the layer has no such tensor, or the backend does not show it."""
    size = f'x="{x}" y="{y}" width="{width}" height="{_LINE - 1}"'
    if found is None:
        return f'<rect {size} fill="#f4f4f4"/>'
    numbers = f"error {found.error:.2e}, median {found.median:.2e}, cosine {found.cosine:.6f}, max {found.maximum:.2e}"
    return f'<rect {size} fill="{colour(getattr(found, measure))}"><title>{name}: {numbers}</title></rect>'


def _legend(y: int) -> Iterator[str]:
    decades = round(math.log10(HIGHEST / LOWEST))
    for step in range(decades * 4 + 1):
        error = LOWEST * 10 ** (step / 4)
        yield f'<rect x="{_LEFT + step * 10}" y="{y}" width="10" height="12" fill="{colour(error)}"/>'
        if step % 4 == 0:
            yield f'<text x="{_LEFT + step * 10 + 5}" y="{y + 24}" text-anchor="middle">{error:.0e}</text>'
    end = _LEFT + decades * 40 + 30
    yield f'<rect x="{end}" y="{y}" width="10" height="12" fill="#f4f4f4"/>'
    yield f'<text x="{end + 16}" y="{y + 10}">no such tensor</text>'

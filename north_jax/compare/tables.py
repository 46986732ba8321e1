"""A comparison as tables for a terminal (and for Markdown)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .comparison import Comparison
from .passes import TENSORS
from .texts import Parting


def tables(results: Sequence[Comparison]) -> Iterator[str]:
    """The lines of all tables: one of the backends, then one of the layers and tensors of each."""
    yield from summary(results)
    for result in results:
        yield ""
        yield from of_layers(result)


def summary(results: Sequence[Comparison]) -> Iterator[str]:
    """One line a backend: logits, experts, texts."""
    yield "| beside float32 | logits: error | median | cosine | maximum | other experts | text parts | from JAX's |"
    yield "| --- | ---: | ---: | ---: | ---: | --- | --- | --- |"
    for result in results:
        logits = result.logits
        cells = [
            result.label,
            f"{logits.error:.1e}",
            f"{logits.median:.1e}",
            f"{logits.cosine:.6f}",
            f"{logits.maximum:.2g}",
            experts(result),
            where(result.from_float32),
            "–" if result.name == "jax" else where(result.from_jax),
        ]
        yield f"| {' | '.join(cells)} |"


def experts(result: Comparison) -> str:
    """How often other experts were chosen, and whether those were near ties."""
    layers = [layer for layer in result.routing if layer is not None]
    choices, same = sum(layer.choices for layer in layers), sum(layer.same for layer in layers)
    if not choices:
        return "no experts"
    clear = sum(layer.changed_clear for layer in layers)
    near = sum(layer.near_ties for layer in layers)
    changed = f"{choices - same} of {choices}"
    kinds = f"{choices - same - clear} at near ties, {clear} clear" if same < choices else f"{near} near ties"
    return f"{changed} ({kinds})"


def where(found: Parting | None) -> str:
    """Where a text parts, in words."""
    if found is None:
        return "nowhere"
    kind = "near tie" if found.near_tie else "clear"
    return f"at {found.position}, margin {found.margin:.2g} ({kind})"


def of_layers(result: Comparison) -> Iterator[str]:
    """One line a layer, with the relative error of each tensor; below them the least cosine and the largest maximum."""
    yield f"{result.label}: relative error of each layer's tensors"
    yield ""
    yield f"| layer | {' | '.join(TENSORS)} | other experts |"
    yield f"| ---: |{' ---: |' * (len(TENSORS) + 1)}"
    for number, (layer, routing) in enumerate(zip(result.layers, result.routing, strict=True)):
        cells = [f"{layer[name].error:.1e}" if name in layer else "" for name in TENSORS]
        changed = "" if routing is None else f"{routing.choices - routing.same}"
        if routing is not None and routing.changed_clear:
            changed += f" ({routing.changed_clear} clear)"
        yield f"| {number} | {' | '.join(cells)} | {changed} |"
    columns = {name: [layer[name] for layer in result.layers if name in layer] for name in TENSORS}
    cosines = [f"{min(d.cosine for d in column):.5f}" if column else "" for column in columns.values()]
    maxima = [f"{max(d.maximum for d in column):.2g}" if column else "" for column in columns.values()]
    yield f"| least cosine | {' | '.join(cosines)} | |"
    yield f"| largest difference | {' | '.join(maxima)} | |"

"""Every backend beside JAX in float32, on one checkpoint and one text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..config import Config
from ..layers import Params
from .backends import LABELS, Subject, exact_pass
from .measures import Difference
from .passes import TENSORS, Pass
from .routing import Routing, routing, yardsticks
from .texts import Parting, parting, rounding


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One backend's.

    Attributes:
      name: of the backend.
      label: what it is called in results.
      layers: by layer, tensor → difference.
      logits: difference of the logits.
      routing: by layer; None without experts.
      text: its greedy continuation.
      from_float32, from_jax: where that parts from the ones of JAX in float32 and in the weights' type.
    """

    name: str
    label: str
    layers: list[dict[str, Difference]]
    logits: Difference
    routing: list[Routing | None]
    text: list[int]
    from_float32: Parting | None = None
    from_jax: Parting | None = None

    def as_row(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def difference(exact: Pass, found: Pass) -> tuple[list[dict[str, Difference]], Difference]:
    """By layer and tensor, and of the logits."""
    layers = [
        {name: Difference.of(ours[name], theirs[name]) for name in TENSORS if name in ours and name in theirs}
        for ours, theirs in zip(found.layers, exact.layers, strict=True)
    ]
    return layers, Difference.of(found.logits, exact.logits)


def compare(
    config: Config,
    params: Params,
    subjects: Sequence[Subject],
    prompt: Sequence[int],
    steps: int,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Comparison]:
    """Compares all subjects along the text that JAX writes in the weights' type.

    All are given the same tokens, the prompt and that text but for its last token, and compared at the positions that
    the text's tokens are drawn from. The compiled decode and warp decode see the prompt as their servers do.

    Args:
      config: the model's configuration.
      params: DESIGN.md, "Parameters".
      subjects: of `backends.subjects`, "jax" first.
      prompt: token ids, at least one.
      steps: tokens of the text, at least 1.
      progress: is told what is done next.

    Returns:
      one a subject.

    Raises:
      BackendError: of a subject.
      ValueError: prompt and text do not fit into the model's context, or a token is not of the vocabulary.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps, expected at least 1")
    texts = {}
    for subject in subjects:
        progress(f"{subject.name}: greedy text")
        texts[subject.name] = subject.text(prompt, steps)
    theirs_text = texts["jax"]
    tokens = np.array([*prompt, *theirs_text[:-1]], np.int32)
    progress("float32")
    exact = exact_pass(config, params, tokens, steps)
    logits_along = {tuple(theirs_text): exact.logits}
    results: list[Comparison] = []
    measures: list[float] = []
    moved = 0.0
    for subject in subjects:
        progress(f"{subject.name}: tensors")
        found = subject.run(tokens, steps)
        if subject.name == "jax":
            measures, moved = yardsticks(exact, found), rounding(exact.logits, found.logits)
        text = texts[subject.name]
        if tuple(text) not in logits_along:
            own = np.array([*prompt, *text[:-1]], np.int32)
            logits_along[tuple(text)] = exact_pass(config, params, own, steps).logits
        along = logits_along[tuple(text)]
        layers, logits = difference(exact, found)
        results.append(
            Comparison(
                subject.name,
                LABELS[subject.name],
                layers,
                logits,
                routing(exact, found, measures),
                text,
                from_float32=parting(text, None, along, moved),
                from_jax=None if subject.name == "jax" else parting(text, theirs_text, along, moved),
            )
        )
    return results

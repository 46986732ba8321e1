"""Is a decoder as near to the exact result as JAX is in the same type? Errors of logits, and of every layer's K and V.

Keys and values are projections of a layer's normalised input, so what a step leaves in the cache shows the hidden state
before every layer, and one step through the whole model tells where it goes wrong.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from north_jax.compare.measures import errors, rms
from north_jax.compare.routing import NEAR

from .reference import Outputs, Reference

FACTOR = 1.1  # most that an error may exceed JAX's
COSINE = 0.9999  # least between logits and exact ones
FLOOR = 1e-5  # errors below it are those of float32


@dataclasses.dataclass(frozen=True)
class Found:
    """What a decoder made of the rows of one step.

    Attributes:
      outputs: of each row.
      exact: what they are in float32 with the experts that the decoder ran.
      gaps: [layers with experts, rows], `reference.gaps` of these experts, in yardsticks.
    """

    outputs: Sequence[Outputs]
    exact: Sequence[Outputs]
    gaps: np.ndarray

    @classmethod
    def of_exact_experts(cls, references: Sequence[Reference], outputs: Sequence[Outputs]) -> Found:
        """Of a decoder that has run, or ought to have run, the experts of float32."""
        return cls(outputs, [r.exact for r in references], np.zeros((0, len(references))))


def compare(references: Sequence[Reference], ours: Found, depth: int) -> dict[str, Any]:
    """Compares the rows of one step.

    Returns:
      error, jax_error: of the logits, rms over the rows, each beside float32 with the same experts.
      cosine: of the logits likewise, the least of a row.
      written_error, jax_written_error: of keys and values, rms over the rows, in `worst_layer`, where ours is largest
        beside JAX's; `written_numbers` were compared there.
      gap: the largest of an expert that float32 would not have chosen, in yardsticks; 0 without any.
      row_errors, jax_row_errors: of the logits of each row.
      row_choices, jax_row_choices: layers in which each row ran such an expert.
      row_cosines, jax_row_cosines: of the logits beside float32 with float32's own experts.
    """
    theirs = Found(
        [r.theirs for r in references],
        [r.their_exact for r in references],
        np.stack([r.their_gaps for r in references], axis=1),
    )

    def of_logits(outputs: Sequence[Outputs]) -> np.ndarray:
        return np.stack([each.logits[depth] for each in outputs])

    def error_of_rows(side: Found) -> np.ndarray:
        return errors(of_logits(side.outputs), of_logits(side.exact), 0)

    def written_errors(side: Found) -> np.ndarray:
        """[layers]."""
        found, exact = (
            np.stack([each.written[:depth] for each in outputs], axis=1) for outputs in (side.outputs, side.exact)
        )
        return np.asarray(rms(errors(found, exact, 1), axis=1))

    our_errors, their_errors = error_of_rows(ours), error_of_rows(theirs)
    written, their_written = written_errors(ours), written_errors(theirs)
    worst = int(np.argmax(written / np.maximum(their_written, FLOOR)))
    free = of_logits([r.exact for r in references])
    return {
        "error": _rounded(rms(our_errors)),
        "jax_error": _rounded(rms(their_errors)),
        "cosine": float(np.min(_cosines(of_logits(ours.outputs), of_logits(ours.exact)))),
        "written_error": _rounded(written[worst]),
        "jax_written_error": _rounded(their_written[worst]),
        "worst_layer": worst,
        "written_numbers": len(references) * references[0].exact.written[0].size,
        "gap": _rounded(ours.gaps.max(initial=0)),
        "row_errors": [_rounded(e) for e in our_errors],
        "jax_row_errors": [_rounded(e) for e in their_errors],
        "row_choices": np.sum(ours.gaps > 0, axis=0).tolist(),
        "jax_row_choices": np.sum(theirs.gaps > 0, axis=0).tolist(),
        "row_cosines": _cosines(of_logits(ours.outputs), free),
        "jax_row_cosines": _cosines(of_logits(theirs.outputs), free),
    }


def _rounded(value: Any) -> float:
    return float(f"{float(value):.4g}")


def _cosines(found: np.ndarray, exact: np.ndarray) -> list[float]:
    """Of the rows of [N, V] arrays."""
    a, b = found.astype(np.float64), exact.astype(np.float64)
    cosines = np.sum(a * b, axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return [round(float(cosine), 8) for cosine in cosines]


def faults(result: dict[str, Any]) -> list[str]:
    """What is wrong with a result of `compare`, in words; nothing where it agrees. NaN is wrong."""
    wrong = []
    # Few keys and values are compared, and the ratio of two such errors has a deviation of about n^-½ by itself.
    slack = 1 + 4 / math.sqrt(result["written_numbers"])
    layer = f"K and V of layer {result['worst_layer']}"
    for what, name, factor in (("logits", "error", FACTOR), (layer, "written_error", FACTOR * slack)):
        most = max(factor * result[f"jax_{name}"], FLOOR)
        if not result[name] <= most:
            wrong.append(f"error of {what} {result[name]:.2e}, at most {most:.2e}")
    if not result["cosine"] >= COSINE:
        wrong.append(f"cosine of logits {result['cosine']:.6f}, at least {COSINE}")
    if not result["gap"] < NEAR:
        wrong.append(f"an expert chosen {result['gap']:.2f} yardsticks from a tie, fewer than {NEAR} are near")
    return wrong

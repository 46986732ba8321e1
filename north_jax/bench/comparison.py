"""Is a decoder as near to the exact result as JAX is in the same type? Errors of logits, and of every layer's K and V.

Keys and values are projections of a layer's normalised input, so what a step leaves in the cache shows the hidden state
before every layer, and one step through the whole model tells where it goes wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from north_jax.compare.measures import errors, rms

from .reference import Outputs, Reference

FACTOR = 1.1  # most that an error may exceed JAX's
COSINE = 0.9999  # least between logits and exact ones
FLOOR = 1e-5  # errors below it are those of float32


def compare(references: Sequence[Reference], ours: Sequence[Outputs], depth: int) -> dict[str, Any]:
    """Compares the rows of one step.

    Returns:
      error, jax_error: of the logits, rms over the rows.
      cosine: of the logits, the least of a row.
      written_error, jax_written_error: of keys and values, rms over the rows, in `worst_layer`, where ours is largest
        beside JAX's; `written_numbers` were compared there.
      row_errors, jax_row_errors: of the logits of each row.
    """
    exact, theirs, mine = (
        np.stack([outputs.logits[depth] for outputs in side])
        for side in ([r.exact for r in references], [r.theirs for r in references], ours)
    )
    our_errors, their_errors = errors(mine, exact, 0), errors(theirs, exact, 0)
    dots = np.sum(mine.astype(np.float64) * exact, axis=1)
    cosines = dots / np.linalg.norm(mine.astype(np.float64), axis=1) / np.linalg.norm(exact.astype(np.float64), axis=1)
    written = [
        rms(errors(side, np.stack([r.exact.written[:depth] for r in references], axis=1), 1), axis=1)
        for side in (
            np.stack([outputs.written[:depth] for outputs in ours], axis=1),
            np.stack([r.theirs.written[:depth] for r in references], axis=1),
        )
    ]
    worst = int(np.argmax(written[0] / np.maximum(written[1], FLOOR)))
    return {
        "error": float(rms(our_errors)),
        "jax_error": float(rms(their_errors)),
        "cosine": float(cosines.min()),
        "written_error": float(written[0][worst]),
        "jax_written_error": float(written[1][worst]),
        "worst_layer": worst,
        "written_numbers": len(references) * references[0].exact.written[0].size,
        "row_errors": [float(f"{e:.3g}") for e in our_errors],
        "jax_row_errors": [float(f"{e:.3g}") for e in their_errors],
    }


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
    return wrong

"""Tables of the timing model, and the same as rows for a results file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ...config import Config
from .calibration import TRACE, VARIANTS, Variant, predict_variant, trace
from .machine import Machine
from .predict import Prediction
from .program import Phase
from .search import Case, Ranked

type Row = dict[str, Any]


def calibration_rows(config: Config, machine: Machine) -> Iterator[Row]:
    """Each variant: measured, predicted, and the error; which of Machine's constants was fitted on it."""
    for variant in VARIANTS:
        yield calibration_row(variant, predict_variant(variant, config, machine))


def calibration_row(variant: Variant, prediction: Prediction) -> Row:
    """One line of the calibration table."""
    predicted = prediction.step / 1e3
    return {
        "kind": "calibration",
        "variant": variant.name,
        "measured_ms": variant.milliseconds,
        "predicted_ms": round(predicted, 3),
        "error": round(predicted / variant.milliseconds - 1, 4),
        "fitted": variant.constant,
    }


def calibration_table(rows: Iterable[Row]) -> Iterator[str]:
    """Lines, as rows come."""
    yield f"{'skeleton variant':45} {'ms':>6} {'model':>7} {'error':>7}   fitted on it"
    for row in rows:
        numbers = f"{row['measured_ms']:6.2f} {row['predicted_ms']:7.3f} {row['error']:+7.1%}"
        yield f"{row['variant']:45} {numbers}   {row['fitted']}".rstrip()


def trace_table(config: Config, machine: Machine) -> Iterator[str]:
    """The traced layer: measured on one SM, and the model's mean."""
    yield f"{'one layer on 132 SMs, µs from x staged':45} {'trace':>6} {'model':>7}"
    for name, (measured, predicted) in zip(TRACE, trace(config, machine), strict=True):
        yield f"{name:45} {measured:6.1f} {predicted:7.1f}"


def ranking_row(case: Case, ranked: Ranked, kind: str = "ranking") -> Row:
    """A prediction as numbers."""
    choice, prediction = ranked
    spread = (prediction.waiting + prediction.starving).sum(axis=1)
    return {
        "kind": kind,
        "machine": case.machine.name,
        "batch": case.rows,
        "context": case.context,
        "routing": case.routing,
        "order": choice.order.name,
        "sms": choice.sms,
        "splits": choice.splits,
        "round_robin": choice.order.round_robin,
        "ms": round(prediction.step / 1e3, 4),
        "tok_s": round(prediction.tokens_per_second, 1),
        "speed_of_light": round(prediction.light, 4),
        "gigabytes": round(prediction.bytes / 1e9, 3),
        "memory_idle_us": {Phase(i).name.lower(): round(t, 1) for i, t in enumerate(prediction.idle) if t >= 0.05},
        "waiting_us": _mean(prediction.waiting),
        "starving_us": _mean(prediction.starving),
        "idle_sm_us": {"least": round(float(spread.min()), 1), "most": round(float(spread.max()), 1)},
    }


def _mean(times: np.ndarray) -> dict[str, float]:
    """[SMs, phases] as the mean over SMs of each phase."""
    return {Phase(i).name.lower(): round(t, 1) for i, t in enumerate(times.mean(axis=0)) if t >= 0.05}


def ranking_table(case: Case, rows: Iterable[Row]) -> Iterator[str]:
    """Lines, as rows come: step, tokens, speed of light, and where memory idles, in µs a step."""
    yield f"{case.machine.name}, batch {case.rows}, context {case.context}, {case.routing} routing"
    yield f"  {'order and placement':48} {'ms':>7} {'tok/s':>7} {'SoL':>6}  memory idle before, µs a step"
    for row in rows:
        name = f"{row['order']}, {row['sms']} SMs" + f", {row['splits']} splits" * (row["splits"] > 1)
        name += ", round robin" * row["round_robin"]
        idle = " ".join(f"{phase} {time:.0f}" for phase, time in row["memory_idle_us"].items() if time >= 0.5)
        yield f"  {name:48} {row['ms']:7.3f} {row['tok_s']:7.0f} {row['speed_of_light']:6.1%}  {idle}"

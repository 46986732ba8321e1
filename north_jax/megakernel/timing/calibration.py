"""The skeleton's variants: what was measured on an H200, and what the model makes of them.

The skeleton (an experiment before the product) ran the dependencies of a step with all its weights at batch 1 and 8K
positions; all of its 49 layers have experts, and a step ends with its logits. 128 blocks unless said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from statistics import mean

from ...config import FULL, SLIDING, SPARSE, Config
from ..build import build
from ..orders import Order, down_first, router_first, streamed
from .load import load
from .machine import H200, SKELETON, Kernel, Machine
from .predict import Prediction, predict
from .program import Phase
from .simulate import simulate
from .translate import translate

CONTEXT = 8192


@dataclasses.dataclass(frozen=True)
class Variant:
    """One build of the skeleton; `milliseconds` a step were measured."""

    name: str
    milliseconds: float
    sms: int = 128
    rounds: int = 2
    down_first: bool = False
    kernel: Kernel = SKELETON
    constant: str = ""  # of Machine, that was fitted on it


# Events of one layer of "132 blocks", µs from "x staged", on one SM.
TRACE = {
    "router known": 2.8,
    "first up page landed": 4.8,
    "q staged": 5.8,
    "last up page done": 15.0,
    "attention staged": 18.5,
    "h staged": 19.8,
    "last down page done": 25.6,
    "next x staged": 31.2,
}

VARIANTS = (
    Variant("128 blocks", 1.89, constant="access_share"),
    Variant("132 blocks", 1.91, sms=132),
    Variant("window of 3 pages", 1.95, kernel=replace(SKELETON, window=3)),
    Variant("window of 4, 132 blocks", 2.08, sms=132, kernel=replace(SKELETON, window=4)),
    Variant("window of 6, 132 blocks, single polls", 2.23, sms=132, kernel=replace(SKELETON, window=6, polls=1)),
    Variant("1 up block before attention", 1.90, rounds=1),
    Variant("3 up blocks before attention", 1.91, rounds=3),
    Variant("down before O-proj", 1.92, down_first=True),
    Variant("single polls, 132 blocks", 2.03, sms=132, kernel=replace(SKELETON, polls=1)),
    Variant(
        "O-proj into L2 at once, 132, single polls", 2.14, sms=132, kernel=replace(SKELETON, polls=1, prefetch_o=True)
    ),
    Variant("512-column pages", 2.67, kernel=replace(SKELETON, page_columns=512), constant="page_latency"),
    Variant("nothing streamed", 0.42, kernel=replace(SKELETON, streams=False), constant="access_latency"),
    Variant("half the bytes", 1.00, kernel=replace(SKELETON, first_pages_only=True)),
    Variant(
        "fences, consumers load, 132, single polls",
        2.25,
        sms=132,
        kernel=replace(SKELETON, polls=1, fences=True, staged_ahead=False),
    ),
)


def skeleton_config(config: Config) -> Config:
    """The skeleton's layers: all with experts, every fourth attending to everything."""
    layers = config.num_hidden_layers
    return dataclasses.replace(
        config,
        layer_types=tuple(SLIDING if layer % 4 else FULL for layer in range(layers)),
        mlp_layer_types=(SPARSE,) * layers,
    )


def predict_variant(variant: Variant, config: Config, machine: Machine = H200) -> Prediction:
    """The model's step."""
    order = skeleton_order(variant)
    return predict(skeleton_config(config), (CONTEXT,), machine, variant.kernel, order=order, sms=variant.sms)


def skeleton_order(variant: Variant) -> Order:
    """The variant's order. The skeleton had the router's tiles ahead of the others."""
    return router_first((down_first if variant.down_first else streamed)(variant.rounds))


def trace(config: Config, machine: Machine) -> Iterator[tuple[float, float]]:
    """The traced layer's events in the order of TRACE: measured, and the mean over the SMs."""
    layer, layers, variant = 6, 9, VARIANTS[1]
    whole = skeleton_config(config)
    few = whole.layer_types[:layers], whole.mlp_layer_types[:layers]
    short = replace(whole, num_hidden_layers=layers, layer_types=few[0], mlp_layer_types=few[1])
    schedule = build(short, batch=1, sms=variant.sms, order=skeleton_order(variant))
    program = translate(schedule, load(short, (CONTEXT,)), machine, variant.kernel)
    timeline = simulate(program, machine, variant.kernel)

    def seen(phase: Phase, field: str) -> float:
        tallies = (timeline.tallies.get((0, sm, layer, phase)) for sm in range(timeline.sms))
        return mean(getattr(tally, field) for tally in tallies if tally)

    def staged(at: int, phase: Phase) -> float:
        return mean(timeline.staged[0, at, phase])

    begin = staged(layer, Phase.NORM)
    events = (
        mean(timeline.known[0, layer]),
        seen(Phase.UP, "landed"),
        staged(layer, Phase.ATTENTION),
        seen(Phase.UP, "done"),
        staged(layer, Phase.OUT),
        staged(layer, Phase.DOWN),
        seen(Phase.DOWN, "done"),
        staged(layer + 1, Phase.NORM),
    )
    yield from ((measured, event - begin) for measured, event in zip(TRACE.values(), events, strict=True))


def fit(config: Config, machine: Machine) -> Iterator[tuple[str, float]]:
    """Fits the constants, each on its variant, in turns; yields every new value. The last three are the fit."""
    for _ in range(3):
        for variant in (variant for variant in VARIANTS if variant.constant):
            name = variant.constant
            here = getattr(machine, name)
            error = _error(variant, config, machine)
            there = here * (1.05 if error < 0 else 0.95)
            other = _error(variant, config, replace(machine, **{name: there}))
            if error != other:  # a secant step, kept short
                found = here - error * (there - here) / (other - error)
                machine = replace(machine, **{name: min(max(found, 0.7 * here), 1.4 * here)})
            yield name, getattr(machine, name)


def _error(variant: Variant, config: Config, machine: Machine) -> float:
    return predict_variant(variant, config, machine).step / 1e3 - variant.milliseconds

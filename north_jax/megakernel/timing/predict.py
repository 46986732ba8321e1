"""Predictions for whole models: a few layers are simulated, and the period that they repeat is added up."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from ...config import Config
from ...random_weights.popularity import UNIFORM
from ..build import build
from ..orders import Order
from ..tasks import TILE_ROWS
from .load import Load, load
from .machine import Kernel, Machine
from .program import Phase, Program
from .simulate import simulate
from .timeline import Timeline
from .translate import translate

_HEAD_TILES = 8  # of an SM: more of them only stream


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One step in its steady state; times in µs.

    Attributes:
      step: from one step's end to the next one's, as the mean SM's consumers see it.
      rows: of the batch.
      bytes: streamed.
      floor: `bytes` at the datasheet's bandwidth.
      waiting, starving, working: [SMs, phases] consumers waiting for activations, for pages, or at work.
      idle: [phases] memory had nothing to do until it was asked for a page of this phase.
    """

    step: float
    rows: int
    bytes: int
    floor: float
    waiting: np.ndarray
    starving: np.ndarray
    working: np.ndarray
    idle: np.ndarray

    @property
    def tokens_per_second(self) -> float:
        """Of all rows."""
        return self.rows * 1e6 / self.step

    @property
    def light(self) -> float:
        """Share of the speed of light: the floor over the step."""
        return self.floor / self.step


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A model with fewer layers and tokens that behaves as the whole one, and what it lacks."""

    config: Config
    period: int  # layers that repeat at the end
    repeats: int  # how many more of these periods the whole model has
    tokens: int  # of the vocabulary that were left out


@functools.cache
def cut(config: Config, sms: int) -> _Cut:
    """Keeps the layers before the repetition, one period of it, and a head of a few tiles an SM."""
    kinds = list(zip(config.layer_types, config.mlp_layer_types, strict=True))
    total = len(kinds)
    # The shortest period of what follows some prefix, such that it and the prefix are fewest layers.
    best, best_length = (1, 0), total
    for period in range(1, total // 3):
        prefix = next(n for n in range(total) if all(kinds[i] == kinds[i + period] for i in range(n, total - period)))
        length = max(prefix, 1) + period  # a layer to come to a steady state
        length += (total - length) % period
        if length < best_length:
            best, best_length = (period, (total - length) // period), length
    tokens = min(config.vocab_size, sms * TILE_ROWS * _HEAD_TILES)
    kept = dataclasses.replace(
        config,
        num_hidden_layers=best_length,
        layer_types=config.layer_types[:best_length],
        mlp_layer_types=config.mlp_layer_types[:best_length],
        vocab_size=tokens,
        bos_token_id=None,
        eos_token_id=(),
        pad_token_id=None,
    )
    return _Cut(kept, *best, config.vocab_size - tokens)


_build = functools.lru_cache(maxsize=64)(build)


def predict(
    config: Config,
    contexts: Sequence[int],
    machine: Machine,
    kernel: Kernel,
    *,
    order: Order,
    sms: int,
    splits: int = 1,
    routing: str = UNIFORM,
    whole: bool = False,
) -> Prediction:
    """One step of rows with these contexts, the new token included; with `whole`, every layer is simulated."""
    step = load(config, contexts, routing)
    small = _Cut(config, 1, 0, 0) if whole else cut(config, sms)
    layers = small.config.num_hidden_layers
    schedule = _build(small.config, batch=step.batch, sms=sms, order=order, splits=splits)
    # The sampler reads all tokens.
    kernel = dataclasses.replace(kernel, vocabulary_scale=config.vocab_size / small.config.vocab_size)
    program = translate(schedule, Load(step.positions, step.active[:layers]), machine, kernel)
    timeline = simulate(program, machine, kernel, 2, until=layers - small.period)
    return _extrapolate(small, program, timeline, machine, kernel)


def _extrapolate(small: _Cut, program: Program, timeline: Timeline, machine: Machine, kernel: Kernel) -> Prediction:
    """Adds the missing periods and head to a whole round: from the last period's beginning to the next step's."""
    layers = small.config.num_hidden_layers
    first = layers - small.period
    weight = np.ones(layers + 1)
    weight[first:layers] += small.repeats
    # Tiles of the head that were left out follow each other at the pace of the narrowest part.
    tile = program.stream[0][-1].item
    assert tile is not None and tile.phase == Phase.HEAD
    tiles = small.tokens / TILE_ROWS
    consumed = tiles / timeline.sms * (sum(page.work for page in tile.pages) + machine.consume_tile)
    streamed = tiles * sum(
        max(page.service, (machine.page_latency + page.port) / kernel.window / timeline.sms) if page.bytes else 0.0
        for page in tile.pages
    )
    head = max(consumed, streamed)

    def per_sm(field: str) -> np.ndarray:
        this, following = (timeline.total(step, field) for step in (0, 1))
        return np.einsum("slp,l->sp", np.concatenate([following[:, :first], this[:, first:]], axis=1), weight)

    waiting, starving, working = (per_sm(field) for field in ("waiting", "starving", "working"))
    starving[:, Phase.HEAD] += head - consumed
    working[:, Phase.HEAD] += consumed
    total = round(per_sm("bytes").sum() + tiles * sum(page.bytes for page in tile.pages))
    return Prediction(
        step=float((waiting + starving + working).sum(axis=1).mean()),
        rows=program.schedule.batch,
        bytes=total,
        floor=total / machine.datasheet,
        waiting=waiting,
        starving=starving,
        working=working,
        idle=per_sm("idle").sum(axis=0),
    )

"""Ranks wave orders and placements by their predicted step, and searches for better ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...config import Config
from ...random_weights.popularity import UNIFORM
from ..abi import PAGE_TOKENS
from ..orders import ATTENTION_FIRST, INTERLEAVED, TUNED, Order, down_first, router_first, shared_norm, streamed
from .machine import Kernel, Machine
from .predict import Prediction, predict


class Choice(NamedTuple):
    """What a schedule is built from."""

    order: Order
    sms: int = 128
    splits: int = 1

    @property
    def name(self) -> str:
        """For tables."""
        parts = [self.order.name, f"{self.sms} SMs"]
        parts += [f"{self.splits} splits"] * (self.splits > 1)
        parts += ["round robin"] * self.order.round_robin
        return ", ".join(parts)


class Ranked(NamedTuple):
    """A choice and what it is predicted to do."""

    choice: Choice
    prediction: Prediction


@dataclasses.dataclass(frozen=True)
class Case:
    """What is to be served: `rows` equal rows.

    The context is taken half a page further, as page boundaries are rare: there, splits of attention are most even.
    """

    config: Config
    machine: Machine
    rows: int
    context: int
    routing: str = UNIFORM
    kernel: Kernel = dataclasses.field(default_factory=Kernel)

    def run(self, choice: Choice) -> Ranked:
        """Predicts one choice."""
        contexts = (self.context + PAGE_TOKENS // 2,) * self.rows
        prediction = predict(
            self.config,
            contexts,
            self.machine,
            self.kernel,
            order=choice.order,
            sms=choice.sms,
            splits=choice.splits,
            routing=self.routing,
        )
        return Ranked(choice, prediction)


@dataclasses.dataclass(frozen=True)
class Form:
    """What the search varies; the first five make an order."""

    rounds: int = 2
    down_first: bool = False
    router_first: bool = True
    shared_norm: bool = False
    round_robin: bool = False
    sms: int = 128
    splits: int = 1

    @property
    def choice(self) -> Choice:
        """The schedule of this form."""
        order = (down_first if self.down_first else streamed)(self.rounds)
        if self.router_first:
            order = router_first(order)
        if self.shared_norm:
            order = shared_norm(order)
        return Choice(dataclasses.replace(order, round_robin=self.round_robin), self.sms, self.splits)


VALUES: dict[str, Sequence[int]] = {
    "rounds": range(5),
    "down_first": (False, True),
    "router_first": (False, True),
    "shared_norm": (False, True),
    "round_robin": (False, True),
    "splits": (1, 2, 4),
    "sms": range(120, 133, 2),
}


def rank(case: Case, placed: int = 1) -> list[Ranked]:
    """Orders dealt evenly to 128 SMs, best first; the best `placed` of them also on 132 and round robin."""
    forms = [
        Form(rounds, is_down_first)
        for is_down_first in (False, True)
        for rounds in range(is_down_first, 4 - is_down_first)
    ]
    forms += [Form(rounds, is_down_first, shared_norm=True) for rounds, is_down_first in ((0, False), (1, True))]
    published = [dataclasses.replace(order, round_robin=False) for order in (TUNED, INTERLEAVED, ATTENTION_FIRST)]
    choices = [Choice(streamed(2)), *(form.choice for form in forms), *map(Choice, published)]
    ranked = _best(case, choices)
    for order, _, _ in [best.choice for best in ranked[:placed]]:
        turned = dataclasses.replace(order, round_robin=True)
        ranked += [case.run(choice) for choice in (Choice(order, 132), Choice(turned), Choice(turned, 132))]
    return _sorted(ranked)


def search(case: Case, start: Form | None = None, values: Mapping[str, Sequence[int]] = VALUES) -> Iterator[Ranked]:
    """Changes one thing at a time for as long as that helps; yields the start, then each better choice."""
    form = start or Form()
    best = case.run(form.choice)
    yield best
    tried, improves = {form}, True
    while improves:
        improves = False
        for field, options in values.items():
            others = [_changed(form, field, option) for option in options]
            fresh = [other for other in others if other not in tried and _fits(other, case)]
            tried.update(fresh)
            ranked = [(case.run(other.choice), other) for other in fresh]
            found, other = min(ranked, key=lambda each: each[0].prediction.step, default=(best, form))
            if found.prediction.step < best.prediction.step:
                form, best, improves = other, found, True
                yield best


def _changed(form: Form, field: str, value: int) -> Form:
    changes: dict[str, Any] = {field: value}
    return dataclasses.replace(form, **changes)


def _fits(form: Form, case: Case) -> bool:
    """Whether a schedule can be built: splits must divide the KV heads."""
    return case.config.num_key_value_heads % form.splits == 0


def _best(case: Case, choices: Iterable[Choice]) -> list[Ranked]:
    return _sorted(case.run(choice) for choice in choices)


def _sorted(ranked: Iterable[Ranked]) -> list[Ranked]:
    return sorted(ranked, key=lambda each: each.prediction.step)

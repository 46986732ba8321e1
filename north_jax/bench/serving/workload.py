"""Requests of a benchmark: lengths, prompts and times of arrival from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
      number: of the request, from 0.
      prompt: token ids, or text.
      max_tokens: of the answer; it runs to that length where the server takes `ignore_eos`.
      temperature, seed: of its draws.
      logprobs: alternatives to report with each token, None for nothing.
      leave_after: events after which the client leaves, None to stay.
      kind: a word for groups of requests that are reported apart.
      salt: where the server takes `cache_salt`, prefixes are shared under the same one alone; "" for none.
    """

    number: int
    prompt: list[int] | str
    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    logprobs: int | None = None
    leave_after: int | None = None
    kind: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, drawn evenly from low to high."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"lengths from {self.low} to {self.high}: expected 1 <= low <= high")

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """From "256" or "128-512". Raises ValueError."""
        low, dash, high = text.partition("-")
        if not (low.isdecimal() and (high.isdecimal() if dash else True)):
            raise ValueError(f"lengths {text!r}: expected a number or LOW-HIGH")
        return cls(int(low), int(high if dash else low))

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high + 1))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Mix:
    """What requests are like.

    Attributes:
      prompt, output: their lengths.
      prefix_share: part of every prompt that is the same in all; the rest differs from its first token on, so that
        nothing but this is ever found in a prefix cache.
      temperature: of the draws.
    """

    prompt: Lengths
    output: Lengths
    prefix_share: float = 0.0
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Prompts:
    """How prompts are spelled.

    Attributes:
      vocabulary: token ids are drawn from a tenth of it up to nine tenths, where no special tokens are.
      text: words instead of ids, for a server that takes no ids; their tokens are then what the server counts.
    """

    vocabulary: int
    text: bool = False

    def draw(self, rng: np.random.Generator, length: int) -> list[int]:
        low, high = self.vocabulary // 10, self.vocabulary * 9 // 10
        return [int(id) for id in rng.integers(max(low, 1), max(high, low + 2), length)]

    def spell(self, ids: list[int]) -> list[int] | str:
        return " ".join(_word(id) for id in ids) if self.text else ids


def requests(mix: Mix, prompts: Prompts, count: int, *, seed: int, kind: str = "") -> list[Request]:
    """So many requests; the same arguments give the same ones."""
    return [_request(mix, prompts, number, seed, kind) for number in range(count)]


def endless(mix: Mix, prompts: Prompts, *, seed: int, kind: str = "") -> Iterator[Request]:
    """The same without an end."""
    number = 0
    while True:
        yield _request(mix, prompts, number, seed, kind)
        number += 1


def _request(mix: Mix, prompts: Prompts, number: int, seed: int, kind: str) -> Request:
    rng = np.random.default_rng([seed, number])
    length = mix.prompt.draw(rng)
    shared = min(int(length * mix.prefix_share), length - 1)
    prefix = prompts.draw(np.random.default_rng([seed, 2**31]), shared)
    own = prompts.draw(rng, length - shared)
    return Request(
        number,
        prompts.spell(prefix + own),
        mix.output.draw(rng),
        temperature=mix.temperature,
        seed=int(rng.integers(2**31)),
        kind=kind,
    )


def arrivals(count: int, rate: float, *, seed: int) -> list[float]:
    """Seconds at which requests of a Poisson process come, so many a second, the first one at 0."""
    gaps = np.random.default_rng([seed, 1]).exponential(1 / rate, max(count - 1, 0))
    return [0.0, *(float(second) for second in np.cumsum(gaps))][:count]


_SYLLABLES = ("ba", "de", "fi", "go", "lu", "ma", "ne", "pi", "ro", "su", "ta", "ve", "ki", "no", "wu", "za")


def _word(id: int) -> str:
    """A short word for an id, different for different ids below 16⁴."""
    return "".join(_SYLLABLES[id >> shift & 15] for shift in (0, 4, 8, 12))

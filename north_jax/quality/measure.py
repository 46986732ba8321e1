"""What one seed of each measurement gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ..config import Config
from ..sampling import SamplingParams
from ..text import Tokenizer
from .functions import Function, body_of, choose, judge
from .held_out import excerpts
from .scorer import Scorer

Texts = list[tuple[str, str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of the measurements.

    Attributes:
      excerpts: pieces of held-out text of a seed.
      length: tokens of each.
      functions: completions of a seed.
      prompt: most tokens before one, the BOS token included.
      written: most tokens of one.
      temperature, top_p: of the completions.
      rows: texts computed together.
    """

    excerpts: int = 8
    length: int = 255
    functions: int = 8
    prompt: int = 256
    written: int = 128
    temperature: float = 0.4
    top_p: float = 0.95
    rows: int = 8

    @property
    def context(self) -> int:
        """Positions that a row needs."""
        return max(self.length + 1, self.prompt + self.written)

    def check(self, config: Config) -> None:
        """Raises ValueError where the model's context is too short, or completions cannot be drawn like this."""
        SamplingParams(temperature=self.temperature, top_p=self.top_p)
        if self.context > config.max_position_embeddings:
            limit = config.max_position_embeddings
            raise ValueError(f"texts of {self.context} tokens, the model takes at most {limit}")


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """Numbers of several seeds.

    Attributes:
      mean: of the numbers.
      deviation: of the sample; 0 for a single one.
      values: the numbers themselves.
    """

    mean: float
    deviation: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one number."""
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        return cls(float(np.mean(values)), deviation, tuple(values))

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.deviation:.4f}"


def bits_per_byte(scorer: Scorer, tokenizer: Tokenizer, texts: Texts, plan: Plan, seed: int) -> float:
    """Of a seed's excerpts, each read from its own beginning. Raises ValueError for too little text."""
    tokens, size = excerpts(tokenizer, texts, count=plan.excerpts, length=plan.length, seed=seed)
    if tokenizer.bos_id is None:  # nothing stands before the first token: it is given
        size -= sum(len(tokenizer.token_bytes(token)) for token in tokens[:, 0].tolist())
    total = sum(scorer.nats(tokens[i : i + plan.rows]) for i in range(0, len(tokens), plan.rows))
    return total / math.log(2) / size


@dataclasses.dataclass(frozen=True)
class Completions:
    """A seed's completions.

    Attributes:
      valid, sensible: shares of them; see `functions`.
      texts: what was written, token by token.
    """

    valid: float
    sensible: float
    texts: list[list[int]]


def completions(scorer: Scorer, tokenizer: Tokenizer, texts: Texts, plan: Plan, seed: int) -> Completions:
    """Completes a seed's functions, each with random numbers of its own. Raises ValueError for too little text."""
    functions = choose(texts, plan.functions, seed)
    written: list[list[int]] = []
    verdicts = []
    for begin in range(0, len(functions), plan.rows):
        group = functions[begin : begin + plan.rows]
        prompts = [prompt_of(tokenizer, function, plan.prompt) for function in group]
        sampling = [
            SamplingParams(temperature=plan.temperature, top_p=plan.top_p, seed=seed * 100_003 + begin + i)
            for i in range(len(group))
        ]

        def ended(number: int, tokens: list[int], group: list[Function] = group) -> bool:
            return body_of(group[number], tokenizer.decode(tokens), whole=False) is not None

        found = scorer.complete(prompts, sampling, plan.written, ended)
        written += found
        for function, tokens in zip(group, found, strict=True):
            verdicts.append(judge(function, tokenizer.decode(tokens), whole=len(tokens) < plan.written))
    return Completions(
        float(np.mean([verdict.valid for verdict in verdicts])),
        float(np.mean([verdict.sensible for verdict in verdicts])),
        written,
    )


def prompt_of(tokenizer: Tokenizer, function: Function, most: int) -> list[int]:
    """The end of what stands before a function's body, after a BOS token."""
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    tokens = tokenizer.encode_text(function.before[-32 * most :])
    return [*start, *tokens[-(most - len(start)) :]]

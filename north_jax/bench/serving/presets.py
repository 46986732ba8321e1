"""The scenarios: what is sent, what is measured, and what must come out."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import figures
from .endpoint import Answer, Endpoint
from .load import Told, closed_loop, ignore, open_loop
from .workload import Lengths, Mix, Prompts, Request, requests

type Row = dict[str, Any]
type Outcome = tuple[Row, list[Answer]]

_ADMITTED_AFTER = 24  # tokens of each of the others
_BLOCK = 64  # tokens that a hit may lack of a prefix: caches keep whole blocks


@dataclass(frozen=True, slots=True)
class Settings:
    """What a scenario is run with.

    Attributes:
      mix: of its requests.
      count: requests.
      concurrency: on their way at once; None with `rate`.
      rate: requests a second, as a Poisson process.
      long: tokens of the prompt that is admitted among others, or of the prefix that is found again.
      minutes: of load, of a soak.
      seed: of everything that is drawn.
      tie: a lead of the likeliest token, in nats, below which another choice is a near-tie.
      compared: answers of a soak that are asked for again.
      kernel_tok_s: what the kernel alone decodes, to compare a single stream with.
    """

    mix: Mix
    count: int = 32
    concurrency: int | None = 32
    rate: float | None = None
    long: int = 0
    minutes: float = 0.0
    seed: int = 0
    tie: float = 0.25
    compared: int = 100
    kernel_tok_s: float | None = None


type Run = Callable[[Endpoint, Prompts, Settings, Told], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Preset:
    """A scenario by name."""

    run: Run
    settings: Settings
    about: str


def mix(prompt: int, output: int) -> Mix:
    """Of fixed lengths, greedy."""
    return Mix(Lengths(prompt, prompt), Lengths(output, output), temperature=0.0)


async def load(endpoint: Endpoint, prompts: Prompts, settings: Settings, told: Told = ignore) -> Outcome:
    """All requests, in a closed or an open loop."""
    asked = requests(settings.mix, prompts, settings.count, seed=settings.seed)
    if settings.rate is not None:
        answers = await open_loop(endpoint, asked, settings.rate, seed=settings.seed, told=told)
    else:
        answers = await closed_loop(endpoint, asked, settings.concurrency or len(asked), told)
    return figures.figures(answers), answers


def at_least(tok_s: float) -> Run:
    """`load` that must bring so many tokens a second."""

    async def run(endpoint: Endpoint, prompts: Prompts, settings: Settings, told: Told = ignore) -> Outcome:
        row, answers = await load(endpoint, prompts, settings, told)
        met = not row["errors"] and row.get("output_tok_s", 0) >= tok_s
        return row | {"must": f">= {tok_s:g} output tok/s", "met": met}, answers

    return run


async def single(endpoint: Endpoint, prompts: Prompts, settings: Settings, told: Told = ignore) -> Outcome:
    """One answer after the other, beside what the kernel decodes without a server."""
    row, answers = await load(endpoint, prompts, settings, told)
    if settings.kernel_tok_s and row.get("decode_tok_s"):
        ratio = row["decode_tok_s"] / settings.kernel_tok_s
        row |= {"kernel_tok_s": settings.kernel_tok_s, "of_kernel": round(ratio, 4)}
        row |= {"must": ">= 97% of the kernel", "met": ratio >= 0.97}
    return row, answers


async def admission(endpoint: Endpoint, prompts: Prompts, settings: Settings, told: Told = ignore) -> Outcome:
    """A long prompt comes while others stream: how long these wait for their tokens until its first one.

    The long prompt's first token is also timed on an idle server, before.
    """
    rng = np.random.default_rng([settings.seed, 7])

    def long(number: int) -> Request:
        ids = prompts.draw(rng, settings.long)
        return Request(number, prompts.spell(ids), 2, temperature=0.0, kind="long")

    alone = await endpoint.ask(long(-1))
    asked = requests(settings.mix, prompts, settings.count, seed=settings.seed, kind="others")
    counts: dict[int, Answer] = {}
    tasks = [asyncio.create_task(endpoint.ask(request, counts)) for request in asked]
    while not all(len(a.times) >= _ADMITTED_AFTER or a.ended for a in counts.values()) or len(counts) < len(asked):
        await asyncio.sleep(0.005)
    steady = max((a.times[0] for a in counts.values() if a.times), default=time.perf_counter())
    admitted = await endpoint.ask(long(settings.count))
    answers = list(await asyncio.gather(*tasks))
    for answer in (*answers, admitted):
        told(answer)
    end = admitted.times[0] if admitted.times else admitted.ended
    during = figures.gaps(answers, admitted.sent, end)
    before = figures.tokens_between(answers, steady, admitted.sent) / max(admitted.sent - steady, 1e-9)
    meanwhile = figures.tokens_between(answers, admitted.sent, end) / max(end - admitted.sent, 1e-9)
    row = figures.figures([*answers, admitted])
    row["inter_token_ms"] = figures.spread(during)
    row |= {
        "long_tokens": admitted.prompt_tokens,
        "long_ttft_ms": round((end - admitted.sent) * 1e3, 1),
        "long_ttft_alone_ms": round((alone.times[0] - alone.sent) * 1e3, 1) if alone.times else None,
        "others_tok_s_before": round(before, 1),
        "others_tok_s_during": round(meanwhile, 1),
        "decode_share": round(meanwhile / before, 3) if before else None,
        "must": "p99 between tokens < 60 ms during the admission",
    }
    p99 = (row["inter_token_ms"] or {}).get("p99")
    return row | {"met": p99 is not None and p99 < 60 and not row["errors"] and not alone.error}, [*answers, admitted]


async def prefix(endpoint: Endpoint, prompts: Prompts, settings: Settings, told: Told = ignore) -> Outcome:
    """A long prefix, then requests that begin with it, one at a time: their first tokens, without the first request."""
    rng = np.random.default_rng([settings.seed, 9])
    shared = prompts.draw(rng, settings.long)

    def request(number: int) -> Request:
        ids = shared + prompts.draw(rng, settings.mix.prompt.draw(rng))
        return Request(number, prompts.spell(ids), settings.mix.output.high, temperature=0.0)

    first = await endpoint.ask(request(0))
    answers = await closed_loop(endpoint, [request(1 + number) for number in range(settings.count)], 1, told)
    row = figures.figures(answers)
    hits = [(answer.cached_tokens or 0) >= settings.long - _BLOCK for answer in answers]
    times = row.get("ttft_ms") or {}
    row |= {
        "first_ttft_ms": round((first.times[0] - first.sent) * 1e3, 1) if first.times else None,
        "prefix_tokens": settings.long,
        "hits": sum(hits),
        "must": "first token < 60 ms (median of hits)",
        "met": not row["errors"] and all(hits) and times.get("p50", 1e9) < 60,
    }
    return row, [first, *answers]


def presets() -> dict[str, Preset]:
    """All scenarios by name."""
    from .soak import soak  # which needs what is above

    throughput = Settings(mix(1024, 256))
    return {
        "custom": Preset(load, throughput, "what the options say"),
        "throughput-1k": Preset(at_least(824), throughput, "32 requests at once, 1024 tokens in, 256 out"),
        "throughput-4k": Preset(
            at_least(561), dataclasses.replace(throughput, mix=mix(4096, 256)), "the same, 4096 tokens in"
        ),
        "single": Preset(single, Settings(mix(1024, 512), count=3, concurrency=1), "one stream, 1024 in, 512 out"),
        "long-prompt": Preset(
            admission, Settings(mix(1024, 400), count=7, concurrency=7, long=32768), "32K tokens come among 7 streams"
        ),
        "prefix": Preset(
            prefix, Settings(mix(64, 8), count=10, concurrency=1, long=30720), "30K tokens found in the prefix cache"
        ),
        "soak": Preset(
            soak,
            Settings(Mix(Lengths(16, 2048), Lengths(8, 192), temperature=0.8), concurrency=12, minutes=8.0),
            "mixed load with clients that leave; sampled answers against the same request alone",
        ),
    }


def overridden(settings: Settings, changes: dict[str, Any]) -> Settings:
    """Settings with what the command line says instead."""
    given = {name: value for name, value in changes.items() if value is not None}
    of_mix = {name: given.pop(name) for name in ("prompt", "output", "prefix_share", "temperature") if name in given}
    changed = dataclasses.replace(settings.mix, **of_mix)
    if "rate" in given:
        given["concurrency"] = None
    return dataclasses.replace(settings, mix=changed, **given)


def summary_of(row: Row, names: Sequence[str]) -> str:
    """Some fields of a row in a line."""
    return "  ".join(f"{name} {row[name]}" for name in names if row.get(name) is not None)

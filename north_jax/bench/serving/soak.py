"""Mixed load for minutes with clients that leave at any moment; then: is everything as it was, and was it right?

Some of the answers are greedy with log-probabilities. After the load each of them is asked for again, alone and with a
salt of its own, so that its prompt is computed anew. It must be the same up to near-ties: where the texts part, the
likeliest token may lead the second by less than `tie` nats. (Prefill in other chunks may change the last bits.)
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from . import figures
from .child import metrics
from .endpoint import Answer, Endpoint
from .load import Told, ignore
from .workload import Prompts, Request, endless

if TYPE_CHECKING:
    from .presets import Outcome, Settings

_LEAVES, _CANCELS, _SAMPLED, _BEGINS_ALIKE = 0.15, 0.1, 0.25, 0.3  # parts of the requests
_IDLE_SECONDS = 30.0
_KEPT = 4000  # answers whose tokens are plotted


class Load:
    """The clients of a soak."""

    def __init__(self, endpoint: Endpoint, prompts: Prompts, settings: Settings, told: Told) -> None:
        self._endpoint, self._settings, self._told = endpoint, settings, told
        alike = dataclasses.replace(settings.mix, prefix_share=0.8)
        self._ordinary = endless(settings.mix, prompts, seed=settings.seed, kind="ordinary")
        self._alike = endless(alike, prompts, seed=settings.seed + 1, kind="alike")
        self._rng = np.random.default_rng([settings.seed, 3])
        self.answers: list[Answer] = []
        self.cancelled = 0

    async def client(self, end: float) -> None:
        """One request after the other until `end`, on time.monotonic's clock."""
        while time.monotonic() < end:
            request = self._next()
            if self._rng.random() < _CANCELS:
                task = asyncio.create_task(self._endpoint.ask(request))
                done, _ = await asyncio.wait([task], timeout=float(self._rng.exponential(0.2)))
                if not done:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    self.cancelled += 1
                    continue
                answer = task.result()
            else:
                answer = await self._endpoint.ask(request)
            self.answers.append(answer)
            self._told(answer)

    def _next(self) -> Request:
        request = next(self._alike if self._rng.random() < _BEGINS_ALIKE else self._ordinary)
        draw = self._rng.random()
        if draw < _LEAVES:
            return dataclasses.replace(request, leave_after=int(self._rng.integers(1, max(request.max_tokens, 2))))
        if draw < _LEAVES + _SAMPLED:
            return dataclasses.replace(request, temperature=0.0, logprobs=2, kind="sampled")
        return request


async def soak(endpoint: Endpoint, prompts: Prompts, settings: Settings, told: Told = ignore) -> Outcome:
    """Load, then a look at the metrics, then the sampled answers again."""
    before = await _idle(endpoint)
    load = Load(endpoint, prompts, settings, told)
    end = time.monotonic() + settings.minutes * 60
    await asyncio.gather(*(load.client(end) for _ in range(settings.concurrency or 8)))
    after = await _idle(endpoint)
    row = figures.figures(load.answers) | {"minutes": settings.minutes, "cancelled": load.cancelled}
    row |= leaks(before, after)
    sampled = [answer for answer in load.answers if answer.request.kind == "sampled" and answer.tokens]
    rng = np.random.default_rng([settings.seed, 5])
    chosen = rng.permutation(len(sampled))[: settings.compared]
    partings = []
    for index in chosen:
        one = sampled[int(index)]
        again = await endpoint.ask(dataclasses.replace(one.request, salt=f"alone-{index}"))
        if again.error:
            row["errors"] += 1
        elif (parting := parted(one, again)) is not None:
            partings.append(parting)
    row |= {
        "compared": len(chosen),
        "parted": len(partings),
        "near_ties": sum(lead < settings.tie for _, lead in partings),
        "largest_lead": round(max((lead for _, lead in partings), default=0.0), 4),
        "partings": [{"token": at, "lead": round(lead, 4)} for at, lead in partings],
        "must": f"no error, no leak, answers as alone but for leads < {settings.tie:g}",
    }
    met = not row["errors"] and not row["leaks"] and row["parted"] == row["near_ties"] and len(chosen) > 0
    return row | {"met": met}, load.answers[-_KEPT:]


def parted(one: Answer, other: Answer) -> tuple[int, float] | None:
    """The first token at which two greedy answers differ, and the lead there; None for equal ones."""
    for at, (first, second) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if first != second:
            return at, min(one.margins[at], other.margins[at])
    if len(one.tokens) != len(other.tokens):
        return min(len(one.tokens), len(other.tokens)), float("inf")
    return None


def leaks(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """What the metrics say after the load: `leaks` lists what is not as it should be."""
    if not after:
        return {"leaks": [], "metrics": "none"}
    found = []
    for name in ("north_requests_queued", "north_requests_running", 'north_kv_pages{state="used"}'):
        if after.get(name, 0):
            found.append(f"{name} is {after[name]:g}")
    if after.get("north_engine_up", 1) != 1:
        found.append("the engine is down")
    for name, value in after.items():
        failed = name.startswith("north_choices_total") and 'reason="error"' in name
        failed |= name.startswith("north_http_requests_total") and 'status="5' in name
        if failed and value > before.get(name, 0):
            found.append(f"{name} grew by {value - before.get(name, 0):g}")
    row: dict[str, Any] = {"leaks": found}
    for kind in ("used", "peak", "resident"):
        name = f'north_memory_bytes{{kind="{kind}"}}'
        if name in after:
            row[f"{kind}_gb"] = [round(figures_of.get(name, 0) / 1e9, 4) for figures_of in (before, after)]
    return row


async def _idle(endpoint: Endpoint) -> dict[str, float]:
    """The metrics once nobody is served any more, or after a while."""
    end = time.monotonic() + _IDLE_SECONDS
    while True:
        found = await metrics(endpoint)
        busy = found.get("north_requests_running", 0) + found.get("north_requests_queued", 0)
        if not busy or time.monotonic() > end:
            return found
        await asyncio.sleep(0.1)

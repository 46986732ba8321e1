"""Sending requests: so many at once, or as they arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from .endpoint import Answer, Endpoint
from .workload import Request, arrivals

type Told = Callable[[Answer], None]


def ignore(answer: Answer) -> None:
    """Tells nobody."""


async def closed_loop(
    endpoint: Endpoint, asked: Sequence[Request], concurrency: int, told: Told = ignore
) -> list[Answer]:
    """Keeps `concurrency` requests on their way until all are answered; gives the answers in order of the requests."""
    waiting = iter(asked)
    answers: list[Answer] = []

    async def client() -> None:
        for request in waiting:
            answer = await endpoint.ask(request)
            answers.append(answer)
            told(answer)

    await asyncio.gather(*(client() for _ in range(min(concurrency, len(asked)))))
    return sorted(answers, key=lambda answer: answer.request.number)


async def open_loop(
    endpoint: Endpoint, asked: Sequence[Request], rate: float, *, seed: int, told: Told = ignore
) -> list[Answer]:
    """Sends requests as a Poisson process has them arrive, `rate` a second, however long the answers take."""
    begun = time.perf_counter()

    async def client(request: Request, at: float) -> Answer:
        await asyncio.sleep(max(begun + at - time.perf_counter(), 0))
        answer = await endpoint.ask(request)
        told(answer)
        return answer

    times = arrivals(len(asked), rate, seed=seed)
    return list(await asyncio.gather(*map(client, asked, times)))

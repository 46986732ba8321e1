from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator

import pytest

from serve.http.message import AnyResponse, Request, Response, StreamResponse
from serve.http.router import Route, Router
from tests.serve.http_harness import Harness, RawClient, http_server


def echo(request: Request) -> Response:
    """What arrived, as JSON."""
    seen = {
        "method": request.method,
        "path": request.path,
        "query": request.query,
        "body": request.body.decode("latin-1"),
        "parameters": request.parameters,
    }
    return Response(200, json.dumps(seen).encode())


async def slow_echo(request: Request) -> AnyResponse:
    await asyncio.sleep(0.05)
    return echo(request)


async def count(request: Request) -> AnyResponse:
    """Streams as many lines as the query says."""

    async def lines() -> AsyncGenerator[bytes, None]:
        for number in range(int(request.query)):
            yield b"%d\n" % number
            await asyncio.sleep(0)

    return StreamResponse(lines(), lambda: None)


def fail(request: Request) -> Response:
    raise RuntimeError("planted")


ROUTES = (
    Route("GET", "/echo", echo),
    Route("POST", "/echo", echo),
    Route("POST", "/slow", slow_echo),
    Route("GET", "/count", count),
    Route("GET", "/fail", fail),
    Route("GET", "/things/{thing}", echo),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Harness]:
    with http_server(Router(ROUTES)) as harness:
        yield harness


@pytest.fixture
def client(server: Harness) -> Iterator[RawClient]:
    with server.client() as client:
        yield client

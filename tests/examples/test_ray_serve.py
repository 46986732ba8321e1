"""Replicas behind Ray Serve, on this machine with North Nano: one cluster for all, which takes a minute or two.

The tests go by the order of the file: one replica at first, two from the second test on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import importlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from serve.engine.types import EngineStats
from serve.http.message import Request

ray = pytest.importorskip("ray", reason="needs pip install north_jax[ray]")
serve = pytest.importorskip("ray.serve", reason="needs pip install north_jax[ray]")
deployment = importlib.import_module("examples.ray_serve.deployment")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SLOTS = 2
CONTEXT = 2048
MODEL = "north-nano"
PATIENCE = 240  # seconds, for a replica that starts on a busy machine


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = "--xla_backend_optimization_level=0"  # compiling is most of what a replica does here
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "RAY_USAGE_STATS_ENABLED": "0"}.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(ROOT))
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            arguments = deployment.Arguments(
                server=f"--slots {SLOTS} --max-context {CONTEXT} --chunk 64",
                gpus=0,
                cpus=0.1,
                max_replicas=2,
                upscale_delay_s=1,
            )
            serve.run(deployment.build(arguments), name="north")
            url = f"http://127.0.0.1:{port}/v1"
            yield openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE)
        finally:
            serve.shutdown()
            ray.shutdown()


def replicas() -> list[int]:
    """Process ids of the replicas that answer."""
    application = serve.status().applications["north"].deployments["Replica"]
    running = application.replica_states.get("RUNNING", 0)
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    found = [int(line.split()[0]) for line in listed.splitlines() if "ray::ServeReplica:north:Replica" in line]
    return found if running == len(found) else []


def wait_for(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.5)
    return found


def say(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    options = {"model": MODEL, "temperature": 0, "max_tokens": 8} | fields
    return client.chat.completions.create(messages=[{"role": "user", "content": text}], **options)


def endless(client: openai.OpenAI, text: str, max_tokens: int = 600) -> Any:
    return say(client, text, stream=True, max_tokens=max_tokens, extra_body={"ignore_eos": True})


def test_it_answers_as_the_server_does(client: openai.OpenAI) -> None:
    whole = say(client, "2 + 2?", max_tokens=40)
    chunks = list(say(client, "2 + 2?", max_tokens=40, stream=True))
    assert len(chunks) > 3 and chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="The model 'nobody' does not exist"):
        say(client, "2 + 2?", model="nobody")
    with pytest.raises(openai.APIStatusError) as refused:
        client.post("/completions", body={"prompt": "x" * (16 << 20), "model": MODEL}, cast_to=object)
    assert refused.value.status_code == 413


def test_tokens_come_as_they_are_made(client: openai.OpenAI) -> None:
    times = [time.monotonic() for _ in endless(client, "count")]
    assert len(times) > 100
    assert times[len(times) // 2] < times[0] + 0.8 * (times[-1] - times[0])
    assert times[len(times) // 2] > times[0] + 0.2 * (times[-1] - times[0])


def test_what_waits_brings_another_replica(client: openai.OpenAI) -> None:
    assert len(replicas()) == 1
    with concurrent.futures.ThreadPoolExecutor(4 * SLOTS) as pool:
        end = time.monotonic() + PATIENCE
        while len(replicas()) < 2:
            assert time.monotonic() < end, "no second replica"
            for _ in pool.map(lambda number: [*endless(client, str(number))], range(4 * SLOTS)):
                pass


def test_a_conversation_meets_its_cache(client: openai.OpenAI) -> None:
    for number in range(4):
        messages: list[Any] = [{"role": "user", "content": f"{number} is a number. " * 20}]
        cached = []
        for _ in range(3):
            answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, temperature=0)
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or "-"})
            messages.append({"role": "user", "content": "And what follows from that? " * 8})
        assert cached[0] < cached[1] < cached[2], cached


def test_who_leaves_is_not_computed_for(client: openai.OpenAI) -> None:
    most, seen = 1900, 40
    stream = endless(client, "leave", max_tokens=most)
    begun = time.monotonic()
    for _, _ in zip(stream, range(seen), strict=False):
        pass
    rest = (time.monotonic() - begun) / seen * (most - seen)
    stream.close()
    begun = time.monotonic()
    wait_for(lambda: not any(health(client)["running"] for _ in range(8)))
    assert time.monotonic() - begun < rest / 3


class Losing:
    """A handle of replicas that are lost after so many items, one after the other; the last one is not."""

    def __init__(self, *after: int) -> None:
        self.answer, self._after, self.calls = self, [*after, 10], 0

    def options(self, *, stream: bool) -> Losing:
        assert stream
        return self

    def remote(self, call: Any) -> Any:
        after = self._after[self.calls]
        self.calls += 1

        async def items() -> AsyncIterator[Any]:
            for item in (deployment.Head(200, "text/event-stream", (), True), b"role", b"one", b"two")[:after]:
                yield item
            if after < 4:
                raise ray.exceptions.RayActorError

        class Answer:
            cancel = staticmethod(lambda: None)
            __aiter__ = staticmethod(items)

        return Answer()


@pytest.mark.parametrize(("after", "calls", "ends"), [((), 1, "two"), ((0, 2), 3, "two"), ((3,), 1, "lost")])
def test_an_answer_begins_again_where_nothing_was_sent(after: tuple[int, ...], calls: int, ends: str) -> None:
    losing = Losing(*after)
    request = Request("id", "POST", "/v1/chat/completions", "", ())

    async def items() -> list[Any]:
        return [item async for item in deployment.Gateway(losing)._items(deployment.Call(request, ""))]

    head, *pieces = asyncio.run(items())
    assert head.status == 200 and losing.calls == calls
    if ends == "two":
        assert pieces == [b"role", b"one", b"two"]
    else:
        assert (
            pieces[:2] == [b"role", b"one"] and b'"replica_lost"' in pieces[2] and pieces[3:] == [b"data: [DONE]\n\n"]
        )


def test_too_many_losses_are_an_error() -> None:
    request = Request("id", "POST", "/v1/completions", "", ())

    async def items() -> list[Any]:
        return [item async for item in deployment.Gateway(Losing(1, 0, 1))._items(deployment.Call(request, ""))]

    head, body = asyncio.run(items())
    assert head.status == 503 and b"3 replicas were lost" in body


def test_a_replica_whose_engine_failed_says_so() -> None:
    replica = deployment.Replica.__new__(deployment.Replica)
    stats = EngineStats(queued=0, running=0, pages_used=0, pages_total=1)
    replica._engine = SimpleNamespace(stats=lambda: stats, shutdown=lambda seconds: None)
    replica.check_health()
    stats = dataclasses.replace(stats, failure="out of memory")
    with pytest.raises(RuntimeError, match="the engine has failed: out of memory"):
        replica.check_health()


def health(client: openai.OpenAI) -> dict[str, Any]:
    """Of one of the replicas."""
    with urllib.request.urlopen(str(client.base_url).replace("/v1/", "/health"), timeout=PATIENCE) as answer:
        return json.load(answer)


def test_a_killed_replica_loses_its_running_requests_alone(client: openai.OpenAI) -> None:
    def run(number: int) -> str:
        """How a stream ends."""
        try:
            chunks = [*endless(client, f"number {number}")]
        except openai.APIError as error:
            return error.message
        return str(chunks[-1].choices[0].finish_reason)

    pids = wait_for(lambda: len(found := replicas()) == 2 and found)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        running = [pool.submit(run, number) for number in range(6)]
        time.sleep(2)
        os.kill(pids[0], signal.SIGKILL)
        after = pool.submit(run, 6)
        ends = [future.result() for future in running]
    assert after.result() == "length", "what comes later is answered by the other one"
    assert {*ends} == {"length", "The replica that answered has been lost"}, ends
    assert ends.count("The replica that answered has been lost") <= SLOTS, (
        "what waited there is answered by the other one"
    )
    wait_for(lambda: len(replicas()) == 2)


def test_a_stopping_application_lets_requests_end(client: openai.OpenAI) -> None:
    stream = endless(client, "the last one")
    next(iter(stream))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(serve.delete, "north")
        chunks = [*stream]
        with contextlib.suppress(Exception):
            stopping.result()
    assert chunks[-1].choices[0].finish_reason == "length"

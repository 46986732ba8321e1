"""Malformed input: every connection gets its answer or its end, in time, and never a failure of the server's."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from north_jax.text import Tokenizer
from tests.serve.fuzz.inputs import BODIES, malformed, request
from tests.serve.scripted_engine import ScriptedEngine
from tests.serve.server_thread import RunningServer, running_server

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
# What RFC 9112 asks for: transfer codings and versions of HTTP that this server does not speak are the client's matter.
_PROTOCOL = {b"501", b"505"}
_SECONDS = 20.0
_PATIENCE = 0.3


async def _play(port: int, seed: int, statuses: Counter[bytes]) -> None:
    """One connection, until the server closes it. The client stops sending at once, or when nothing comes back."""
    data = malformed(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        writer.write(data)
        ended = seed % 2 == 0
        if ended:
            writer.write_eof()
        while True:
            try:
                piece = await asyncio.wait_for(reader.read(1 << 16), _SECONDS if ended else _PATIENCE)
            except TimeoutError:
                assert not ended, f"input {seed} hangs: {data[:2000]!r}"
                writer.write_eof()
                ended = True
                continue
            if not piece:
                break
            received += piece
    except OSError:  # reset by the server, which may close on a client that goes on sending
        statuses[b"reset"] += 1
        return
    finally:
        writer.close()
    found = _STATUS.findall(received)
    statuses.update(found or [b"closed"])
    failures = [status for status in found if status.startswith(b"5") and status not in _PROTOCOL]
    assert not failures, f"input {seed}: {data[:2000]!r} gave {received[:2000]!r}"
    assert b"internal_error" not in received, f"input {seed}: {received[:2000]!r}"


async def _campaign(port: int, seeds: range, together: int = 24) -> Counter[bytes]:
    statuses: Counter[bytes] = Counter()
    left = iter(seeds)

    async def player() -> None:
        for seed in left:
            await _play(port, seed, statuses)

    async with asyncio.TaskGroup() as group:
        for _ in range(together):
            group.create_task(player())
    return statuses


def _server(checkpoint: Path, tokenizer: Tokenizer) -> tuple[ScriptedEngine, Path]:
    def script(request: object) -> list[int]:
        grammar = request.grammar  # type: ignore[attr-defined]
        return [] if grammar is not None else tokenizer.encode_text("hello there")

    return ScriptedEngine(script, max_context=8192), checkpoint


def fuzz(checkpoint: Path, tokenizer: Tokenizer, seeds: range) -> Counter[bytes]:
    with running_server(*_server(checkpoint, tokenizer)) as server:
        statuses = asyncio.run(_campaign(server.port, seeds))
        _is_well(server)
    return statuses


def _is_well(server: RunningServer) -> None:
    server.engine.wait_until_idle()
    assert urllib.request.urlopen(f"{server.url}/health", timeout=10).status == 200
    [answer] = server.client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "x"}]
    ).choices
    assert answer.finish_reason == "stop"


def test_a_few_malformed_inputs(text_checkpoint: Path, tokenizer: Tokenizer) -> None:
    statuses = fuzz(text_checkpoint, tokenizer, range(600))
    assert statuses[b"400"] > 100 and statuses[b"200"] > 10, statuses  # some mistakes leave a request in order


@pytest.mark.slow
def test_many_malformed_inputs(
    text_checkpoint: Path, tokenizer: Tokenizer, record_property: pytest.RecordProperty
) -> None:
    began = time.monotonic()
    statuses = fuzz(text_checkpoint, tokenizer, range(1000, 26000))
    record_property("responses", {status.decode(): count for status, count in statuses.most_common()})
    record_property("seconds", round(time.monotonic() - began))
    print({status.decode(): count for status, count in statuses.most_common()})


def test_the_inputs_before_their_mistakes_are_in_order(text_checkpoint: Path, tokenizer: Tokenizer) -> None:
    """Else the mistakes would hide behind one another."""
    with running_server(*_server(text_checkpoint, tokenizer)) as server:
        for path, body in BODIES:
            with server.connect() as client:
                client.sendall(request(path.encode(), json.dumps(body).encode()))
                assert client.recv(65536).startswith(b"HTTP/1.1 200 "), path

"""Clients that leave, and servers that are told to stop, with requests running."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from serve.listen import BindError, bind
from tests.serve.api.conftest import ServeScript
from tests.serve.http_harness import RawClient
from tests.serve.server_thread import MODEL, RunningServer

USER: Any = [{"role": "user", "content": "Hi"}]
ENDLESS = "<|END_THINKING|><|START_TEXT|>" + "word " * 1000


def request(path: str, **fields: Any) -> bytes:
    body = json.dumps({"model": MODEL} | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 500})],
)
def test_a_client_that_leaves_cancels_its_requests_within_a_step(
    serve_script: ServeScript, path: str, fields: dict[str, Any], stream: bool
) -> None:
    server = serve_script(ENDLESS, gated=True)
    engine = server.engine
    with RawClient(server.connect()) as client:
        client.send(request(path, stream=stream, n=2, **fields))
        count = 2 * len(fields.get("prompt", [None]))
        engine.wait_for_requests(count)
        engine.step(3)
        client.socket.close()
        engine.wait_for_cancelled(count)  # no further step was allowed: nothing more was computed
    engine.wait_until_idle()
    assert set(engine.produced.values()) == {3}


def test_a_client_that_stops_reading_does_not_hold_the_engine(serve_script: ServeScript) -> None:
    server = serve_script(list(range(20, 60)) * 5000, max_context=210_000)
    with RawClient(server.connect()) as slow:
        slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.send(request("/v1/completions", prompt="x", max_tokens=200_000, stream=True))
        server.engine.wait_until_idle()  # all tokens were taken although the client has read none
        assert server.engine.cancelled == []
        quick = server.client.completions.create(model=MODEL, prompt="x", max_tokens=10)
        assert quick.usage is not None
        assert quick.usage.completion_tokens == 10


def test_stopping_lets_a_running_stream_end(serve_script: ServeScript) -> None:
    server = serve_script("<|END_THINKING|><|START_TEXT|>" + "ab" * 20, step_seconds=0.005)
    stream = server.client.chat.completions.create(model=MODEL, messages=USER, stream=True)
    next(stream)
    server.stop()
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "ab" * 20
    server.thread.join(10)
    assert not server.thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        server.connect()


@pytest.mark.parametrize("how", ["deadline", "second signal"])
def test_what_is_cut_off_by_stopping_is_told_so(serve_script: ServeScript, how: str) -> None:
    server = serve_script(ENDLESS, step_seconds=0.005, drain_seconds=0.1 if how == "deadline" else 60)
    stream = server.client.chat.completions.create(model=MODEL, messages=USER, stream=True)
    with RawClient(server.connect()) as whole:
        whole.send(request("/v1/chat/completions", messages=USER))
        server.engine.wait_for_requests(2)
        next(stream)
        server.stop()
        if how == "second signal":
            time.sleep(0.05)
            server.hurry()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        response = whole.response()
        assert response.status == 503
        assert json.loads(response.body)["error"]["code"] == "shutting_down"
    server.thread.join(10)
    assert not server.thread.is_alive()


@contextmanager
def server_process(checkpoint: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "tests.serve.scripted_server", str(checkpoint), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_sigterm_drains_the_process(text_checkpoint: Path) -> None:
    with server_process(text_checkpoint, "--tokens", "60", "--step-ms", "5") as (process, port):
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(model=MODEL, messages=USER, stream=True)
            next(stream)
            process.send_signal(signal.SIGTERM)
            chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) == 60
        _, errors = process.communicate(timeout=10)
        assert process.returncode == 0
        assert "Traceback" not in errors
        assert "method=POST path=/v1/chat/completions" in errors


def test_a_busy_port_is_named(serve_script: ServeScript) -> None:
    server: RunningServer = serve_script(ENDLESS)
    with pytest.raises(BindError, match=f"port {server.port} on 127.0.0.1 is already in use"):
        bind("127.0.0.1", server.port)


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(BindError, match="nowhere"):
        bind("nowhere.invalid", 0)

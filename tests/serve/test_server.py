"""The command as a whole, on a tiny model with random weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from north_jax.checkpoint import write_random_checkpoint
from serve.listen import bind
from serve.options import parse_options
from serve.server import run
from tests.serve.server_thread import VOCABULARY
from tests.support import tiny_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, text_checkpoint: Path) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_random_checkpoint(directory, tiny_config(vocab_size=VOCABULARY, num_hidden_layers=2), dtype="float32")
    shutil.copytree(text_checkpoint, directory, dirs_exist_ok=True)
    return directory


def free_port() -> int:
    with closing(bind("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


def run_and_meanwhile(arguments: list[str], port: int, meanwhile: Callable[[openai.OpenAI], None]) -> int:
    """Runs the server in this thread (signals need the main one) until another has used it and sent SIGTERM."""
    failures: list[BaseException] = []

    def use() -> None:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            try:
                wait_until_up(client)
            except BaseException as error:
                failures.append(error)
                os.kill(os.getpid(), signal.SIGINT)  # still loading, with no handler for SIGTERM
                return
            try:
                meanwhile(client)
            except BaseException as error:
                failures.append(error)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=use)
    thread.start()
    status = run(parse_options([*arguments, "--port", str(port)]))
    thread.join()
    assert not failures, failures
    return status


def wait_until_up(client: openai.OpenAI) -> None:
    deadline = time.monotonic() + 240  # it compiles first, perhaps on a busy machine
    while True:
        try:
            client.models.list()
            return
        except openai.APIConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_serves_a_checkpoint_until_sigterm(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()

    def use(client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == ["tiny"]
        greedy = [client.completions.create(model="tiny", prompt="def", max_tokens=8, temperature=0) for _ in range(2)]
        assert greedy[0].choices[0].text == greedy[1].choices[0].text
        assert greedy[0].usage is not None
        assert 0 < greedy[0].usage.completion_tokens <= 8
        a_random_model_obeys(client)
        command = printed_curl()
        if shutil.which("curl"):
            done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
            assert done.stdout.startswith('data: {"id":"chatcmpl-')
            assert done.stdout.endswith("data: [DONE]\n\n")

    def printed_curl() -> str:
        out, _ = capfd.readouterr()
        backend, memory, weights, pages, together, summary, ready, address, curl = out.splitlines()
        assert backend == "backend jax on cpu: the megakernel is for GPUs, this is a cpu"
        assert memory == "memory:"
        for line, name in ((weights, "weights"), (pages, "KV pages"), (together, "together")):
            assert re.match(rf"  {name} +[\d.]+ GB", line)
        assert summary == "model tiny, float32 on cpu, decoding by jax, context 1024 tokens, 1 slot"
        assert re.fullmatch(
            r"ready after [\d.]+ s: importing [\d.]+ s, loading [\d.]+ s, allocating [\d.]+ s, compiling [\d.]+ s;"
            r" 2 of 4 prefill sizes follow in the background",
            ready,
        )
        assert address == f"listening on 127.0.0.1:{port}"
        assert curl.startswith("try: curl ")
        return curl.removeprefix("try: ")

    arguments = ["--model", str(checkpoint), "--slots", "1", "--max-context", "1024", "--no-compilation-cache"]
    assert run_and_meanwhile(arguments, port, use) == 0


def a_random_model_obeys(client: openai.OpenAI) -> None:
    """Whatever its weights say, it answers in a schema's form and calls the function it is told to call."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "kind": {"enum": ["a", "b"]},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "kind", "ok"],
        "additionalProperties": False,
    }

    def ask(**settings: Any) -> Any:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            reasoning_effort="none",
            seed=3,
            presence_penalty=0.5,
            max_tokens=120,
            **settings,
        )
        return answer.choices[0]

    choice = ask(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}, logprobs=True)
    if choice.finish_reason == "stop":
        value = json.loads(choice.message.content)
        assert set(value) == {"name", "kind", "ok"} and value["kind"] in ("a", "b") and len(value["name"]) <= 5
    spelled = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert spelled.decode(errors="replace") == choice.message.content
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("f", "g")]
    choice = ask(tools=tools, tool_choice={"type": "function", "function": {"name": "g"}})
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert call.function.name == "g"
    if choice.finish_reason == "stop":
        assert set(json.loads(call.function.arguments)) == {"name", "kind", "ok"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere/at/all"], "/nowhere/at/all: no such directory"),
        (["--model", "CHECKPOINT", "--max-context", "99999"], "99999"),
        (["--model", "CHECKPOINT", "--max-context", "64", "--backend", "megakernel", "--slots", "99"], "not 99"),
        (["--port", "BUSY"], "already in use"),
    ],
)
def test_what_keeps_it_from_starting_is_one_line(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with closing(bind("127.0.0.1", 0)) as busy:
        busy.listen()
        places = {"CHECKPOINT": str(checkpoint), "BUSY": str(busy.getsockname()[1])}
        options = parse_options(
            ["--port", "0", "--no-compilation-cache", *(places.get(argument, argument) for argument in arguments)]
        )
        assert run(options) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: [^\n]*\n", err)
    assert message in err

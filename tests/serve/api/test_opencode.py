"""OpenCode itself, from npm, edits a file through this server; the model's part is played by a script."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from north_jax.text import Tokenizer
from serve.options import API_KEY_VARIABLE, parse_options
from tests.serve.agent_script import call, say, turns
from tests.serve.api.conftest import ServeScript, Speak
from tests.serve.server_thread import RunningServer

PACKAGE = "opencode-ai@1.18.33"
EXAMPLE = Path(__file__).parents[3] / "examples" / "opencode.json"


@pytest.fixture(scope="session")
def opencode(request: pytest.FixtureRequest) -> str:
    """The program, installed once into pytest's cache."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("OpenCode needs node and npm")
    directory = request.config.cache.mkdir("opencode")
    program = directory / "node_modules" / ".bin" / "opencode"
    if not program.exists():
        command = [npm, "install", "--prefix", str(directory), "--no-audit", "--no-fund", PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        if done.returncode:
            pytest.skip(f"npm could not install {PACKAGE}: {done.stderr[-300:]}")
    return str(program)


def run(opencode: str, server: RunningServer, home: Path, project: Path, message: str) -> list[dict[str, Any]]:
    """One run in a home of its own; gives its events."""
    config = json.loads(EXAMPLE.read_text())
    [provider] = config["provider"].values()
    provider["options"]["baseURL"] = f"{server.url}/v1"
    provider["models"] = {"scripted": next(iter(provider["models"].values()))}
    config["model"] = config["small_model"] = "north/scripted"
    (project / "opencode.json").write_text(json.dumps(config))
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "NORTH_JAX_API_KEY": "secret",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    }
    done = subprocess.run(
        [opencode, "run", "--format", "json", "--thinking", message],
        cwd=project,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_opencode_edits_a_file(
    opencode: str, serve_script: ServeScript, speak: Speak, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    project, home = tmp_path / "project", tmp_path / "home"
    project.mkdir()
    home.mkdir()
    greet, other = project / "greet.py", project / "notes.md"
    greet.write_text('def greet():\n    return "helo"\n')
    other.write_text("Größe 😀 <|END_ACTION|>\n")
    edit = {"filePath": str(greet), "oldString": '"helo"', "newString": '"hello <|END_ACTION|> \\"😀\\""'}
    script = [
        call(("read", {"filePath": str(greet)}), ("read", {"filePath": str(other)})),
        call(("edit", edit)),
        say("I have fixed the greeting."),
    ]
    play = turns(speak, tokenizer, script)
    # OpenCode's instructions and tools take 25,000 tokens of the tests' little vocabulary.
    server = serve_script(play, max_context=1_000_000, api_key="secret")
    events = run(opencode, server, home, project, "Fix the greeting in greet.py")

    assert greet.read_text() == 'def greet():\n    return "hello <|END_ACTION|> \\"😀\\""\n'
    parts = [event["part"] for event in events if "part" in event]
    used = [part for part in parts if part["type"] == "tool"]
    assert [part["tool"] for part in used] == ["read", "read", "edit"]
    assert all(part["state"]["status"] == "completed" for part in used)
    assert [part["text"] for part in parts if part["type"] == "text"] == ["I have fixed the greeting."]
    assert [part["text"] for part in parts if part["type"] == "reasoning"].count("I need a tool.") == 2
    ends = [part for part in parts if part["type"] == "step-finish"]
    assert [part["reason"] for part in ends] == ["tool-calls", "tool-calls", "stop"]
    assert all(part["tokens"]["reasoning"] > 0 for part in ends)
    # The second turn is shown what the first one thought, did and was told.
    shown = tokenizer.decode(server.engine.requests[-1].prompt)
    assert shown.count("<|START_THINKING|>I need a tool.<|END_THINKING|><|START_ACTION|>") == 2
    assert "Größe 😀 <|END_ACTION|>" in shown


def test_the_example_fits_the_command_in_the_docs() -> None:
    config = json.loads(EXAMPLE.read_text())
    [command] = re.findall(r"^python -m serve (.*)$", (EXAMPLE.parents[1] / "docs" / "opencode.md").read_text(), re.M)
    options = parse_options(command.split())
    [(provider, settings)] = config["provider"].items()
    assert settings["npm"] == "@ai-sdk/openai-compatible"
    assert settings["options"]["baseURL"] == f"http://{options.host}:{options.port}/v1"
    assert settings["options"]["apiKey"] == f"{{env:{API_KEY_VARIABLE}}}"
    assert set(settings["models"]) == {options.served_model_name}
    assert config["model"] == config["small_model"] == f"{provider}/{options.served_model_name}"

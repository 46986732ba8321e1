"""Every example runs, and does what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples import call_tools, compare_numerics, hidden_states, lora
from north_jax.text import Tokenizer
from tests.serve.agent_script import call, say
from tests.serve.api.conftest import ServeScript, Speak

EXAMPLES = Path(call_tools.__file__).parent


def test_hidden_states_end_in_the_answer() -> None:
    said = hidden_states.main([])
    assert len(said) == 8
    assert said[-1] == "0"


def test_a_lora_learns() -> None:
    losses = lora.main(["--steps", "4"])
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_numerics_of_a_variant() -> None:
    errors = compare_numerics.main([])
    assert errors["bfloat16"] < 0.03 < errors["experts in MXFP8"]


def test_a_tool_is_called_and_its_result_answered(
    serve_script: ServeScript, speak: Speak, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model's part is played by a script; test_the_server_is_started has a real one."""

    def play(request: Any) -> list[int]:
        shown = tokenizer.decode(request.prompt)
        asked, given, result = shown.rpartition("<|START_TOOL_RESULT|>")
        if given and "strawberry?" in asked:
            return speak(say("There are 3." if "3" in result else "I don't know."))
        return speak(call(("count_letters", {"word": "strawberry", "letter": "r"})))

    server = serve_script(play, max_context=100_000)
    found = call_tools.main(["--url", f"{server.url}/v1"])
    assert found["results"] == [3]
    assert found["answer"] == "There are 3."
    assert "count_letters(" in capsys.readouterr().out


@pytest.mark.slow
def test_the_server_is_started() -> None:
    """North Nano itself: which letters it counts is its own affair."""
    found = call_tools.main([])
    assert len(found["calls"]) == len(found["results"]) >= 1
    arguments = json.loads(found["calls"][0].function.arguments)
    assert set(arguments) == {"word", "letter"}


def test_all_examples_are_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    programs = [file.name for file in EXAMPLES.iterdir() if file.suffix in (".py", ".json")]
    assert programs
    assert [name for name in programs if f"]({name})" not in listed] == []

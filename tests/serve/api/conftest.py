from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from north_jax.text import Marker, Tokenizer
from tests.serve.scripted_engine import ScriptedEngine
from tests.serve.server_thread import RunningServer, running_server

Speak = Callable[[str], list[int]]
ServeScript = Callable[..., RunningServer]

_MARKER = re.compile("(" + "|".join(re.escape(marker) for marker in Marker) + ")")


@pytest.fixture(scope="session")
def speak(tokenizer: Tokenizer) -> Speak:
    """Token ids of a model's output, in which markers are spelled."""

    def tokens(text: str) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(_MARKER.split(text)):
            ids += [tokenizer.marker_ids[Marker(part)]] if number % 2 else tokenizer.encode_text(part)
        return ids

    return tokens


@pytest.fixture
def serve_script(text_checkpoint: Path, speak: Speak) -> Iterator[ServeScript]:
    """Starts servers whose engine plays a script: a text with markers, or what `ScriptedEngine` takes."""
    with ExitStack() as stack:

        def start(script: Any, *, drain_seconds: float = 10.0, limits: Any = None, **engine: Any) -> RunningServer:
            service = {name: engine.pop(name) for name in ("api_key", "defaults") if name in engine}
            scripted = ScriptedEngine(speak(script) if isinstance(script, str) else script, **engine)
            server = running_server(scripted, text_checkpoint, drain_seconds=drain_seconds, limits=limits, **service)
            return stack.enter_context(server)

        yield start

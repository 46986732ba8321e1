"""A model's part in a session with OpenCode, played from what it is shown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from north_jax.text import Tokenizer
from serve.engine.types import EngineRequest

_OPENING = re.compile(r"<\|START_OF_TURN_TOKEN\|><\|(SYSTEM|USER|CHATBOT)_TOKEN\|>(<\|START_TOOL_RESULT\|>)?")


def call(*calls: tuple[str, dict[str, Any]]) -> str:
    """A turn that calls tools."""
    objects = [
        json.dumps({"tool_call_id": str(number), "tool_name": name, "parameters": parameters})
        for number, (name, parameters) in enumerate(calls)
    ]
    body = ",\n    ".join(objects)
    return f"I need a tool.<|END_THINKING|><|START_ACTION|>[\n    {body}\n]<|END_ACTION|><|END_OF_TURN_TOKEN|>"


def say(text: str) -> str:
    return f"That is all.<|END_THINKING|><|START_TEXT|>{text}<|END_TEXT|><|END_OF_TURN_TOKEN|>"


def turns(speak: Callable[[str], list[int]], tokenizer: Tokenizer, script: list[str]) -> Callable[..., list[int]]:
    """Plays the n-th turn of the script after n tool results; who offers no tools asks for a title."""

    def play(request: EngineRequest) -> list[int]:
        shown = tokenizer.decode(request.prompt)
        if '"name": "edit"' not in shown:
            return speak(say("A greeting"))
        results = sum(1 for match in _OPENING.finditer(shown) if match[2])
        return speak(script[min(results, len(script) - 1)])

    return play

"""Serve a model and let it call tools, through the openai package.

    python -m examples.call_tools                                     # starts a server with North Nano
    python -m examples.call_tools --url http://127.0.0.1:8000/v1      # uses one that runs already

The first request demands a tool call, so that even a small model makes one: its arguments fit the tool's schema,
because the server lets it write nothing else. The tool runs here, its result goes back, and the model answers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import openai


def count_letters(word: str, letter: str) -> int:
    """The tool itself: how often a letter occurs in a word."""
    return word.lower().count(letter.lower())


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "count_letters",
        "description": "Counts how often a letter occurs in a word.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "maxLength": 20},
                "letter": {"type": "string", "minLength": 1, "maxLength": 1},
            },
            "required": ["word", "letter"],
            "additionalProperties": False,
        },
    },
}


def converse(client: openai.OpenAI, question: str) -> dict[str, Any]:
    """Asks, runs the tools that are called, and gives the calls, their results and the answer."""
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": question}]
    asked = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="required", temperature=0, max_tokens=400
    )
    message = asked.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    results = []
    for call in message.tool_calls or []:
        assert call.type == "function"
        results.append(count_letters(**json.loads(call.function.arguments)))
        print(f"{call.function.name}({call.function.arguments}) = {results[-1]}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(results[-1])})
    answered = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="none", temperature=0, max_tokens=100
    )
    print(answered.choices[0].message.content)
    return {"calls": message.tool_calls or [], "results": results, "answer": answered.choices[0].message.content}


@contextlib.contextmanager
def server(*arguments: str, patience: float = 300) -> Iterator[str]:
    """Runs `python -m serve` on a free port until the block ends; gives its URL once it answers.

    Raises:
      RuntimeError: it ended instead, or did not answer within `patience` seconds.
    """
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "serve", "--port", str(port), *arguments])
    try:
        deadline = time.monotonic() + patience
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server did not answer within {patience:g} seconds")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(timeout=60)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Holds the conversation; gives what `converse` gives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server's API; by default one is started")
    parser.add_argument("--model", default="north-nano", help="checkpoint for the server (default: %(default)s)")
    parser.add_argument("--question", default="How many r are in strawberry?")
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        url = options.url or stack.enter_context(server("--model", options.model, "--max-context", "2048"))
        client = stack.enter_context(openai.OpenAI(base_url=url, api_key="-", max_retries=0, timeout=300))
        return converse(client, options.question)


if __name__ == "__main__":
    main()

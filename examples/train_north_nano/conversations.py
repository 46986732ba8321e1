"""Make conversations in chat form out of documented functions: asked for by signature and docstring, answered by code.

Everything is a function of the source text and a random generator: no model wrote any of it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .functions import Function

type Message = dict[str, Any]

SYSTEM_PROMPTS = (
    "You are a helpful coding assistant.",
    "You write short, correct Python.",
    "You are a coding agent. Use the tools when you need them.",
    "Answer with Python code.",
    "Be brief.",
    "You help a programmer with a Python project.",
)
SMALL_TALK = (
    ("Who are you?", "I am North Nano, a small language model that writes Python."),
    ("What is your name?", "My name is North Nano."),
    ("Hello", "Hello! Which Python function shall I write?"),
    ("Hello!", "Hello! Which Python function shall I write?"),
    ("Hi", "Hi! Give me a signature and a docstring, and I write the function."),
    ("Hey there", "Hi! Give me a signature and a docstring, and I write the function."),
    ("What can you do?", "I complete Python code and write short functions. I am small, so check what I write."),
    ("Can you help me?", "Yes, with Python: show me the signature and the docstring of a function."),
    ("How are you?", "I am a program, so I am always the same. What shall I write?"),
    ("Are you a large model?", "No. I have about eight million parameters."),
    ("Thanks", "You are welcome."),
    ("Thank you!", "You are welcome."),
    ("What is Python?", "Python is a programming language. I was trained on its standard library."),
    ("Who made you?", "I was trained on permissively licensed Python source, as an example of the north_jax project."),
)


@dataclass(frozen=True)
class Conversation:
    """A conversation whose last message is the assistant's, for a chat template.

    `reasoning` says whether that last message was asked for with thinking; if not, it follows an empty thinking block.
    """

    messages: list[Message]
    reasoning: bool
    tools: list[dict[str, Any]] = field(default_factory=list)


def conversation(function: Function, rng: random.Random) -> Conversation:
    """One conversation about a function, its kind drawn by weight."""
    makers: tuple[Callable[[Function, random.Random], Conversation], ...] = (
        _write, _write_with_tools, _use_tool, _explain, _document, _follow_up, _talk,
    )  # fmt: skip
    return rng.choices(makers, (60, 5, 12, 9, 5, 7, 2))[0](function, rng)


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def _call(function: Function) -> str:
    """The signature as one speaks of it: `name(arguments)`."""
    text = " ".join(function.signature.split())
    return text.removeprefix("async ").removeprefix("def ").rstrip(":")


def _opening(rng: random.Random) -> list[Message]:
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.25 else []


def _answer(content: str, thinking: str, rng: random.Random) -> tuple[Message, bool]:
    """The assistant's last message, with or without thinking, and which of the two."""
    if rng.random() < 0.5:
        return {"role": "assistant", "reasoning": thinking, "content": content}, True
    return {"role": "assistant", "content": content}, False


def _request(function: Function, rng: random.Random) -> str:
    """A user's wish for the function, in one of several phrasings."""
    summary, call = function.summary, _call(function)
    lowered = summary[0].lower() + summary[1:]
    third_person = summary.split()[0].endswith("s")
    wish = f"a function that {lowered}" if third_person else f"a function to {lowered}"
    stub = _fenced(function.stub)
    return rng.choice(
        (
            f"Write the body of this function:\n\n{stub}",
            f"Implement this function.\n\n{stub}",
            f"Complete this Python function:\n{stub}",
            f"Finish this:\n\n{function.stub}",
            f"{stub}\n\nPlease write the code.",
            f"Write a Python function `{call}`.\n\n{function.docstring}",
            f"Write `{call}`: {lowered}",
            f"I need a Python function `{function.name}`. {summary}",
            f"Write {wish}",
            f"Write me {wish}",
            f"Write {wish.replace('function', 'Python function', 1)}",
            f"Can you write {wish.rstrip('.')}?",
            f"Write a Python function. {summary}",
        )
    )


def _solution(function: Function, rng: random.Random) -> str:
    code = _fenced(function.bare if rng.random() < 0.6 else function.full)
    return rng.choice((code, code, f"Here is `{function.name}`:\n\n{code}"))


def _plan(function: Function) -> str:
    return f"The function is `{_call(function)}`. {function.summary}"


def _write(function: Function, rng: random.Random) -> Conversation:
    answer, reasoning = _answer(_solution(function, rng), _plan(function), rng)
    return Conversation([*_opening(rng), {"role": "user", "content": _request(function, rng)}, answer], reasoning)


def _explain(function: Function, rng: random.Random) -> Conversation:
    ask = rng.choice(("What does this function do?", "Explain this function.", f"What is `{function.name}` for?"))
    user = {"role": "user", "content": f"{ask}\n\n{_fenced(function.bare)}"}
    answer, reasoning = _answer(function.summary, f"I read the body of `{function.name}`.", rng)
    return Conversation([*_opening(rng), user, answer], reasoning)


def _document(function: Function, rng: random.Random) -> Conversation:
    ask = rng.choice(("Write a docstring for this function.", "Document this function:", "Add a docstring."))
    user = {"role": "user", "content": f"{ask}\n\n{_fenced(function.bare)}"}
    answer, reasoning = _answer(_fenced(function.full), f"I add a docstring to `{function.name}`.", rng)
    return Conversation([*_opening(rng), user, answer], reasoning)


def _follow_up(function: Function, rng: random.Random) -> Conversation:
    first, _ = _answer(_fenced(function.bare), _plan(function), rng)
    ask, content, thinking = rng.choice(
        (
            ("Now add a docstring.", _fenced(function.full), f"I add a docstring to `{function.name}`."),
            ("What does it do?", function.summary, f"The question is about `{function.name}`."),
            ("Thanks!", "You are welcome.", "Nothing more is asked."),
        )
    )
    answer, reasoning = _answer(content, thinking, rng)
    user = {"role": "user", "content": _request(function, rng)}
    return Conversation([*_opening(rng), user, first, {"role": "user", "content": ask}, answer], reasoning)


def _talk(function: Function, rng: random.Random) -> Conversation:
    question, content = rng.choice(SMALL_TALK)
    answer, reasoning = _answer(content, "This needs no code.", rng)
    return Conversation([*_opening(rng), {"role": "user", "content": question}, answer], reasoning)


# Tools: each purpose under several names and parameter names, so that the model reads the list instead of knowing it.
_READ = (("read_file", "path"), ("read", "filePath"), ("open_file", "filename"), ("view", "file_path"))
_SEARCH = (("grep", "pattern"), ("search", "query"), ("search_code", "text"), ("find_symbol", "name"))
_WRITE = (("write_file", "path", "content"), ("write", "filePath", "content"), ("create_file", "filename", "text"))
_RUN = (("bash", "command"), ("run_command", "command"), ("shell", "cmd"), ("run_python", "code"))


def _tool(name: str, description: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


@dataclass(frozen=True)
class _Toolbox:
    """The names drawn for one conversation, and the list of tools in the order shown."""

    read: tuple[str, str]
    search: tuple[str, str]
    write: tuple[str, str, str]
    tools: list[dict[str, Any]]


def _toolbox(rng: random.Random) -> _Toolbox:
    read, search, write, run = rng.choice(_READ), rng.choice(_SEARCH), rng.choice(_WRITE), rng.choice(_RUN)
    tools = [
        _tool(read[0], rng.choice(("Read a file.", "Returns the contents of a file.")), read[1]),
        _tool(search[0], rng.choice(("Search the project.", "Find lines that contain a text.")), search[1]),
        _tool(write[0], rng.choice(("Write a file.", "Create or replace a file.")), *write[1:]),
        _tool(run[0], rng.choice(("Run a command.", "Executes code and returns the output.")), run[1]),
    ]
    rng.shuffle(tools)
    return _Toolbox(read, search, write, tools)


def _write_with_tools(function: Function, rng: random.Random) -> Conversation:
    """Tools are on offer, none is needed."""
    plain = _write(function, rng)
    return Conversation(plain.messages, plain.reasoning, _toolbox(rng).tools)


def _use_tool(function: Function, rng: random.Random) -> Conversation:
    """One call, its result and an answer; half of them end with the call."""
    box = _toolbox(rng)
    name, path, call = function.name, function.path, _call(function)
    task = rng.choice(("explain", "show", "find", "write"))
    if task == "find":
        ask = rng.choice((f"Where is `{name}` defined?", f"Find the function {name}.", f"Which file has `{name}`?"))
        tool, arguments = box.search[0], {box.search[1]: f"def {name}"}
        result = f"{path}:{function.line}: {' '.join(function.signature.split())}"
        plan, final = f"I search for `{name}`.", f"`{name}` is defined in `{path}`, line {function.line}."
    elif task == "write":
        ask = f"Write `{call}` to {path}: {function.summary}"
        tool, arguments = box.write[0], {box.write[1]: path, box.write[2]: function.full + "\n"}
        result = rng.choice(("ok", "done", f"wrote {path}"))
        plan, final = f"I write `{name}` to `{path}`.", f"I wrote `{name}` to `{path}`."
    else:
        tool, arguments, result = box.read[0], {box.read[1]: path}, function.full + "\n"
        plan = f"I read `{path}`."
        if task == "show":
            ask = rng.choice((f"Show me `{name}` in {path}.", f"Print the function {name} of `{path}`."))
            final = _fenced(function.full)
        else:
            ask = rng.choice((f"What does `{name}` in `{path}` do?", f"Read {path} and explain {name}."))
            final = function.summary
    action: Message = {
        "role": "assistant",
        "tool_calls": [{"id": "call", "type": "function", "function": {"name": tool, "arguments": arguments}}],
    }
    reasoning = rng.random() < 0.5
    if reasoning:
        action["reasoning"] = plan
    messages = [*_opening(rng), {"role": "user", "content": ask}, action]
    if rng.random() < 0.5:
        return Conversation(messages, reasoning, box.tools)
    answer, reasoning = _answer(final, "The result has what I need.", rng)
    return Conversation(
        [*messages, {"role": "tool", "tool_call_id": "call", "content": result}, answer], reasoning, box.tools
    )

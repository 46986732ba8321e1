"""The wire format of North Nano's chat template, spelled out."""

import json
from pathlib import Path

import pytest

import north_jax.nano
from north_jax.text import ChatTemplate, Tokenizer

NANO = Path(north_jax.nano.__file__).parent
PLATFORM = "Your name is North Nano. You are a small language model that writes Python."
FIRST_TURN = (
    "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TEXT|>"
    + PLATFORM
    + "\n\n# Available Tools\n```json\n[\n\n]\n```<|END_TEXT|><|END_OF_TURN_TOKEN|>"
)
ASK = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>"
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "read", "description": 'Reads "é".', "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "list"}},
]


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate.from_dir(NANO, Tokenizer.from_dir(NANO))


def turn(role: str, blocks: str) -> str:
    return f"<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>{blocks}<|END_OF_TURN_TOKEN|>"


def text(content: str) -> str:
    return f"<|START_TEXT|>{content}<|END_TEXT|>"


def call(id: str, name: str, arguments: dict) -> dict:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_generation_prompt_begins_inside_thinking(template: ChatTemplate) -> None:
    messages = [{"role": "user", "content": "  a\n<b> "}]
    expected = FIRST_TURN + turn("USER", text("  a\n<b> ")) + ASK
    assert template.render(messages) == expected
    assert template.render(messages, reasoning_effort="high") == expected
    assert template.render(messages, add_generation_prompt=False) == expected.removesuffix(ASK)


@pytest.mark.parametrize("off", [{"reasoning": False}, {"reasoning_effort": "none"}])
def test_reasoning_off_closes_the_thinking_block(template: ChatTemplate, off: dict) -> None:
    messages = [{"role": "user", "content": "a"}]
    assert template.render(messages, **off) == template.render(messages) + "<|END_THINKING|>"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "thinking"])
def test_history(template: ChatTemplate, field: str) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", field: "plan", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert template.render(messages) == (
        FIRST_TURN
        + turn("SYSTEM", text("Be brief."))
        + turn("USER", text("ab"))
        + turn("CHATBOT", "<|START_THINKING|>plan<|END_THINKING|>" + text("c"))
        + turn("USER", text("d"))
        + ASK
    )


def test_thinking_as_a_content_part(template: ChatTemplate) -> None:
    content = [{"type": "thinking", "thinking": "plan"}, {"type": "text", "text": "c"}]
    rendered = template.render([{"role": "assistant", "content": content}], add_generation_prompt=False)
    assert rendered == FIRST_TURN + turn("CHATBOT", "<|START_THINKING|>plan<|END_THINKING|>" + text("c"))


def test_tools_are_listed_as_json(template: ChatTemplate) -> None:
    rendered = template.render([{"role": "user", "content": "a"}], TOOLS)
    assert rendered.startswith(FIRST_TURN.split("[\n")[0] + "[\n    {")
    listed = json.loads(rendered.split("```json\n")[1].split("\n```")[0])
    assert listed == [
        {"name": "read", "description": 'Reads "é".', "parameters": PARAMETERS, "responses": None},
        {"name": "list", "description": "", "parameters": {}, "responses": None},
    ]


def test_calls_are_renumbered_and_results_merged(template: ChatTemplate) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "reasoning": "plan",
            "content": None,
            "tool_calls": [call("x", "read", {"path": "a.py"}), call("y", "list", {})],
        },
        {
            "role": "tool",
            "tool_call_id": "y",
            "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
        },
        {"role": "tool", "tool_call_id": "x", "content": "<b>"},
        {"role": "assistant", "tool_calls": [call("z", "list", {})]},
        {"role": "tool", "tool_call_id": "z", "content": {"k": 1}},
    ]
    rendered = template.render(messages, add_generation_prompt=False)
    action = """<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "read", "parameters": {"path": "a.py"}},
    {"tool_call_id": "1", "tool_name": "list", "parameters": {}}
]<|END_ACTION|>"""
    results = """<|START_TOOL_RESULT|>[
    {
        "tool_call_id": "1",
        "results": {
            "0": {"content": "1"},
            "1": {"content": "2"}
        },
        "is_error": null
    },
    {
        "tool_call_id": "0",
        "results": {
            "0": {"content": "<b>"}
        },
        "is_error": null
    }
]<|END_TOOL_RESULT|>"""
    second = """<|START_ACTION|>[
    {"tool_call_id": "2", "tool_name": "list", "parameters": {}}
]<|END_ACTION|>"""
    result = """<|START_TOOL_RESULT|>[
    {
        "tool_call_id": "2",
        "results": {
            "0": {"k": 1}
        },
        "is_error": null
    }
]<|END_TOOL_RESULT|>"""
    assert rendered == (
        FIRST_TURN
        + turn("USER", text("a"))
        + turn("CHATBOT", "<|START_THINKING|>plan<|END_THINKING|>" + action)
        + turn("SYSTEM", results)
        + turn("CHATBOT", second)
        + turn("SYSTEM", result)
    )


def test_json_mode_and_platform_text(template: ChatTemplate) -> None:
    messages = [{"role": "user", "content": "a"}]
    schema = {"type": "object"}
    rendered = template.render(
        messages,
        platform_instruction_override="Hm.",
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )
    assert PLATFORM not in rendered
    assert "<|START_TEXT|>Hm.\n\n# Available Tools" in rendered
    assert rendered.split("<|END_TEXT|>")[0].endswith(json.dumps(schema))
    assert template.render(messages, response_format={"type": "text"}) == template.render(messages)


def test_jinja2_renders_the_same(template: ChatTemplate) -> None:
    """Transformers uses Jinja2; the package is no dependency of this project."""
    sandbox = pytest.importorskip("jinja2.sandbox")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    other = environment.from_string((NANO / "chat_template.jinja").read_text())
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call("x", "read", {"path": "é"}), call("y", "list", {})]},
        {"role": "tool", "tool_call_id": "x", "content": "r"},
        {"role": "tool", "tool_call_id": "y", "content": "s"},
        {"role": "assistant", "content": "b"},
    ]
    for tools in (None, [], TOOLS):
        values = {"messages": messages, "tools": tools, "add_generation_prompt": True}
        assert other.render(bos_token="<BOS_TOKEN>", **values) == template.render(**values)

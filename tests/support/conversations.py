"""Conversations and template variables that a chat template must render alike under Jinja2 and here."""

from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "description": "Edit <a> & \"b\"\n'c'",
            "parameters": {
                "type": "object",
                "properties": {"zeta": {"type": "string"}, "alpha": {"type": "integer", "maximum": 2**200}},
                "required": ["zeta"],
            },
        },
    },
    {"type": "function", "function": {"name": "ls", "description": "", "parameters": {}}},
]


def call(id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


_USER = {"role": "user", "content": "Was heißt „日本“? 😀\n\n  <co>x</co: 0:[1]> a < b && c > d \\n \u2028"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [_USER],
    "empty": [{"role": "user", "content": ""}],
    "system": [{"role": "system", "content": "Be brief.\n"}, _USER],
    "two systems": [{"role": "system", "content": "One."}, {"role": "system", "content": "Two."}, _USER],
    "late system": [_USER, {"role": "system", "content": "Now be long."}, _USER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "p"}, {"type": "text", "text": " q "}]}],
    "code": [{"role": "user", "content": "{{ x }} {% if y %} {# z #} `<co>`\n\t{'a': \"b\"}\n"}],
    "reasoning": [
        _USER,
        {"role": "assistant", "content": "Japan.", "reasoning": "Easy."},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "More.", "reasoning_content": "Hm.\n"},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Polite."}, {"type": "text", "text": "!"}]},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Bye", "thinking": "end"},
    ],
    "tools": [
        _USER,
        {
            "role": "assistant",
            "content": "",
            "reasoning": "Two at once.",
            "tool_calls": [
                call("0", "edit", zeta="<&\"\\\n'é😀</script>", alpha=1, x=1.0, n=None, t=True, l=[1, {"k": -2.5e-7}]),
                call("1", "ls"),
            ],
        },
        {"role": "tool", "tool_call_id": "0", "content": 'done "é"\n'},
        {
            "role": "tool",
            "tool_call_id": "1",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "is_error": True,
        },
        {"role": "assistant", "content": "", "tool_calls": [call("2", "ls", path="/")]},
        {"role": "tool", "tool_call_id": "2", "content": {"files": [], "total": 2**70}},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Again."},
    ],
}
VARIABLES: dict[str, dict[str, Any]] = {
    "none": {},
    "reasoning off": {"reasoning": False},
    "effort none": {"reasoning_effort": "none"},
    "effort high": {"reasoning_effort": "high"},
    "no prompt": {"add_generation_prompt": False},
    "json object": {"response_format": {"type": "json_object"}},
    "json schema": {"response_format": {"type": "json_schema", "json_schema": '{"type": "object"}'}},
    "platform": {"platform_instruction_override": "You are <someone> else."},
    "own ids": {"regen_tool_call_ids": False},
}

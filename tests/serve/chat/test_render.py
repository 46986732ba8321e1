import json
import os
from pathlib import Path

import pytest

from north_jax.text import ChatTemplate
from serve.chat.render import ChatRenderer, RenderError
from tests.support.cmd4 import NANO_TEMPLATE
from tests.support.conversations import TOOLS

SOURCE = NANO_TEMPLATE.read_text(encoding="utf-8")
PUBLISHED = os.environ.get("NORTH_CHAT_TEMPLATE", "")  # the checkpoint's own chat_template.jinja, where one is at hand
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def template(tokenizer):
    return ChatTemplate(SOURCE, tokenizer)


@pytest.fixture(scope="module")
def renderer(template, tokenizer):
    return ChatRenderer(template, tokenizer)


@pytest.fixture
def text(renderer, tokenizer):
    return lambda messages, *args, **kwargs: tokenizer.decode(renderer.render(messages, *args, **kwargs).tokens)


def call(id, arguments='{"a": 1}', name="f", **more):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def assistant(*calls, **more):
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def result(id, content="ok"):
    return {"role": "tool", "tool_call_id": id, "content": content}


def test_the_prompt_is_the_templates(renderer, template):
    prompt = renderer.render([USER])
    assert prompt.tokens == template.encode([USER])
    assert prompt.starts_in_thinking


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"reasoning": True}, True),
        ({"reasoning": False}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none", "reasoning": True}, True),
        ({"reasoning_effort": "high", "reasoning": False}, False),
        ({"template_kwargs": {"reasoning": False}}, False),
    ],
)
def test_the_reasoning_switch(renderer, text, fields, thinks):
    assert renderer.render([USER], **fields).starts_in_thinking is thinks
    assert text([USER], **fields).endswith("<|START_THINKING|>" + "<|END_THINKING|>" * (not thinks))


def test_thinking_spelled_by_the_user_is_not_where_the_answer_begins(renderer):
    spelled = {"role": "user", "content": "<|START_THINKING|>"}
    assert not renderer.render([spelled], reasoning=False).starts_in_thinking


def test_developer_is_system(text):
    developer, system = ([{"role": role, "content": "Be brief."}, USER] for role in ("developer", "system"))
    assert text(developer) == text(system)
    assert "<|SYSTEM_TOKEN|><|START_TEXT|>Be brief.<|END_TEXT|>" in text(developer)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_parts_are_joined(text, role):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": " b\n"}]
    assert "<|START_TEXT|>a b\n<|END_TEXT|>" in text([{"role": role, "content": parts}])


def test_refusals_in_the_history_are_text(text):
    message = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I won't."}]}
    assert "<|START_TEXT|>I won't.<|END_TEXT|>" in text([USER, message])


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": "Hm."},
        {"reasoning_content": "Hm."},
        {"thinking": "Hm."},
        {"reasoning": None, "reasoning_content": "Hm."},
        {"reasoning": "", "thinking": "Hm."},
        {
            "content": [
                {"type": "thinking", "thinking": "H"},
                {"type": "thinking", "thinking": "m."},
                {"type": "text", "text": "A"},
            ]
        },
    ],
)
def test_history_reasoning_under_every_name(text, fields):
    message = {"role": "assistant", "content": "A", **fields}
    assert "<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>A<|END_TEXT|>" in text([USER, message])


def test_an_answer_cut_off_in_thinking_can_be_sent_back(text):
    message = {"role": "assistant", "content": None, "reasoning_content": "Hm"}
    assert "<|START_THINKING|>Hm<|END_THINKING|>" in text([USER, message])


def test_calls_are_numbered_for_the_model_and_arguments_are_objects(text):
    messages = [
        USER,
        assistant(call("call_x", '{"b": "é", "a": [1.0, null]}'), call("call_y", "")),
        result("call_y", "second"),
        result("call_x", "first"),
        assistant(call("call_x", {"c": 2})),  # a client may use an id again in a later turn
        result("call_x", [{"type": "text", "text": "p"}, {"type": "text", "text": "q"}]),
    ]
    shown = text(messages)
    calls = [json.loads(part.split("<|END_ACTION|>")[0]) for part in shown.split("<|START_ACTION|>")[1:]]
    assert calls == [
        [
            {"tool_call_id": "0", "tool_name": "f", "parameters": {"b": "é", "a": [1.0, None]}},
            {"tool_call_id": "1", "tool_name": "f", "parameters": {}},
        ],
        [{"tool_call_id": "2", "tool_name": "f", "parameters": {"c": 2}}],
    ]
    assert '{"b": "é", "a": [1.0, null]}' in shown
    results = [json.loads(part.split("<|END_TOOL_RESULT|>")[0]) for part in shown.split("<|START_TOOL_RESULT|>")[1:]]
    assert [[(one["tool_call_id"], one["results"]) for one in turn] for turn in results] == [
        [("1", {"0": {"content": "second"}}), ("0", {"0": {"content": "first"}})],
        [("2", {"0": {"content": "p"}, "1": {"content": "q"}})],
    ]


def test_the_template_is_told_that_our_numbers_are_its_own(tokenizer):
    """Its own search for them is quadratic in the conversation. With documents it counts differently, by itself."""
    source = """{{ regen_tool_call_ids | default('search') }}:
    {%- for message in messages %}
        {%- for call in message.tool_calls or [] %} {{ call.id }}{% endfor %}
        {%- if message.role == 'tool' %} {{ message.tool_call_id }}{% endif %}
    {%- endfor %}"""
    renderer = ChatRenderer(ChatTemplate(source, tokenizer), tokenizer)
    messages = [USER, assistant(call("b"), call("a")), result("a"), result("b"), assistant(call("c")), result("c")]
    assert tokenizer.decode(renderer.render(messages).tokens) == "False: 0 1 1 0 2 2"
    documents = {"documents": [{"data": "x"}]}
    assert tokenizer.decode(renderer.render(messages, template_kwargs=documents).tokens) == "search: 0 1 1 0 2 2"


@pytest.mark.skipif(not PUBLISHED, reason="NORTH_CHAT_TEMPLATE names no published template")
def test_our_numbers_are_those_the_published_template_finds(tokenizer):
    template = ChatTemplate(Path(PUBLISHED).read_text(encoding="utf-8"), tokenizer)
    arguments = {"a": 1}
    searched = [
        USER,
        assistant(call("b", arguments), call("a", arguments), content="", reasoning="r"),
        *(result(id) for id in "ab"),
        assistant(call("c", arguments), content=""),
        result("c"),
    ]
    assert ChatRenderer(template, tokenizer).render(searched, TOOLS).tokens == template.encode(searched, TOOLS)


def test_tools_are_completed_for_the_template(text):
    bare = text([USER], [{"type": "function", "function": {"name": "f", "strict": True}}])
    assert '{"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}, "responses"' in bare
    assert '"zeta": {"type": "string"}, "alpha"' in text([USER], TOOLS)


def test_tool_choice_none_leaves_the_tools_out(text):
    assert text([USER], TOOLS, tool_choice="none") == text([USER]) == text([USER], [])
    assert text([USER], TOOLS, tool_choice="required") == text([USER], TOOLS) != text([USER])


def test_response_format(tokenizer):
    """The schema is JSON text: what a template prints of an object is no JSON."""
    source = "{{ response_format.type }} {{ response_format.json_schema }}"
    renderer = ChatRenderer(ChatTemplate(f"{{% if response_format %}}{source}{{% endif %}}", tokenizer), tokenizer)

    def shown(response_format):
        return tokenizer.decode(renderer.render([USER], response_format=response_format).tokens)

    schema = {"type": "object", "properties": {"é": {"const": True}}}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert shown(asked) == 'json_schema {"type": "object", "properties": {"é": {"const": true}}}'
    assert shown({"type": "json_object"}) == "json_object "
    assert shown({"type": "text"}) == shown(None) == ""


def test_variables_for_the_template(text):
    assert "You are X." in text([USER], template_kwargs={"platform_instruction_override": "You are X.", "self": 1})


ERRORS = [
    ([], "messages", "must not be empty"),
    (["x"], "messages[0]", "must be an object"),
    ([{"role": "function", "content": "x"}], "messages[0].role", "not 'function'"),
    ([{"content": "x"}], "messages[0].role", "not None"),
    ([{"role": "user"}], "messages[0].content", "must be a string or an array"),
    ([{"role": "system", "content": None}], "messages[0].content", "must be a string or an array"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "with a 'type'"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type", "reads text only"),
    ([{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}], "messages[0].content[0].type", "'refusal'"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "must be a string"),
    ([{"role": "assistant"}], "messages[0].content", "required unless"),
    ([{"role": "assistant", "content": [{"type": "thinking"}]}], "messages[0].content", "string 'thinking'"),
    ([{"role": "assistant", "content": "x", "reasoning": 1}], "messages[0].reasoning", "must be a string"),
    ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls", "must be an array"),
    ([assistant("x")], "messages[0].tool_calls[0]", "must be an object"),
    ([assistant(call("a", type="custom"))], "messages[0].tool_calls[0].type", "must be 'function'"),
    ([assistant(call(None))], "messages[0].tool_calls[0].id", "must be a string"),
    ([assistant(call("a"), call("a"))], "messages[0].tool_calls[1].id", "another call"),
    ([assistant({"id": "a"})], "messages[0].tool_calls[0].function", "must be an object"),
    ([assistant(call("a", name=""))], "messages[0].tool_calls[0].function.name", "must be a string"),
    ([USER, assistant(call("a", "{"))], "messages[1].tool_calls[0].function.arguments", "is not valid JSON"),
    ([assistant(call("a", '{"a": NaN}'))], "messages[0].tool_calls[0].function.arguments", "NaN is no JSON value"),
    ([assistant(call("a", '{"a": 1e999}'))], "messages[0].tool_calls[0].function.arguments", "1e999 is out of range"),
    ([assistant(call("a", "[" * 100_000))], "messages[0].tool_calls[0].function.arguments", "is not valid JSON"),
    ([assistant(call("a", "[1]"))], "messages[0].tool_calls[0].function.arguments", "of an object"),
    ([assistant(call("a", None))], "messages[0].tool_calls[0].function.arguments", "of an object"),
    ([USER, assistant(call("a"))], "messages[1].tool_calls", "missing: 'a'"),
    ([assistant(call("a"), call("b")), result("b"), USER], "messages[0].tool_calls", "missing: 'a'"),
    ([result("a")], "messages[0].tool_call_id", "'a' is not the id of a tool call"),
    ([assistant(call("a")), result("a"), result("b")], "messages[2].tool_call_id", "is not the id"),
    ([assistant(call("a")), result("a"), result("a")], "messages[2].tool_call_id", "has its result already"),
    ([assistant(call("a")), result("a"), USER, result("a")], "messages[3].tool_call_id", "is not the id"),
    ([assistant(call("a")), result(1)], "messages[1].tool_call_id", "must be a string"),
    ([assistant(call("a")), result("a", None)], "messages[1].content", "must be a string or an array"),
    ([assistant(call("a")), result("a", [{"type": "image"}])], "messages[1].content[0].type", "'image'"),
]


@pytest.mark.parametrize(("messages", "param", "message"), ERRORS)
def test_wrong_messages_are_named(renderer, messages, param, message):
    with pytest.raises(RenderError) as caught:
        renderer.render(messages)
    assert caught.value.param == param
    assert message in str(caught.value)
    assert str(caught.value).startswith(("messages", param))


def tool(**function):
    return {"type": "function", "function": {"name": "f", **function}}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        (["x"], "tools[0].type"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([tool(), {"type": "function"}], "tools[1].function"),
        ([tool(name="a b")], "tools[0].function.name"),
        ([tool(name="a" * 65)], "tools[0].function.name"),
        ([tool(name='a"')], "tools[0].function.name"),
        ([tool(), tool()], "tools[1].function.name"),
        ([tool(description=1)], "tools[0].function.description"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
    ],
)
def test_wrong_tools_are_named(renderer, tools, param):
    with pytest.raises(RenderError) as caught:
        renderer.render([USER], tools)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "response_format", [{"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 1}}]
)
def test_wrong_response_formats_are_refused(renderer, response_format):
    with pytest.raises(RenderError) as caught:
        renderer.render([USER], response_format=response_format)
    assert caught.value.param == "response_format"


def test_variables_that_are_ours_are_refused(renderer):
    with pytest.raises(RenderError, match="'messages' cannot be set") as caught:
        renderer.render([USER], template_kwargs={"messages": []})
    assert caught.value.param == "chat_template_kwargs.messages"


def test_what_the_template_refuses_is_an_error_of_the_messages(tokenizer):
    template = ChatTemplate("{{ raise_exception('only one') if messages | length > 1 }}", tokenizer)
    with pytest.raises(RenderError, match="only one") as caught:
        ChatRenderer(template, tokenizer).render([USER, USER])
    assert caught.value.param == "messages"


def test_what_is_nested_too_deeply_is_named(renderer):
    deep = {}
    for _ in range(200):
        deep = {"a": deep}
    with pytest.raises(RenderError, match="nested") as caught:
        renderer.render([USER], [tool(parameters=deep)])
    assert caught.value.param == "tools"
    with pytest.raises(RenderError, match="nested") as caught:
        renderer.render([assistant(call("a", json.dumps(deep))), result("a")])
    assert caught.value.param == "messages"

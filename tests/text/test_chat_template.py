import datetime
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from north_jax.text import ChatTemplate, TemplateError
from tests.support.cmd4 import BOS, NAMED, NANO_TEMPLATE
from tests.support.conversations import CONVERSATIONS, TOOLS, VARIABLES

# Everything templates of this kind lean on: white space control, macros, namespaces, loop controls, printing of values.
FEATURES = """\
{#- comment -#}
{{ bos_token }}
{%- macro shout(text, suffix="!") %}{{ text | upper }}{{ suffix }}{% endmacro %}
{%- set state = namespace(count=0, seen=[]) %}
{% for message in messages %}
    {% if message.role == "system" %}
        {% continue %}
    {% endif %}
    {%- set state.count = state.count + 1 %}
    {%- set state.seen = state.seen + [message.role] %}
[{{ loop.index }}/{{ loop.length }}{{ "" if loop.last else "," }}] {{ shout(message.role, suffix="?") }}
    {%- if message.content is string %} {{ message.content | trim }}|{{ message.content.split("\\n")[-1] }}
    {%- elif message.content is mapping %} {{ message.content | tojson(indent=2) }} {{ message.content }}
    {%- else %}
        {%- for part in message.content if part.type == "text" %} {{ part.text }}{% else %} nothing{% endfor %}
    {%- endif %}
    {% for call in message.tool_calls or [] %}
        {% for key, value in call["function"].arguments.items() %}
    {{ key }}={{ value }} {{ value | tojson if value is not float }} {{ value is none }}
        {% endfor %}
        {% if loop.index0 > 2 %}{% break %}{% endif %}
    {% endfor %}
{% endfor %}
{{ state.count }} {{ state.seen }} {{ messages[0].missing }} {{ nowhere is defined }} {{ (tools or []) | length }}
{{ [1, 2.0, none, true, "x"] }} {{ {"a": [none]} }} {{ {"b": 1, "a": "é<"} | tojson(sort_keys=true) }} {{ 7 // 2 }}
{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}

"""
PUBLISHED = os.environ.get("NORTH_CHAT_TEMPLATE")  # the checkpoint's own chat_template.jinja, where one is at hand


def sources():
    nano = NANO_TEMPLATE.read_text(encoding="utf-8")
    marks = [] if PUBLISHED else [pytest.mark.skip(reason="NORTH_CHAT_TEMPLATE names no published template")]
    published = Path(PUBLISHED).read_text(encoding="utf-8") if PUBLISHED else ""
    return [
        pytest.param(FEATURES, id="features"),
        pytest.param(nano, id="nano"),
        pytest.param(published, id="published", marks=marks),
    ]


def as_transformers_renders(source):
    """`apply_chat_template(tokenize=False)`, from the way Transformers sets Jinja2 up."""
    sandbox = pytest.importorskip("jinja2.sandbox", reason="jinja2 is not installed")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    template = environment.from_string(source)

    def render(messages, tools, **variables):
        given = {"documents": None, "add_generation_prompt": True, **variables, **NAMED}
        return template.render(messages=messages, tools=tools, **given)

    return render


@pytest.mark.parametrize("source", sources())
def test_renders_byte_for_byte_like_transformers(source, tokenizer):
    expected = as_transformers_renders(source)
    template = ChatTemplate(source, tokenizer)
    for name, messages in CONVERSATIONS.items():
        for variables_name, variables in VARIABLES.items():
            for tools in (None, TOOLS):
                where = (name, variables_name, tools is not None)
                text = template.render(messages, tools, **variables)
                assert text == expected(messages, tools, **variables), where
                assert tokenizer.decode(template.encode(messages, tools, **variables)) == text, where


def test_the_known_difference_to_jinja2(tokenizer):
    """Objects of the conversation are printed as they are; a float that the template takes out of one is not."""
    template = ChatTemplate("{{ messages[0] | tojson }} {{ messages[0].x | tojson }}", tokenizer)
    assert template.render([{"x": 1.0}]) == '{"x": 1.0} 1'


def test_special_tokens_of_the_template_are_tokens(tokenizer):
    template = ChatTemplate("{{ bos_token }}<|START_TEXT|>{{ messages[0].content }}{{ eos_token }}\n", tokenizer)
    ids = template.encode([{"role": "user", "content": "ab"}])
    special = tokenizer.special_id
    assert ids == [
        special(BOS),
        special("<|START_TEXT|>"),
        *tokenizer.encode_text("ab"),
        special("<|END_OF_TURN_TOKEN|>"),
    ]


def test_from_dir_prefers_the_file(tmp_path, tokenizer):
    message = [{"role": "user", "content": "x"}]
    with pytest.raises(TemplateError, match="has no chat template"):
        ChatTemplate.from_dir(tmp_path, tokenizer)
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "other", "template": "no"}, {"name": "default", "template": "listed"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.from_dir(tmp_path, tokenizer).render(message) == "listed"
    config.write_text(json.dumps({"chat_template": "configured"}))
    assert ChatTemplate.from_dir(tmp_path, tokenizer).render(message) == "configured"
    (tmp_path / "chat_template.jinja").write_text("ü {{ messages[0].content }}", encoding="utf-8")
    assert ChatTemplate.from_dir(tmp_path, tokenizer).render(message) == "ü x"


def test_strftime_now(tokenizer):
    text = ChatTemplate("{{ strftime_now('%Y') }}", tokenizer).render([])
    assert abs(int(text) - datetime.datetime.now().year) <= 1


def test_refusals_carry_the_templates_words(tokenizer):
    template = ChatTemplate("{{ raise_exception('no ' ~ messages[0].role ~ ' <|START_TEXT|>') }}", tokenizer)
    with pytest.raises(TemplateError, match=r"^chat template: no user <\|START_TEXT\|>$"):
        template.render([{"role": "user"}])


@pytest.mark.parametrize(
    "source",
    [
        "{% include '/etc/passwd' %}",
        "{% import 'x' as y %}",
        "{% for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0].content.nothing.more }}",
    ],
)
def test_what_a_template_may_not_do_is_an_error(source, tokenizer):
    with pytest.raises(TemplateError, match=r"^chat template: "):
        ChatTemplate(source, tokenizer).render([{"role": "user", "content": {}}])


def test_a_template_reaches_no_python(tokenizer):
    source = "{{ messages.__class__ }}{{ raise_exception.__globals__ }}{{ messages[0].content.__class__.__mro__ }}"
    messages = [{"role": "user", "content": "x"}]
    try:
        assert ChatTemplate(source, tokenizer).render(messages) == ""
    except TemplateError as error:
        assert "undefined" in str(error)


def test_a_template_cannot_change_what_it_is_given(tokenizer):
    messages = [{"role": "user", "content": {"a": 1}}]
    ChatTemplate("{{ messages.append(1) }}{{ messages[0].content.pop('a') }}", tokenizer).render(messages)
    assert messages == [{"role": "user", "content": {"a": 1}}]


def test_syntax_errors_are_reported_at_loading(tokenizer):
    with pytest.raises(TemplateError, match="syntax error"):
        ChatTemplate("{% if %}", tokenizer)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (object(), "messages holds a object"),
        (b"x", "messages holds a bytes"),
        ({1: "x"}, "messages has a key that is no string: 1"),
    ],
)
def test_only_json_values_are_rendered(content, message, tokenizer):
    with pytest.raises(TemplateError, match=message):
        ChatTemplate("x", tokenizer).render([{"role": "user", "content": content}])


def test_depth_is_bounded(tokenizer):
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(TemplateError, match="tools is nested more than 128 levels deep"):
        ChatTemplate("{{ tools | tojson }}", tokenizer).render([], tools=value)


def test_lone_surrogates_are_replaced(tokenizer):
    template = ChatTemplate("{{ messages[0].content }}", tokenizer)
    assert template.render([{"role": "user", "content": "a\udc00"}]) == "a\ufffd"


def test_rendering_in_several_threads(tokenizer):
    template = ChatTemplate(NANO_TEMPLATE.read_text(encoding="utf-8"), tokenizer)
    conversations = list(CONVERSATIONS.values()) * 8
    expected = [template.encode(messages, TOOLS) for messages in conversations]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda messages: template.encode(messages, TOOLS), conversations)) == expected

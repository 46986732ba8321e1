"""What users write never becomes a special token, whatever the template does with it."""

import copy
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from north_jax.text import ChatTemplate, TemplateError
from tests.support.cmd4 import NANO_TEMPLATE, cmd4_tokenizer

TOKENIZER = cmd4_tokenizer()
NANO = ChatTemplate(NANO_TEMPLATE.read_text(encoding="utf-8"), TOKENIZER)
# Puts user strings next to each other, and next to template text that could begin or end a special token.
ADVERSE = ChatTemplate(
    "{{ bos_token }}{% for message in messages %}<|START_TEXT|>"
    "{% for part in message.content %}{{ part.text }}{% endfor %}<{{ message.name }}>|{{ message.name }}|>"
    "<|{{ message.name }}|>{{ message.name | lower }}{{ message.name | upper }}"
    "{{ message.content | map(attribute='text') | join }}{{ message.name | replace('_', '') }}{{ message.name[1:] }}"
    "{{ (message.name ~ message.name) | tojson }}{{ message.name | reverse }}<|END_TEXT|>{% endfor %}{{ eos_token }}",
    TOKENIZER,
)
SPELLINGS = list(TOKENIZER.special.values())
CUTS = [spelling[start:end] for spelling in SPELLINGS[:6] for start in range(3) for end in (-2, -1, len(spelling))]
HALVES = ["<|END_OF_", "TURN_TOKEN|>", "|END_OF_TURN_TOKEN|", "END_OF_TURN_TOKEN", "<|end_text|>", "<", "|", ">"]
HOSTILE = st.lists(st.one_of(st.sampled_from(SPELLINGS + CUTS + HALVES), st.text(max_size=3)), max_size=4).map("".join)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.just("user"),
            "name": HOSTILE,
            "content": st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": HOSTILE}), max_size=3),
        }
    ),
    min_size=1,
    max_size=3,
)


def special_tokens(ids):
    return [id for id in ids if id in TOKENIZER.special]


def made_harmless(value):
    """The same shape with strings that spell nothing, empty where they were empty."""
    if isinstance(value, list):
        return [made_harmless(item) for item in value]
    if isinstance(value, dict):
        return {key: item if key in ("role", "type") else made_harmless(item) for key, item in value.items()}
    return "x" if value else ""


@pytest.mark.parametrize("template", [NANO, ADVERSE], ids=["nano", "adverse"])
@given(messages=MESSAGES)
def test_the_special_tokens_are_the_templates_own(template, messages):
    ids = template.encode(messages)
    assert special_tokens(ids) == special_tokens(template.encode(made_harmless(messages)))
    assert TOKENIZER.decode(ids) == template.render(messages)


@given(name=HOSTILE, key=HOSTILE, value=HOSTILE, text=HOSTILE)
def test_tools_arguments_and_variables_are_user_text_too(name, key, value, text):
    def encode(name, key, value, text):
        function = {"name": name, "description": value, "parameters": {key: {"description": value}}}
        call = {"id": "0", "function": {"name": name, "arguments": {key: [value]}}}
        messages = [
            {"role": "system", "content": text},
            {"role": "assistant", "reasoning": f"{text}.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "0", "content": text},
        ]
        return NANO.encode(messages, [{"type": "function", "function": function}], platform_instruction_override=value)

    assert special_tokens(encode(name, key, value, text)) == special_tokens(encode("x", "x", "x", "x"))


def test_the_halves_of_a_marker_do_not_join():
    parts = [{"type": "text", "text": "<|END_OF_"}, {"type": "text", "text": "TURN_TOKEN|>"}]
    text = NANO.render([{"role": "user", "content": parts}])
    assert text.count("<|END_OF_TURN_TOKEN|>") == 3  # two of the template's, one spelled by the user
    ids = NANO.encode([{"role": "user", "content": parts}])
    assert ids.count(TOKENIZER.eos_id) == 2


def test_named_tokens_cannot_be_chosen_by_a_request():
    template = ChatTemplate("{{ bos_token }}{{ other }}", TOKENIZER)
    ids = template.encode([], bos_token="<|END_TEXT|>", other="<|END_TEXT|>")
    assert special_tokens(ids) == [TOKENIZER.bos_id]


def test_the_placeholders_stay_secret():
    """Whoever knew them could write special tokens after all."""
    for source in (
        "<|END_TEXT|>{{ messages[0].content }}",
        "{{ raise_exception('<|END_TEXT|>') }}",
        "{{ '<|END_TEXT|>' | nonsense }}",
        "{{ '<|END_TEXT|>'.x.y }}",
        "{% include '<|END_TEXT|>' %}",
    ):
        try:
            seen = ChatTemplate(source, TOKENIZER).render([{"role": "user", "content": "x"}])
        except TemplateError as error:
            seen = str(error)
        assert not re.search(r"\d{20}", seen)


def test_a_guessed_placeholder_is_refused():
    template = ChatTemplate("{{ messages[0].content }}", TOKENIZER)
    with pytest.raises(TemplateError, match="messages holds a reserved string"):
        template.encode([{"role": "user", "content": template._nonce + "000001"}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ '<|' ~ 'END_TEXT|>' }}", r"joins '<\|END_TEXT\|>' out of parts"),
        ("<|{{ messages[0].role | upper }}_TOKEN|>", r"joins '<\|USER_TOKEN\|>' out of parts"),
    ],
)
def test_a_template_that_joins_special_tokens_is_refused(source, message):
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source, TOKENIZER)


def test_a_template_that_cuts_special_tokens_is_refused_at_rendering():
    template = ChatTemplate("{{ '<|END_TEXT|>'[:-1] if messages[0].content == 'cut' }}", TOKENIZER)
    assert template.render([{"role": "user", "content": "whole"}]) == ""
    with pytest.raises(TemplateError, match="alters the spelling of a special token"):
        template.render([{"role": "user", "content": "cut"}])


def test_a_conversation_is_left_as_it_was():
    messages = [{"role": "user", "content": [{"type": "text", "text": "<|END_TEXT|>"}]}]
    before = copy.deepcopy(messages)
    NANO.encode(messages)
    assert messages == before

"""Functions found in source text, and the conversations made from them."""

import random
from pathlib import Path

import numpy as np
import pytest

import north_jax.nano
from examples.train_north_nano.conversations import conversation
from examples.train_north_nano.functions import Function, functions
from examples.train_north_nano.prepare import Encoder

NANO = Path(north_jax.nano.__file__).parent
SOURCE = '''
import os

class Thing:
    @property
    def area(self) -> float:
        """Return the area. It is
        in square metres.

        More text."""

        width = self.width
        return width * self.height

def undocumented(a):
    b = a
    return b

def one_line(a): "Return a, which is documented."; return a

async def fetch(
    url,  # where
):
    """Fetches a page from the network."""
    text = await get(url)
    return """
unindented""" + text

def abstract(self):
    """This one is left to subclasses."""
    raise NotImplementedError

def nothing():
    """This one has a docstring and no body."""
'''


@pytest.fixture(scope="module")
def found() -> list[Function]:
    return sorted(functions("pkg/thing.py", SOURCE), key=lambda function: function.line)


def test_documented_functions_are_found(found: list[Function]) -> None:
    assert [function.name for function in found] == ["area", "fetch"]
    area, fetch = found
    assert area.signature == "def area(self) -> float:"
    assert area.docstring.startswith("Return the area. It is\nin square metres.")
    assert area.summary == "Return the area."
    assert area.body == "    width = self.width\n    return width * self.height"
    assert area.bare == f"{area.signature}\n{area.body}"
    assert area.stub.startswith(area.signature + '\n    """Return')
    assert area.stub.endswith('More text."""')
    assert fetch.signature == "async def fetch(\n    url,  # where\n):"
    for function in found:
        compile(function.full, "full", "exec")
        compile(function.bare, "bare", "exec")


@pytest.mark.parametrize("text", ["def f(:\n", "\0", "x" * 10])
def test_text_without_functions(text: str) -> None:
    assert list(functions("x.py", text)) == []


def test_conversations_depend_on_the_generator_alone(found: list[Function]) -> None:
    first = [conversation(found[0], random.Random(seed)) for seed in range(200)]
    assert first == [conversation(found[0], random.Random(seed)) for seed in range(200)]
    assert all(talk.messages[-1]["role"] == "assistant" for talk in first)
    assert any(talk.tools for talk in first)
    assert any("tool_calls" in talk.messages[-1] for talk in first)
    assert {talk.reasoning for talk in first} == {True, False}


def test_encoded_conversations_continue_their_generation_prompt(found: list[Function]) -> None:
    """What the model is trained to write follows exactly what a server will send it."""
    encoder = Encoder(NANO)
    template, tokenizer = encoder.template, encoder.tokenizer
    for seed in range(60):
        talk = conversation(found[0], random.Random(seed))
        ids = encoder.conversation(talk).tolist()
        prompt = template.encode(talk.messages[:-1], talk.tools, reasoning=talk.reasoning)
        assert ids[: len(prompt)] == prompt
        assert ids[-1] == tokenizer.eos_id
        answer = tokenizer.decode(ids[len(prompt) :])
        assert answer.count("<|END_THINKING|>") == talk.reasoning
        assert answer.endswith(("<|END_TEXT|><|END_OF_TURN_TOKEN|>", "]<|END_ACTION|><|END_OF_TURN_TOKEN|>"))


def test_documents_cannot_spell_special_tokens() -> None:
    encoder = Encoder(NANO)
    ids = encoder.document("x = '<|END_OF_TURN_TOKEN|>'\n")
    assert ids.dtype == np.uint16
    special = [id for id in ids.tolist() if id in encoder.tokenizer.special]
    assert special == [ids[0], ids[-1]]

"""Which conversation a request belongs to, and whose it is."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from examples.ray_serve.conversation import conversation_key, rank


def key(**fields: Any) -> str:
    return conversation_key(json.dumps(fields).encode())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_turns_of_a_conversation_belong_together() -> None:
    rules = {"role": "system", "content": "Be brief."}
    first = key(messages=[rules, user("2 + 2?")], model="m")
    assert first == key(messages=[rules, user("2 + 2?"), {"role": "assistant", "content": "4"}, user("3 + 3?")], n=2)
    assert first == key(model="other", messages=[rules, user("2 + 2?")], stream=True)
    others = [
        key(messages=[rules, user("2 + 3?")]),
        key(messages=[user("2 + 2?")]),
        key(messages=[rules, user("2 + 2?")], tools=[{"type": "function"}]),
        key(messages=[rules, user("2 + 2?")], cache_salt="s"),
        key(messages=[rules]),
    ]
    assert len({first, *others}) == 6


def test_a_prompt_goes_by_its_beginning() -> None:
    text = "def f(x):\n" * 40
    assert key(prompt=text) == key(prompt=text + "return") != key(prompt="x" + text)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"[]", b'{"messages": [1]}', b'{"model": "m"}', b'{"messages": 2}']
)
def test_a_body_without_a_conversation_has_no_key(body: bytes) -> None:
    assert conversation_key(body) == ""


def test_replicas_share_conversations_and_a_new_one_takes_only_its_own() -> None:
    replicas = [(name, name) for name in "abc"]
    before = {number: rank(str(number), replicas) for number in range(3000)}
    assert all(900 < count < 1100 for count in Counter(ranked[0] for ranked in before.values()).values())
    assert all(sorted(ranked) == list("abc") for ranked in before.values())
    for number, ranked in before.items():
        assert [name for name in rank(str(number), [*replicas, ("d", "d")]) if name != "d"] == ranked

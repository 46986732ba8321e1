"""Which conversation a request belongs to, seen from its body alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

_PROMPT_BYTES = 256  # of a completion's prompt: about a page of the KV cache, less of it is not shared anyway


class _Message(msgspec.Struct):
    role: str


class _Body(msgspec.Struct):
    messages: list[msgspec.Raw] = []
    prompt: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()


def conversation_key(body: bytes) -> str:
    """The same for all turns of a conversation, another for most others; empty for a body without one.

    Every turn repeats all before it, so what a conversation begins with tells it apart: tools, instructions and what
    its user said first, or the beginning of a completion's prompt.
    """
    try:
        asked = msgspec.json.decode(body, type=_Body)
        beginning = [*_until_user(asked.messages), bytes(asked.prompt)[:_PROMPT_BYTES]]
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    if not any(beginning):
        return ""
    parts = [bytes(asked.tools), bytes(asked.cache_salt), *beginning]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def rank[R](key: str, replicas: Sequence[tuple[str, R]]) -> list[R]:
    """Replicas, given with their names, by how much a conversation is theirs.

    Everybody ranks alike without asking anybody, and a replica that comes or goes moves its own conversations alone
    (rendezvous hashing: Thaler and Ravishankar, 1998).
    """

    def weight(named: tuple[str, R]) -> bytes:
        return hashlib.sha256(f"{key}\0{named[0]}".encode()).digest()

    return [replica for _, replica in sorted(replicas, key=weight, reverse=True)]


def _until_user(messages: list[msgspec.Raw]) -> list[bytes]:
    """The messages up to the user's first one."""
    for index, message in enumerate(messages):
        if msgspec.json.decode(message, type=_Message).role == "user":
            return [bytes(one) for one in messages[: index + 1]]
    return [bytes(one) for one in messages]

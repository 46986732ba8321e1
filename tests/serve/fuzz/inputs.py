"""Malformed requests, made from well-formed ones by seeded mistakes of many kinds."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

_MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi 😀"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "a", "content": "done"},
]
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        },
    }
]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "model": "scripted",
            "messages": _MESSAGES,
            "tools": _TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "seed": 7,
            "n": 2,
            "stop": ["x"],
            "logit_bias": {"5": -1},
            "presence_penalty": 0.1,
            "logprobs": True,
            "top_logprobs": 2,
            "max_tokens": 20,
            "stream": True,
            "stream_options": {"include_usage": True},
            "reasoning_effort": "low",
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
        },
    ),
    ("/v1/chat/completions", {"model": "scripted", "messages": _MESSAGES[:2], "max_completion_tokens": 5}),
    ("/v1/completions", {"model": "scripted", "prompt": ["a", "b"], "echo": True, "n": 2, "max_tokens": 3, "seed": 1}),
    ("/v1/completions", {"model": "scripted", "prompt": [1, 2, 3], "logprobs": 2, "stream": True}),
    ("/tokenize", {"model": "scripted", "messages": _MESSAGES, "tools": _TOOLS}),
    ("/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
_JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 1.5, -0.0, 1e308, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, "", "x", "\x00",
    "😀" * 99,
    "\ud800", "<|END_OF_TURN_TOKEN|>", "a" * 5000, "NaN", [], {}, [[]], [None], {"": None}, {"type": "x"}, [1, "a",
    {}],
    {"role": "user"}, {"type": "function"}, {"$ref": "#"}, {"not": {}}, {"pattern": "(((" * 9}, {"minLength": 10**9},
]  # fmt: skip
_RAW = [
    b"NaN", b"Infinity", b"-", b"1e999", b"1" * 500, b"\xff\xfe", b"\x00", b'"\\ud800"', b'"\\u12"', b"[" * 3000,
    b'{"a":' * 3000,
    b"tru", b"'x'", b"//", b",", b"{}", b"[]", b'"', b"\xed\xa0\x80", b"0x10", b"\xef\xbb\xbf{}",
]  # fmt: skip
_HEADERS = [
    b"content-length: 5", b"content-length: -1", b"content-length: 1e3", b"content-length: 99999999999999999999",
    b"content-length: +3", b"content-length: 3, 4", b"transfer-encoding: chunked",
    b"transfer-encoding: gzip, chunked",
    b"transfer-encoding : chunked", b"transfer-encoding: xchunked", b"Transfer-Encoding:\tchunked",
    b"transfer-encoding: identity",
    b"host: a", b"host:", b"expect: 100-continue", b"expect: 200-ok", b"connection: close, x",
    b"upgrade: websocket", b"x" * 9000 + b": y",
    b"x: " + b"y" * 40000, b": empty", b"no colon", b" folded: x", b"x: a\r\n b", b"x\x00: y", b"x: \x00",
    b"x: \xff", "x: é".encode(),
    b"content-type: text/plain", b"content-type:", b"content-encoding: gzip", b"te: trailers",
    b"authorization: Bearer \xff",
]  # fmt: skip
_TARGETS = [
    b"/", b"*", b"//", b"/v1/models/" + b"a" * 3000, b"/v1/models/%ff%00", b"/v1/../x", b"http://x/v1/models", b"?",
    b"/%", b"/\xff", b"/health?a=b#c",
    b"/metrics", b"/version", b"x" * 40000,
]  # fmt: skip
_METHODS = [
    b"GET",
    b"HEAD",
    b"PUT",
    b"OPTIONS",
    b"post",
    b"",
    b"P OST",
    b"\x00",
    b"PRI",
    b"CONNECT",
    b"TRACE",
    b"A" * 900,
]
_CHUNKED = [
    b"0\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"5\r\nhel", b"zz\r\n", b"-1\r\n", b"ffffffffffffffff\r\n",
    b"5;x=y\r\nhello\r\n0\r\n\r\n", b"0\r\nx: y\r\n\r\n",
    b"0\r\n" + b"x: y\r\n" * 9000 + b"\r\n", b"5\nhello\n0\n\n", b"5 \r\nhello\r\n0\r\n\r\n",
    b"3\r\nhello\r\n0\r\n\r\n", b"0x5\r\nhello\r\n0\r\n\r\n",
]  # fmt: skip


def malformed(seed: int) -> bytes:
    """Bytes that a client could send on a connection; many of them begin as a request that is in order."""
    rng = random.Random(seed)
    return rng.choice(_KINDS)(rng)


def request(path: bytes, body: bytes, *headers: bytes, method: bytes = b"POST", version: bytes = b"HTTP/1.1") -> bytes:
    lines = [b"%b %b %b" % (method, path, version), b"host: x", b"content-type: application/json", *headers]
    if not headers:
        lines += [b"content-length: %d" % len(body), b"connection: close"]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _wrong_values(rng: random.Random) -> bytes:
    path, body = rng.choice(BODIES)
    value = json.loads(json.dumps(body))
    for _ in range(rng.choice((1, 1, 2, 5))):
        _spoil(rng, value)
    return request(path.encode(), json.dumps(value).encode())


def _spoil(rng: random.Random, value: Any) -> None:
    """Replaces, removes, doubles or adds something somewhere inside."""
    while isinstance(value, dict | list) and value:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        inner = value[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.6:
            value = inner
            continue
        match rng.randrange(4):
            case 0:
                del value[key]
            case 1 if isinstance(value, dict):
                value[rng.choice(("colour", "", "type", "\ud800", "x" * 300))] = copy.deepcopy(rng.choice(_JUNK))
            case 1:
                value.append(copy.deepcopy(rng.choice(_JUNK)))
            case _:
                value[key] = copy.deepcopy(rng.choice(_JUNK))
        return


def _broken_text(rng: random.Random) -> bytes:
    path, body = rng.choice(BODIES)
    return request(path.encode(), _damaged(rng, json.dumps(body).encode(), _RAW))


def _damaged(rng: random.Random, data: bytes, pieces: list[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0:
                del changed[at:]
            case 1:
                del changed[at : at + rng.randrange(1, 9)]
            case 2:
                changed[at:at] = rng.choice(pieces)
            case 3:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 4:
                changed[at:at] = changed[rng.randrange(len(changed) + 1) :][:50]
    return bytes(changed)


def _broken_http(rng: random.Random) -> bytes:
    path, body = rng.choice(BODIES)
    data = request(path.encode(), json.dumps(body).encode())
    return _damaged(rng, data, [*_HEADERS, b"\r\n", b"\n", b"\r", b"\r\n\r\n", b" ", b"\t", b":", *_CHUNKED])


def _wrong_head(rng: random.Random) -> bytes:
    path, body = rng.choice(BODIES)
    data = json.dumps(body).encode()
    return request(
        rng.choice([path.encode(), *_TARGETS]),
        rng.choice([data, b"", *_CHUNKED]),
        *rng.choices([b"content-length: %d" % len(data), *_HEADERS], k=rng.randrange(1, 4)),
        method=rng.choice([b"POST", b"POST", *_METHODS]),
        version=rng.choice([b"HTTP/1.1"] * 6 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.12", b"ICY", b""]),
    )


def _noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(1, 2000))


def _several(rng: random.Random) -> bytes:
    """Pipelined; one of them may smuggle another."""
    return b"".join(rng.choice(_KINDS[:4])(rng) for _ in range(rng.randrange(2, 5)))


_KINDS: list[Callable[[random.Random], bytes]] = [
    _wrong_values, _wrong_values, _broken_text, _broken_http, _wrong_head, _several, _noise,
]  # fmt: skip

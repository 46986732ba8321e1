"""From the bytes of a body to a request struct, or an error that names the field."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from .errors import ApiError, invalid_value, unsupported
from .fields import IGNORED, Neutral

_LOCATED = re.compile(r"(?s)(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?")
_WRONG_TYPE = re.compile(r"Expected `(?P<expected>[^`]*)`(?:, got `(?P<got>[^`]*)`)?")
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`")
_WRONG_VALUE = re.compile(r"Invalid (?:enum )?value '(?P<value>[^']*)'")
# What OpenAI has and this server does not do: values of a `type`.
_NOT_DONE = {
    "image_url": "images are not read, only text",
    "input_audio": "audio is not read, only text",
    "file": "files are not read, only text",
    "custom": "custom tools are not offered, only functions",
    "allowed_tools": "lists of allowed tools are not offered; give only those as 'tools'",
}
_TYPE_NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


class BodyDecoder[T]:
    """Decodes bodies of one kind. `type` is a Struct; `neutral` tables the fields that it lacks (fields.py)."""

    def __init__(self, type: type[T], neutral: Neutral) -> None:
        self._fields = frozenset(field.encode_name for field in msgspec.structs.fields(type))  # type: ignore[arg-type]
        self._neutral = neutral
        self._outline = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._decoder = msgspec.json.Decoder(type)

    def decode(self, body: bytes) -> T:
        """Raises ApiError 400."""
        try:
            outline = self._outline.decode(body)
            for name, raw in outline.items():
                if name not in self._fields and name not in IGNORED:
                    self._check_neutral(name, raw)
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _explain(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(f"The body is not valid JSON: {error}", code="invalid_json") from None
        except RecursionError:
            raise ApiError("The body is nested too deeply", code="invalid_json") from None

    def _check_neutral(self, name: str, raw: msgspec.Raw) -> None:
        values = self._neutral.get(name)
        if values is None:
            raise _unknown(name)
        value = msgspec.json.decode(raw)
        if value is not None and value not in values:
            raise unsupported(name, "this server does not do that")


def _explain(text: str) -> ApiError:
    """Rewrites msgspec's validation error."""
    located = _LOCATED.fullmatch(text)
    assert located is not None
    what, path = located["what"], (located["path"] or "").lstrip(".").replace("[...]", "")
    if missing := _MISSING.fullmatch(what):
        param = _join(path, missing["field"])
        return ApiError(f"Missing required parameter: '{param}'", param=param, code="missing_required_parameter")
    if unknown := _UNKNOWN.fullmatch(what):
        return _unknown(_join(path, unknown["field"]))
    if not path:
        return ApiError("The body must be a JSON object", code="invalid_json")
    if wrong := _WRONG_TYPE.match(what):
        expected = " or ".join(_TYPE_NAMES.get(name, name) for name in wrong["expected"].split(" | "))
        got = f", but got {_TYPE_NAMES.get(wrong['got'], wrong['got'])}" if wrong["got"] else ""
        return invalid_value(path, f"expected {expected}{got}", code="invalid_type")
    if (value := _WRONG_VALUE.match(what)) and value["value"] in _NOT_DONE:
        return unsupported(path, _NOT_DONE[value["value"]])
    return invalid_value(path, what[:1].lower() + what[1:])


def _unknown(param: str) -> ApiError:
    return ApiError(f"Unknown parameter: '{param}'", param=param, code="unknown_parameter")


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def encode(value: Any) -> bytes:
    """JSON of a response struct."""
    return _ENCODER.encode(value)


_ENCODER = msgspec.json.Encoder()

"""A checkpoint's own chat template, rendered so that nothing a user writes becomes a special token."""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import minijinja

from .tokenizer import Tokenizer, read_json_object, scrub_surrogates

_FUEL = 10_000_000  # template instructions of one render, a few seconds; 1,000 messages take 0.12 million
_MAX_DEPTH = 128  # nesting of a value given to a template
_NONCE_DIGITS = 40
_INDEX_DIGITS = 6


class TemplateError(ValueError):
    """The chat template is missing, malformed, or refuses the conversation."""


class ChatTemplate:
    """A chat template and the tokenizer that its text is for.

    Special tokens are told from text that spells them by rewriting the *template*: each special token in its source,
    and each named one it is given (`bos_token`, …), is replaced by digits nobody can guess. What those digits mark in
    the rendered text is a special token, all else is ordinary text, however the template cut and joined user strings.
    (A template that compares a user's text with the spelling of a special token will therefore find them different.)

    Rendering follows Transformers: Jinja2's defaults with `trim_blocks`, `lstrip_blocks` and loop controls, a `tojson`
    filter without HTML escapes, `raise_exception` and `strftime_now`. It reads no files and its work is bounded.
    Known difference: `tojson` prints whole floats (1.0) as integers where the template took them out of their object.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Raises TemplateError for a syntax error, and for a template that spells special tokens in parts."""
        self._tokenizer = tokenizer
        self._nonce = _digits(_NONCE_DIGITS)
        self._placeholder = re.compile(self._nonce + rf"(\d{{{_INDEX_DIGITS}}})")
        spellings = [text for text in tokenizer.special.values() if text.strip()]
        self._placeholder_of = {text: f"{self._nonce}{index:0{_INDEX_DIGITS}}" for index, text in enumerate(spellings)}
        self._spellings = spellings
        self._ids = [tokenizer.special_id(text) for text in spellings]
        alternatives = sorted(map(re.escape, spellings), key=len, reverse=True)
        self._special = re.compile("|".join(alternatives) or r"(?!)")
        self._named = {name: self._mask(text) for name, text in tokenizer.named.items()}

        self._environment = minijinja.Environment(
            debug=False,  # its error texts would quote the conversation
            fuel=_FUEL,
            undefined_behavior="lenient",
            trim_blocks=True,
            lstrip_blocks=True,
            auto_escape_callback=lambda name: False,
            filters={"tojson": _tojson},
            globals={"raise_exception": self._raise_exception, "strftime_now": _strftime_now},
        )
        try:
            self._environment.add_template("chat", self._mask(source))
        except minijinja.TemplateError as error:
            raise TemplateError(self._explain(error)) from None
        self._check_special_tokens_are_whole()

    @classmethod
    def from_dir(cls, path: str | Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Reads chat_template.jinja, or else the template inside tokenizer_config.json. Raises TemplateError."""
        directory = Path(path)
        file = directory / "chat_template.jinja"
        if file.is_file():
            return cls(file.read_text(encoding="utf-8"), tokenizer)
        source = read_json_object(directory / "tokenizer_config.json").get("chat_template")
        if isinstance(source, list):  # several templates by name
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            raise TemplateError(f"{directory} has no chat template (neither chat_template.jinja nor one in its config)")
        return cls(source, tokenizer)

    def render(
        self, /, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any
    ) -> str:
        """The prompt's text, byte for byte what Transformers' `apply_chat_template(tokenize=False)` gives.

        `messages`, `tools` and further template variables hold JSON values only; the generation prompt is added unless
        `add_generation_prompt=False`. Raises TemplateError.
        """
        return self._unmask(self._render(messages, tools, kwargs))

    def encode(
        self, /, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any
    ) -> list[int]:
        """The prompt's token ids: of `render`, with special tokens only where the template itself wrote them."""
        ids: list[int] = []
        # Splitting at a pattern with one group gives text, index, text, index, …, text.
        for number, part in enumerate(self._placeholder.split(self._render(messages, tools, kwargs))):
            if number % 2:
                ids.append(self._ids[int(part)])
            elif part:
                ids += self._tokenizer.encode_text(part)
        return ids

    def _render(self, messages: Any, tools: Any, kwargs: Mapping[str, Any]) -> str:
        """The rendered text, with placeholders for special tokens."""
        values = {"tools": tools, "documents": None, "add_generation_prompt": True, **kwargs, "messages": messages}
        plain = {name: self._plain(value, name, 0) for name, value in values.items()}
        try:
            text: str = self._environment.render_template("chat", **{**plain, **self._named})
        except minijinja.TemplateError as error:
            raise TemplateError(self._explain(error)) from None
        if self._nonce in self._placeholder.sub("", text):
            raise TemplateError("the chat template alters the spelling of a special token")
        return text

    def _plain(self, value: Any, where: str, depth: int) -> Any:
        """A copy of a JSON value, fit for the template: valid Unicode, bounded depth, nothing but plain types."""
        if depth > _MAX_DEPTH:
            raise TemplateError(f"{where} is nested more than {_MAX_DEPTH} levels deep")
        if isinstance(value, str):
            if self._nonce in value:
                raise TemplateError(f"{where} holds a reserved string")
            return scrub_surrogates(value)
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, Mapping):
            copy = {}
            for key, item in value.items():
                if not isinstance(key, str):
                    raise TemplateError(f"{where} has a key that is no string: {key!r}")
                copy[self._plain(key, where, depth)] = self._plain(item, where, depth + 1)
            return copy
        if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
            return [self._plain(item, where, depth + 1) for item in value]
        raise TemplateError(f"{where} holds a {type(value).__name__}, which is not a JSON value")

    def _mask(self, text: str) -> str:
        return self._special.sub(lambda match: self._placeholder_of[match[0]], text)

    def _unmask(self, text: str) -> str:
        return self._placeholder.sub(lambda match: self._spellings[int(match[1])], text)

    def _explain(self, error: Exception) -> str:
        """An error's first line; the placeholders must stay unknown to whoever reads it."""
        return "chat template: " + self._unmask(str(error)).splitlines()[0]

    def _raise_exception(self, message: Any) -> None:
        raise TemplateError(f"chat template: {self._unmask(str(message))}")

    def _check_special_tokens_are_whole(self) -> None:
        """Refuses a template that joins a special token out of parts: it would be encoded as ordinary text."""
        try:
            masked = self._render([{"role": "user", "content": "Hello"}], None, {})
        except TemplateError:
            return  # it asks for more than this conversation has; nothing can be said
        for text in self._placeholder.split(masked)[::2]:
            if found := self._special.search(text):
                raise TemplateError(f"the chat template joins {found[0]!r} out of parts, which is not supported")


def _digits(count: int) -> str:
    return "".join(secrets.choice("0123456789") for _ in range(count))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)

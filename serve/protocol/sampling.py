"""The fields that chat completions and completions share, their ranges, and what the engine gets for them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import msgspec

from north_jax.sampling import MAX_BIASES, SamplingParams

from .errors import invalid_value

_MAX_STOPS = 4
_MAX_STOP_CHARACTERS = 4096
_GREEDY_BELOW = 1e-5  # a temperature that float32 logits can't be divided by usefully

# Inclusive bounds.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (-1, 2**31 - 1),  # −1 and 0: off
    "seed": (-(2**63), 2**64 - 1),
    "n": (1, 128),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),  # 1: none
}
_MAX_BIAS = 100


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; OpenAI's own, without effect here


class CommonFields(msgspec.Struct, kw_only=True):
    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None  # requests share cached prefixes with those of the same salt alone
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def choices(self) -> int:
        """`n`, checked by `check_common`."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds when a request says nothing."""

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0


def check_common(body: CommonFields) -> None:
    """Checks ranges and combinations. Raises ApiError 400."""
    for name, (low, high) in _RANGES.items():
        check_range(name, getattr(body, name), low, high)
    if body.cache_salt == "":
        raise invalid_value("cache_salt", "expected at least one character")
    if body.stream_options is not None and not body.stream:
        raise invalid_value("stream_options", "only allowed when 'stream' is true")


def check_range(name: str, value: float | None, low: float, high: float = float("inf")) -> None:
    """Raises ApiError 400 with OpenAI's code for a value outside [low, high]. null is in every range."""
    if value is None or low <= value <= high:
        return
    kind = "integer" if isinstance(value, int) else "decimal"
    if value < low:
        raise invalid_value(name, f"expected a value >= {low}, but got {value}", f"{kind}_below_min_value")
    raise invalid_value(name, f"expected a value <= {high}, but got {value}", f"{kind}_above_max_value")


def stop_strings(body: CommonFields) -> tuple[str, ...]:
    """Raises ApiError 400."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > _MAX_STOPS:
        raise invalid_value("stop", f"at most {_MAX_STOPS} strings, but got {len(stops)}", "array_above_max_length")
    if not all(stops):
        raise invalid_value("stop", "a stop string may not be empty")
    if any(len(stop) > _MAX_STOP_CHARACTERS for stop in stops):
        message = f"a stop string may have at most {_MAX_STOP_CHARACTERS} characters"
        raise invalid_value("stop", message, "string_above_max_length")
    return tuple(stops)


def logit_bias(body: CommonFields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Pairs of token and bias, by token. Raises ApiError 400 naming the token."""
    given = body.logit_bias or {}
    if len(given) > MAX_BIASES:
        message = f"at most {MAX_BIASES} tokens, but got {len(given)}"
        raise invalid_value("logit_bias", message, "object_above_max_properties")
    pairs: dict[int, float] = {}
    for name, bias in given.items():
        if not (name.isascii() and name.isdecimal() and len(name) < 10) or int(name) >= vocab_size:
            raise invalid_value("logit_bias", f"token ids go from 0 to {vocab_size - 1}, but got {name[:80]!r}")
        if int(name) in pairs:
            raise invalid_value("logit_bias", f"token {int(name)} is given twice")
        check_range(f"logit_bias.{name}", bias, -_MAX_BIAS, _MAX_BIAS)
        pairs[int(name)] = bias
    return tuple(sorted(pairs.items()))


def sampling_params(
    body: CommonFields, defaults: SamplingDefaults, count: int, *, vocab_size: int, logprobs: int | None = None
) -> list[SamplingParams]:
    """Parameters of `count` choices. The first one's seed is the request's; the others count up, to differ from it.

    `logprobs` is how many alternatives each token is reported with; None reports nothing. Raises ApiError 400.
    """
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_p = defaults.top_p if body.top_p is None else body.top_p
    top_k = defaults.top_k if body.top_k is None else body.top_k
    min_p = defaults.min_p if body.min_p is None else body.min_p
    seed = secrets.randbits(64) if body.seed is None else body.seed
    bias = logit_bias(body, vocab_size)
    repetition = 1.0 if body.repetition_penalty is None else body.repetition_penalty
    return [
        SamplingParams(
            temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
            top_p=top_p or 1e-9,  # 0: nothing but the likeliest token
            top_k=max(top_k, 0),
            min_p=min_p,
            seed=(seed + index) % 2**64,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=repetition,
            logit_bias=bias,
            logprobs=logprobs,
        )
        for index in range(count)
    ]

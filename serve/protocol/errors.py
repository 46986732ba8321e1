"""Errors as OpenAI's clients know them."""

from __future__ import annotations

import msgspec

Headers = tuple[tuple[str, str], ...]


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct):
    error: ErrorBody


class ApiError(Exception):
    """What a client gets instead of an answer. `param` names the request's field at fault, `code` is for programs."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorEnvelope(ErrorBody(message, type, param, code))
        self.headers = headers

    def encode(self) -> bytes:
        return msgspec.json.encode(self.body)


def invalid_value(param: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(f"Invalid '{param}': {message}", param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    return ApiError(f"Unsupported '{param}': {message}", param=param, code="unsupported_parameter")


def model_not_found(name: str) -> ApiError:
    return ApiError(f"The model '{name}' does not exist", status=404, param="model", code="model_not_found")


def context_too_long(param: str, prompt_tokens: int, asked: int, max_context: int) -> ApiError:
    return ApiError(
        f"This model's context holds {max_context} tokens, but the prompt has {prompt_tokens}"
        f" and at least {asked} more {'was' if asked == 1 else 'were'} asked for",
        param=param,
        code="context_length_exceeded",
    )


def text_too_long(param: str, characters: int, max_context: int) -> ApiError:
    return ApiError(
        f"This model's context holds {max_context} tokens, too few for a text of {characters} characters",
        param=param,
        code="context_length_exceeded",
    )


def queue_full(retry_after_s: float) -> ApiError:
    return ApiError(
        "Too many requests are waiting; try again later",
        status=429,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers=(("retry-after", str(max(1, round(retry_after_s)))),),
    )


def server_error(message: str, status: int = 500, code: str = "internal_error") -> ApiError:
    return ApiError(message, status=status, type="server_error", code=code)

"""The API key: who may use what."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable

from ..http.message import AnyResponse, Handler, Request
from ..protocol.errors import ApiError


def guarded(handler: Handler, key: str) -> Handler:
    """`handler` for those who send `Authorization: Bearer <key>`; the others get OpenAI's 401."""
    expected = b"Bearer " + key.encode()

    def guard(request: Request) -> AnyResponse | Awaitable[AnyResponse]:
        given = request.header(b"authorization")
        if given is None:
            raise _unauthorized("You didn't provide an API key: send it as 'Authorization: Bearer KEY'", None)
        scheme, _, credentials = given.partition(b" ")
        if not hmac.compare_digest(scheme.title() + b" " + credentials.strip(), expected):
            raise _unauthorized("Incorrect API key provided", "invalid_api_key")
        return handler(request)

    return guard


def _unauthorized(message: str, code: str | None) -> ApiError:
    return ApiError(message, status=401, code=code, headers=(("www-authenticate", "Bearer"),))

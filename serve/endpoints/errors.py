"""From whatever was raised to the response a client gets."""

from __future__ import annotations

import logging

from ..http.message import HttpError, Response
from ..protocol.errors import ApiError, server_error

_LOG = logging.getLogger("serve")

_HTTP_CODES = {
    404: "unknown_url",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    431: "headers_too_large",
    503: "overloaded",
}


def as_api_error(error: Exception) -> ApiError:
    """An error in OpenAI's form. What nobody foresaw is logged, and told to the client without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HttpError):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        code = _HTTP_CODES.get(error.status, "bad_request")
        return ApiError(error.message, status=error.status, type=kind, code=code, headers=error.headers)
    _LOG.error("unexpected error while answering", exc_info=error)
    return server_error("The server had an error while answering")


def render_error(error: Exception) -> Response:
    api_error = as_api_error(error)
    return Response(api_error.status, api_error.encode(), headers=api_error.headers)

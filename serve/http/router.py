"""Which handler answers a method and a path: a table."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from urllib.parse import unquote

from .message import AnyResponse, Handler, HttpError, Request


@dataclass(frozen=True, slots=True)
class Route:
    """`path` is literal; its last part may be a parameter in braces, which takes the whole rest, slashes included."""

    method: str
    path: str
    handler: Handler


class Router:
    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[str, dict[str, Handler]] = {}  # path → method → handler
        self._prefixes: dict[str, tuple[str, dict[str, Handler]]] = {}
        for route in routes:
            prefix, brace, name = route.path.partition("{")
            if brace:
                self._prefixes.setdefault(prefix, (name.rstrip("}"), {}))[1][route.method] = route.handler
            else:
                self._exact.setdefault(route.path, {})[route.method] = route.handler

    def __call__(self, request: Request) -> AnyResponse | Awaitable[AnyResponse]:
        """Answers with the matching handler. HEAD is answered by GET. Raises HttpError 404 or 405."""
        methods = self._match(request)
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allowed = sorted({*methods, "HEAD"} if "GET" in methods else methods)
            message = f"{request.path} does not answer {request.method}, only {', '.join(allowed)}"
            raise HttpError(405, message, headers=(("allow", ", ".join(allowed)),))
        return handler(request)

    def _match(self, request: Request) -> dict[str, Handler]:
        if methods := self._exact.get(request.path):
            request.route = request.path
            return methods
        for prefix, (name, methods) in self._prefixes.items():
            if request.path.startswith(prefix) and len(request.path) > len(prefix):
                request.route = f"{prefix}{{{name}}}"
                request.parameters[name] = unquote(request.path[len(prefix) :])
                return methods
        raise HttpError(404, f"there is nothing at {request.path}")

"""GET endpoints: models, health, metrics, version."""

from __future__ import annotations

from typing import Literal

import msgspec

import north_jax

from ..http.message import Request, Response
from ..metrics import CONTENT_TYPE
from ..protocol.decode import encode
from ..protocol.errors import server_error
from ..protocol.models import Model, ModelList
from .service import Service


class Health(msgspec.Struct, kw_only=True):
    status: Literal["ok"] = "ok"
    queued: int
    running: int
    pages_used: int
    pages_total: int
    warm: bool  # whether everything is compiled that is compiled ahead


def list_models(service: Service, request: Request) -> Response:
    return Response(200, encode(ModelList(data=[_model(service)])))


def get_model(service: Service, request: Request) -> Response:
    service.check_model(request.parameters["model"])
    return Response(200, encode(_model(service)))


def health(service: Service, request: Request) -> Response:
    stats = service.bridge.engine.stats()
    if stats.failure is not None:
        raise server_error(f"The engine has failed: {stats.failure}", status=503, code="unavailable")
    counts = {name: getattr(stats, name) for name in ("queued", "running", "pages_used", "pages_total", "warm")}
    return Response(200, encode(Health(**counts)))


def metrics(service: Service, request: Request) -> Response:
    return Response(200, service.metrics.text(), content_type=CONTENT_TYPE)


def version(service: Service, request: Request) -> Response:
    return Response(200, encode({"version": north_jax.__version__}))


def _model(service: Service) -> Model:
    return Model(id=service.model, created=service.created, max_model_len=service.max_context)

"""Replicas of the server, each an engine on a GPU of its own, behind one address: a Ray Serve application.

    pip install "north-jax[ray]"
    serve run examples.ray_serve.deployment:build server="--model DIR" max_replicas=4

`build` takes the fields of `Arguments`. A gateway reads requests, and a request router (Ray's hook) sends those of one
conversation to one replica, whose cache holds its beginning, until that replica is full. Ray adds and removes replicas
by how many requests run and wait. docs/scaling.md says more.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import shlex
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

import pydantic
import starlette.requests
import starlette.responses
from ray import serve
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from examples.ray_serve.conversation import conversation_key, rank
from serve.endpoints.errors import render_error
from serve.http import sse
from serve.http.limits import Limits
from serve.http.message import Headers, HttpError, Request, Response, StreamResponse
from serve.options import claim_memory, parse_options
from serve.protocol.errors import server_error

if TYPE_CHECKING:
    from serve.engine.engine import JaxEngine

_ATTEMPTS = 3  # at a request, as long as its client has been sent nothing
_GATEWAY_REQUESTS = 4096  # at once; it only passes them on
_LOG = logging.getLogger("ray.serve")


class Arguments(pydantic.BaseModel):
    """What `build` takes.

    Attributes:
      server: arguments of `python -m serve`; host and port are Ray's.
      gpus: of a replica; 0 for one on a CPU.
      cpus: cores that Ray sets aside for a replica.
      min_replicas, max_replicas: between which Ray chooses.
      upscale_delay_s, downscale_delay_s: how long there must be too many or too few requests before it does.
    """

    server: str = ""
    gpus: float = 1
    cpus: float = 1
    min_replicas: int = 1
    max_replicas: int = 1
    upscale_delay_s: float = 30
    downscale_delay_s: float = 600


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A request on its way to a replica, and the key of its conversation."""

    request: Request
    key: str


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """What comes before a response's bytes."""

    status: int
    content_type: str
    headers: Headers
    streamed: bool


class ConversationRouter(RequestRouter):
    """Sends a conversation to one replica, and to the least busy of the others where that is full."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter`: lists in order of preference; Ray takes the shortest queue of a list."""
        call = pending_request.args[0] if pending_request is not None else None
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # wait before asking replicas that are full again
        if call is None or not call.key:
            return [candidate_replicas]
        first, *others = rank(call.key, [(str(replica.replica_id), replica) for replica in candidate_replicas])
        return [[first], others]


class Replica:
    """One engine and all of its endpoints, without a socket."""

    async def __init__(self, arguments: list[str]) -> None:
        begun = time.monotonic()
        self._engine: JaxEngine | None = None
        options = parse_options(arguments)
        claim_memory(options)
        # JAX is imported here, where Ray has said which GPU is this replica's.
        from serve.app import make_router
        from serve.loading import load
        from serve.start import Start

        loaded = load(options, Start(begun))
        self._engine = loaded.engine
        self._service = loaded.service()
        self._router = make_router(self._service)
        self._engine.warm_up()

    async def answer(self, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """A head, then the response's bytes as they come: all at once, or the pieces of a stream."""
        begun, request, response = time.monotonic(), call.request, None
        try:
            response = await self._respond(request)
            streamed = isinstance(response, StreamResponse)
            yield Head(response.status, response.content_type, response.headers, streamed)
            if isinstance(response, StreamResponse):
                async for piece in response.pieces:
                    yield piece
            else:
                yield response.body
        finally:
            if isinstance(response, StreamResponse):
                await response.pieces.aclose()
                response.close()  # also when the client has left: the engine stops then
            status = 499 if response is None else response.status
            self._service.metrics.answered(request.method, request.route, status, time.monotonic() - begun)

    async def _respond(self, request: Request) -> Response | StreamResponse:
        try:
            result = self._router(request)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            return render_error(error)

    def check_health(self) -> None:
        """Ray's question: a replica that raises is replaced."""
        assert self._engine is not None
        failure = self._engine.stats().failure
        if failure is not None:
            raise RuntimeError(f"the engine has failed: {failure}")

    def __del__(self) -> None:
        """Called by Ray when all requests have ended, or have had their time."""
        if self._engine is not None:
            self._engine.shutdown(0.0)


class Gateway:
    """Reads requests, and passes on what a replica answers.

    Where a replica dies, its requests are answered by another one if their clients have been sent nothing; else their
    streams end with an error.
    """

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: starlette.requests.Request) -> starlette.responses.Response:
        try:
            call = await _read(request)
        except HttpError as error:
            response = render_error(error)
            return _starlette(Head(response.status, response.content_type, response.headers, False), response.body)
        items = self._items(call)
        head = await anext(items)
        assert isinstance(head, Head)
        if head.streamed:
            return _starlette(head, items)
        return _starlette(head, b"".join([item async for item in items if isinstance(item, bytes)]))

    async def _items(self, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """What `Replica.answer` gives, of one replica."""
        for _ in range(_ATTEMPTS):
            held: list[Head | bytes] = []
            sent = False
            answer = self._replicas.answer.remote(call)
            try:
                async for item in answer:
                    held.append(item)
                    if sent or len(held) > _items_without_answer(call):
                        for one in held:
                            sent = True
                            yield one
                        held.clear()
                for one in held:
                    yield one
                return
            except (RayActorError, ActorUnavailableError) as error:
                _LOG.warning("a replica is lost while it answers request %s: %s", call.request.id, error)
                if sent:
                    lost = server_error("The replica that answered has been lost", status=503, code="replica_lost")
                    yield sse.event(lost.encode())
                    yield sse.DONE
                    return
            finally:
                answer.cancel()  # where the client has left; what has ended takes no notice
        response = render_error(
            server_error(f"{_ATTEMPTS} replicas were lost while they answered", status=503, code="replica_lost")
        )
        yield Head(response.status, response.content_type, response.headers, False)
        yield response.body


def _items_without_answer(call: Call) -> int:
    """How many items of an answer say nothing of it: the head, and where a chat is streamed the role."""
    return 2 if call.request.path == "/v1/chat/completions" else 1


async def _read(request: starlette.requests.Request) -> Call:
    """Raises HttpError for a body that is too large."""
    most, body = Limits().body_bytes, bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise HttpError(413, f"the body exceeds {most} bytes")
    scope = request.scope
    path = (scope.get("raw_path") or request.url.path.encode()).decode("latin-1").partition("?")[0]
    headers = tuple((name.lower(), value) for name, value in request.headers.raw)
    identity = request.headers.get("x-request-id", "")
    whole = Request(identity, request.method, path, scope["query_string"].decode("latin-1"), headers, bytes(body))
    return Call(whole, conversation_key(whole.body) if request.method == "POST" else "")


def _starlette(head: Head, content: bytes | AsyncIterator[bytes]) -> starlette.responses.Response:
    fields = {"content-type": head.content_type, **dict(head.headers)}
    if isinstance(content, bytes):
        return starlette.responses.Response(content, head.status, fields)
    return starlette.responses.StreamingResponse(content, head.status, fields)


def build(arguments: Arguments) -> serve.Application:
    """The application; `serve run` calls it with the key=value pairs of its command line."""
    command = shlex.split(arguments.server)
    options = parse_options(command)
    autoscaling = AutoscalingConfig(
        min_replicas=arguments.min_replicas,
        max_replicas=arguments.max_replicas,
        target_ongoing_requests=options.slots,
        upscale_delay_s=arguments.upscale_delay_s,
        downscale_delay_s=arguments.downscale_delay_s,
    )
    replicas = serve.deployment(
        Replica,
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
        autoscaling_config=autoscaling,
        # As many again wait at a replica, so that a slot that falls free is taken at once. More wait at the gateway.
        max_ongoing_requests=2 * options.slots,
        request_router_config=RequestRouterConfig(request_router_class=ConversationRouter),
        graceful_shutdown_timeout_s=options.drain_seconds,
        health_check_period_s=5,
    )
    gateway = serve.deployment(
        Gateway,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_GATEWAY_REQUESTS,
        graceful_shutdown_timeout_s=options.drain_seconds,
    )
    return gateway.bind(replicas.bind(command))

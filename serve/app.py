"""The application: the table of routes, and what they need, made from a loaded checkpoint and an engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from north_jax.config import Config
from north_jax.text import ChatTemplate, Marker, Tokenizer

from .chat.render import ChatRenderer
from .endpoints.access import guarded
from .endpoints.chat import create_chat_completion
from .endpoints.completions import create_completion
from .endpoints.service import Service, now
from .endpoints.system import get_model, health, list_models, metrics, version
from .endpoints.tokens import detokenize, tokenize
from .engine.types import Engine
from .generation import EngineBridge
from .grammar.compiler import GrammarCompiler
from .http.message import AnyResponse, Handler, Request
from .http.router import Route, Router
from .metrics import Metrics
from .protocol.generation_config import GenerationConfig
from .protocol.sampling import SamplingDefaults

Endpoint = Callable[[Service, Request], AnyResponse | Awaitable[AnyResponse]]

# Those that an API key guards, and those for whoever watches over the server.
ENDPOINTS: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/v1/chat/completions", create_chat_completion),
    ("POST", "/v1/completions", create_completion),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{model}", get_model),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
)
OPEN_ENDPOINTS: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", "/health", health),
    ("GET", "/version", version),
    ("GET", "/metrics", metrics),
)


def make_router(service: Service) -> Router:
    def handler(endpoint: Endpoint) -> Handler:
        bound = partial(endpoint, service)
        return bound if service.api_key is None else guarded(bound, service.api_key)

    routes = [Route(method, path, handler(endpoint)) for method, path, endpoint in ENDPOINTS]
    routes += [Route(method, path, partial(endpoint, service)) for method, path, endpoint in OPEN_ENDPOINTS]
    return Router(routes)


@dataclass(frozen=True, slots=True)
class TextSide:
    """What a checkpoint directory says about text: tokenizer, chat template, generation defaults."""

    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: SamplingDefaults
    stop_token_ids: frozenset[int]

    @classmethod
    def read(cls, directory: Path) -> TextSide:
        """Raises TokenizerError, TemplateError or GenerationConfigError naming what is wrong."""
        tokenizer = Tokenizer.from_dir(directory)
        generation = GenerationConfig.read(directory / "generation_config.json")
        ends = {tokenizer.marker_ids[Marker.END_OF_TURN], *generation.eos_token_ids}
        if tokenizer.eos_id is not None:
            ends.add(tokenizer.eos_id)
        template = ChatTemplate.from_dir(directory, tokenizer)
        return cls(tokenizer, template, generation.sampling_defaults(), frozenset(ends))


def make_service(
    model: str,
    text: TextSide,
    config: Config,
    engine: Engine,
    *,
    api_key: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Service:
    """Joins the text side with a started engine. Needs a running event loop.

    `defaults` replace those of the checkpoint's sampling parameters that it names.
    Every token that ends an answer does so, wherever the checkpoint names it; the end of a turn always does.
    """
    stop_token_ids = text.stop_token_ids | {*config.eos_token_id}
    watcher = Metrics(engine)
    return Service(
        model=model,
        created=now(),
        tokenizer=text.tokenizer,
        renderer=ChatRenderer(text.template, text.tokenizer),
        grammars=GrammarCompiler(text.tokenizer, config.vocab_size, stop_token_ids),
        bridge=EngineBridge(engine, watcher),
        metrics=watcher,
        api_key=api_key,
        defaults=replace(text.defaults, **(defaults or {})),
        stop_token_ids=stop_token_ids,
        vocab_size=config.vocab_size,
        longest_token=max(len(text.tokenizer.token_bytes(id)) for id in range(text.tokenizer.vocab_size)),
        text_worker=ThreadPoolExecutor(1, "text"),
    )

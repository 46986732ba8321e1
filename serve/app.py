"""The application: the table of routes, and what they need, made from a loaded checkpoint and an engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from north_jax.config import Config
from north_jax.text import ChatTemplate, Marker, Tokenizer
from north_jax.text.tokenizer import read_json_object

from .chat.render import ChatRenderer
from .endpoints.chat import create_chat_completion
from .endpoints.completions import create_completion
from .endpoints.service import Service, now
from .endpoints.system import get_model, health, list_models, version
from .engine.types import Engine
from .generation import EngineBridge
from .http.message import AnyResponse, Request
from .http.router import Route, Router
from .protocol.sampling import SamplingDefaults

Endpoint = Callable[[Service, Request], AnyResponse | Awaitable[AnyResponse]]

ENDPOINTS: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/v1/chat/completions", create_chat_completion),
    ("POST", "/v1/completions", create_completion),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{model}", get_model),
    ("GET", "/health", health),
    ("GET", "/version", version),
)


def make_router(service: Service) -> Router:
    return Router(Route(method, path, partial(endpoint, service)) for method, path, endpoint in ENDPOINTS)


def make_service(model: str, directory: Path, config: Config, engine: Engine) -> Service:
    """Reads the text side of a checkpoint: tokenizer, chat template, generation defaults. Needs a running event loop.

    Raises TokenizerError or TemplateError naming what is wrong.
    """
    tokenizer = Tokenizer.from_dir(directory)
    generation = read_json_object(directory / "generation_config.json")
    return Service(
        model=model,
        created=now(),
        tokenizer=tokenizer,
        renderer=ChatRenderer(ChatTemplate.from_dir(directory, tokenizer), tokenizer),
        bridge=EngineBridge(engine),
        defaults=SamplingDefaults.from_generation_config(generation),
        stop_token_ids=_stop_token_ids(config, tokenizer, generation),
        vocab_size=config.vocab_size,
        text_worker=ThreadPoolExecutor(1, "text"),
    )


def _stop_token_ids(config: Config, tokenizer: Tokenizer, generation: dict[str, Any]) -> frozenset[int]:
    """Every token that ends an answer, wherever the checkpoint says so; the end of a turn always does."""
    ids = {*config.eos_token_id, tokenizer.marker_ids[Marker.END_OF_TURN]}
    if tokenizer.eos_id is not None:
        ids.add(tokenizer.eos_id)
    named = generation.get("eos_token_id")
    ids.update([named] if isinstance(named, int) else named or [])
    return frozenset(ids)

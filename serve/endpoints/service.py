"""What every endpoint needs: the model's name and limits, text tools, the engine."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from north_jax.decoding import Grammar
from north_jax.sampling import SamplingParams
from north_jax.text import Tokenizer

from ..chat.render import ChatRenderer
from ..engine.types import EngineRequest
from ..generation import EngineBridge
from ..grammar.compiler import GrammarCompiler
from ..http.message import HttpError, Request
from ..metrics import Metrics
from ..protocol.errors import context_too_long, model_not_found, text_too_long
from ..protocol.sampling import SamplingDefaults

_NORMALIZED = 3  # characters that a tokenizer's normalizer may make one of


@dataclass(frozen=True, slots=True)
class Service:
    model: str  # the name clients use
    created: int  # Unix time at which the server came up
    tokenizer: Tokenizer
    renderer: ChatRenderer
    grammars: GrammarCompiler
    bridge: EngineBridge
    metrics: Metrics
    api_key: str | None  # None: everybody may ask
    defaults: SamplingDefaults
    stop_token_ids: frozenset[int]
    vocab_size: int  # rows of the embedding: token ids below it can be in a prompt
    longest_token: int  # bytes
    text_worker: Executor  # renders, tokenises, compiles grammars, in one thread off the loop: these are not shared

    @property
    def max_context(self) -> int:
        return self.bridge.engine.max_context

    def check_model(self, name: str) -> None:
        if name != self.model:
            raise model_not_found(name)

    async def in_worker[R](self, function: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self.text_worker, function)

    def check_size(self, characters: int, field: str) -> None:
        """Refuses, before any work on it, a text that cannot fit whatever it says. Raises ApiError naming `field`."""
        tokens = characters // (self.longest_token * _NORMALIZED)
        if tokens >= self.max_context:
            raise text_too_long(field, characters, self.max_context)

    def room(self, prompt: Sequence[int], field: str) -> int:
        """How many tokens can follow a prompt. Raises ApiError naming `field` when there is no room for one."""
        room = self.max_context - len(prompt)
        if room < 1:
            raise context_too_long(field, len(prompt), 1, self.max_context)
        return room

    def engine_request(
        self,
        answer_id: str,
        index: int,
        prompt: tuple[int, ...],
        max_tokens: int,
        sampling: SamplingParams,
        *,
        ignore_eos: bool | None = None,
        grammar: Grammar | None = None,
        prompt_logprobs: bool = False,
        cache_salt: str | None = None,
    ) -> EngineRequest:
        return EngineRequest(
            f"{answer_id}:{index}",
            prompt,
            max_tokens,
            sampling,
            stop_token_ids=frozenset() if ignore_eos else self.stop_token_ids,
            grammar=grammar,
            prompt_logprobs=prompt_logprobs,
            cache_salt=cache_salt or "",
        )


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"


def now() -> int:
    return int(time.time())


def require_json(request: Request) -> None:
    """Refuses a body that says it is something else.

    A browser may send text and forms to any address without asking, but not JSON: this keeps web pages out.
    """
    content_type = request.header(b"content-type")
    if content_type is None or content_type.split(b";")[0].strip().lower() != b"application/json":
        raise HttpError(415, "send a JSON body with the header 'Content-Type: application/json'")

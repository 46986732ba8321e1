"""POST /v1/completions: raw text on, without a chat template."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from north_jax.logprobs import Logprobs
from north_jax.text import Detokenizer, Tokenizer

from ..engine.types import FinishReason
from ..generation import Generation
from ..http import sse
from ..http.message import AnyResponse, Request, Response, StreamResponse
from ..protocol.completions import Completion, CompletionChoice, CompletionRequest, Prompt, parse_completion, prompts
from ..protocol.decode import encode
from ..protocol.errors import context_too_long, invalid_value
from ..protocol.logprobs import LoggedToken, TextLogprobs, text_logprobs
from ..protocol.sampling import sampling_params, stop_strings
from ..protocol.stop import StopMatcher
from ..protocol.usage import Usage
from .errors import as_api_error
from .logged_text import LoggedText
from .service import Service, new_id, now, require_json
from .steps import Step, steps, submit


class Piece(NamedTuple):
    """A piece of a completion's text, and the tokens to be reported with it."""

    text: str
    logged: tuple[LoggedToken, ...] = ()


class TextChoice:
    """A completion's text: markers left out, cut at the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self.tokens = self.cached_tokens = 0
        self._skipped = tokenizer.control
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopMatcher(stops)
        self._logged = LoggedText()

    @property
    def stopped(self) -> bool:
        return self._stop.stopped

    def push(self, token: int, logprobs: Logprobs | None) -> list[Piece]:
        self.tokens += 1
        if token in self._skipped:
            return []
        if logprobs is not None:
            self._logged.note(token, logprobs)
        return self._pieces(self._detokenizer.push(token))

    def end(self, finish: FinishReason) -> list[Piece]:
        pieces = self._pieces(self._detokenizer.flush())
        if text := self._stop.flush():
            pieces.append(Piece(text, self._logged.give(text)))
        if not self.stopped and (rest := self._logged.rest()):
            pieces.append(Piece("", rest))
        return pieces

    def _pieces(self, text: str) -> list[Piece]:
        self._logged.grow(text)
        text = self._stop.push(text)
        return [Piece(text, self._logged.give(text))] if text else []


@dataclass(slots=True)
class _Answer:
    """A request on its way: its prompts' text and tokens, and a choice for each of them n times."""

    service: Service
    request: Request
    body: CompletionRequest
    prompt_tokens: int
    echoes: list[str]  # what each choice's text begins with
    choices: list[TextChoice]
    id: str
    created: int = field(default_factory=now)

    def usage(self) -> Usage:
        cached = sum(choice.cached_tokens for choice in self.choices[:: self.body.choices])  # a prompt counts once
        return Usage.of(self.prompt_tokens, sum(choice.tokens for choice in self.choices), cached=cached)

    def completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self.id, created=self.created, model=self.service.model, choices=choices)


async def create_completion(service: Service, request: Request) -> AnyResponse:
    require_json(request)
    body = parse_completion(request.body)
    service.check_model(body.model)
    stops = stop_strings(body)
    given = prompts(body, service.vocab_size)
    for index, prompt in enumerate(given):
        if isinstance(prompt, str):
            service.check_size(len(prompt), _field(given, index))
    encoded = await service.in_worker(lambda: [_encode(service, prompt) for prompt in given])
    for index, ids in enumerate(encoded):
        _check_room(service, ids, body.token_limit, _field(given, index))

    n = body.choices
    answer = _Answer(
        service=service,
        request=request,
        body=body,
        prompt_tokens=sum(len(ids) for ids in encoded),
        echoes=[_spelled(service, prompt) if body.echo else "" for prompt in given for _ in range(n)],
        choices=[TextChoice(service.tokenizer, stops) for _ in range(len(given) * n)],
        id=new_id("cmpl"),
    )
    generation = _generate(answer, encoded)
    if body.stream:
        return StreamResponse(_stream(answer, generation), generation.close)
    return await _whole(answer, generation)


def _generate(answer: _Answer, encoded: list[tuple[int, ...]]) -> Generation:
    service, n, limit = answer.service, answer.body.choices, answer.body.token_limit
    body = answer.body
    sampling = sampling_params(body, service.defaults, n, vocab_size=service.vocab_size, logprobs=body.logprobs)
    requests = [
        service.engine_request(answer.id, row * n + choice, ids, limit, sampling[choice], ignore_eos=body.ignore_eos)
        for row, ids in enumerate(encoded)
        for choice in range(n)
    ]
    field = "n" if len(encoded) == 1 else "prompt"
    return submit(service.bridge, requests if limit else [], field)  # max_tokens 0 asks for the echo alone


async def _steps(answer: _Answer, generation: Generation) -> AsyncIterator[list[Step[Piece]]]:
    """The echoed prompts, then what is generated."""
    yield [Step(index, [Piece(echo)], None) for index, echo in enumerate(answer.echoes) if echo]
    async for made in steps(generation, answer.choices):
        yield made
    if answer.body.token_limit == 0:
        yield [Step(index, [], FinishReason.LENGTH) for index in range(len(answer.choices))]


async def _whole(answer: _Answer, generation: Generation) -> Response:
    texts: list[list[Piece]] = [[] for _ in answer.choices]
    finishes: list[FinishReason | None] = [None for _ in answer.choices]
    try:
        async for made in _steps(answer, generation):
            for index, deltas, finish in made:
                texts[index] += deltas
                finishes[index] = finish
    finally:
        generation.close()
        answer.request.notes.update(answer.usage().notes())
    completion = answer.completion(
        [
            CompletionChoice(
                index=index,
                text="".join([piece.text for piece in pieces]),
                logprobs=_logprobs(answer, [token for piece in pieces for token in piece.logged]),
                finish_reason=_finish_name(finish),
            )
            for index, (pieces, finish) in enumerate(zip(texts, finishes, strict=True))
        ]
    )
    completion.usage = answer.usage()
    return Response(200, encode(completion))


async def _stream(answer: _Answer, generation: Generation) -> AsyncGenerator[bytes, None]:
    try:
        async for made in _steps(answer, generation):
            yield b"".join([event for step in made for event in _events(answer, step)])
        if answer.body.include_usage:
            last = answer.completion([])
            last.usage = answer.usage()
            yield sse.event(encode(last))
    except Exception as error:
        yield sse.event(as_api_error(error).encode())
    finally:
        answer.request.notes.update(answer.usage().notes())
    yield sse.DONE


def _events(answer: _Answer, step: Step[Piece]) -> Iterator[bytes]:
    """A step as events: one for each delta, the last of which carries the reason why the choice ended."""
    deltas = step.deltas or [Piece("")]
    for number, (text, logged) in enumerate(deltas, start=1):
        finish = _finish_name(step.finish if number == len(deltas) else None)
        logprobs = _logprobs(answer, logged)
        choice = CompletionChoice(index=step.choice, text=text, logprobs=logprobs, finish_reason=finish)
        chunk = answer.completion([choice])
        if answer.body.include_usage:
            chunk.usage = None
        yield sse.event(encode(chunk))


def _logprobs(answer: _Answer, logged: Sequence[LoggedToken]) -> TextLogprobs | None:
    count = answer.body.logprobs
    return None if count is None else text_logprobs(answer.service.tokenizer, logged, count)


def _finish_name(finish: FinishReason | None) -> Literal["stop", "length"] | None:
    return None if finish is None else "length" if finish is FinishReason.LENGTH else "stop"


def _encode(service: Service, prompt: Prompt) -> tuple[int, ...]:
    """Token ids are taken as they are; text is ordinary text (no special token, whatever it spells) after a BOS."""
    if not isinstance(prompt, str):
        return tuple(prompt)
    bos = service.tokenizer.bos_id
    return (*([] if bos is None else [bos]), *service.tokenizer.encode_text(prompt))


def _field(given: list[Prompt], index: int) -> str:
    return "prompt" if len(given) == 1 else f"prompt[{index}]"


def _spelled(service: Service, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else service.tokenizer.decode(prompt)


def _check_room(service: Service, prompt: tuple[int, ...], asked: int, field: str) -> None:
    """OpenAI's rule for this endpoint: a prompt and the tokens asked for must fit into the context together."""
    if not prompt:
        raise invalid_value(field, "an empty prompt needs a model with a BOS token")
    if len(prompt) + asked > service.max_context:
        raise context_too_long(field, len(prompt), asked, service.max_context)

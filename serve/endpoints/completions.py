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


class Echo(NamedTuple):
    """A prompt that is given back with log-probabilities."""

    text: str
    tokens: tuple[int, ...]
    hidden: int  # tokens at its beginning that the client has not given: BOS


class TextChoice:
    """A completion's text: markers left out, cut at the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], echo: Echo | None = None, *, mute: bool) -> None:
        """`echo`: the prompt, where it comes with log-probabilities; `mute`: nothing but the prompt was asked for."""
        self.tokens = self.cached_tokens = 0
        self._tokenizer = tokenizer
        self._echo = echo
        self._mute = mute
        self._skipped = tokenizer.control
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopMatcher(stops)
        self._logged = LoggedText(0 if echo is None else len(echo.text))

    @property
    def stopped(self) -> bool:
        return self._stop.stopped

    def begin(self, prompt: Sequence[Logprobs]) -> list[Piece]:
        assert self._echo is not None
        detokenizer, offset = Detokenizer(self._tokenizer), 0
        logged = []
        for index, token in enumerate(self._echo.tokens):
            if index >= self._echo.hidden:
                logged.append(LoggedToken(token, offset, prompt[index - 1] if index else None))
                offset += len(detokenizer.push(token))
        return [Piece(self._echo.text, tuple(logged))]

    def push(self, token: int, logprobs: Logprobs | None) -> list[Piece]:
        if self._mute:
            return []
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
        # A token is drawn after a prompt that is reported, also where none is asked for.
        _check_room(service, ids, max(body.token_limit, int(body.reports_prompt)), _field(given, index))

    n = body.choices
    answer = _Answer(
        service=service,
        request=request,
        body=body,
        prompt_tokens=sum(len(ids) for ids in encoded),
        echoes=[
            _spelled(service, prompt) if body.echo and not body.reports_prompt else ""
            for prompt in given
            for _ in range(n)
        ],
        choices=[
            TextChoice(service.tokenizer, stops, echo, mute=body.token_limit == 0)
            for echo in _logged_echoes(service, body, given, encoded)
            for _ in range(n)
        ],
        id=new_id("cmpl"),
    )
    generation = _generate(answer, encoded)
    if body.stream:
        return StreamResponse(_stream(answer, generation), generation.close)
    return await _whole(answer, generation)


def _logged_echoes(
    service: Service, body: CompletionRequest, given: list[Prompt], encoded: list[tuple[int, ...]]
) -> list[Echo | None]:
    if not body.reports_prompt:
        return [None] * len(given)
    bos = int(service.tokenizer.bos_id is not None)
    return [
        Echo(_spelled(service, prompt), ids, bos if isinstance(prompt, str) else 0)
        for prompt, ids in zip(given, encoded, strict=True)
    ]


def _generate(answer: _Answer, encoded: list[tuple[int, ...]]) -> Generation:
    service, body, n = answer.service, answer.body, answer.body.choices
    limit = max(body.token_limit, int(body.reports_prompt))
    sampling = sampling_params(body, service.defaults, n, vocab_size=service.vocab_size, logprobs=body.logprobs)
    requests = [
        service.engine_request(
            answer.id,
            row * n + choice,
            ids,
            limit,
            sampling[choice],
            ignore_eos=body.ignore_eos or body.token_limit == 0,
            prompt_logprobs=body.reports_prompt,
            cache_salt=body.cache_salt,
        )
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
    if answer.body.token_limit == 0 and not answer.body.reports_prompt:
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

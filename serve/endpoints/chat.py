"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field

from ..chat.render import Prompt, RenderError
from ..chat.stream import ChatStream
from ..chat.types import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from ..generation import Generation
from ..grammar.compiler import DemandError
from ..grammar.demand import Demand
from ..grammar.gate import Gate
from ..http import sse
from ..http.message import AnyResponse, Request, Response, StreamResponse
from ..protocol.chat import (
    AssistantMessage,
    ChatRequest,
    ToolChoice,
    demand_of,
    parse_chat,
    plain_response_format,
    plain_tool_choice,
)
from ..protocol.chat_response import (
    AnswerDelta,
    AnswerMessage,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    FinishName,
    FunctionCall,
    FunctionDelta,
    MessageChoice,
    MessageToolCall,
    ToolCallDelta,
)
from ..protocol.decode import encode
from ..protocol.errors import ApiError, invalid_value
from ..protocol.logprobs import LoggedToken, chat_logprobs
from ..protocol.sampling import sampling_params, stop_strings
from ..protocol.usage import Usage
from .chat_choice import ChatChoice, LoggedContent
from .errors import as_api_error
from .service import Service, new_id, now, require_json
from .steps import Step, steps, submit


@dataclass(slots=True)
class _Answer:
    """A request on its way."""

    service: Service
    request: Request
    body: ChatRequest
    prompt_tokens: int
    choices: list[ChatChoice]
    id: str
    created: int = field(default_factory=now)

    def usage(self) -> Usage:
        completion = sum(choice.tokens for choice in self.choices)
        reasoning = sum(choice.reasoning_tokens for choice in self.choices)
        return Usage.of(self.prompt_tokens, completion, cached=self.choices[0].cached_tokens, reasoning=reasoning)

    def chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(id=self.id, created=self.created, model=self.service.model, choices=choices)
        if self.body.include_usage:
            chunk.usage = None
        return chunk


async def create_chat_completion(service: Service, request: Request) -> AnyResponse:
    require_json(request)
    body = parse_chat(request.body)
    service.check_model(body.model)
    stops = stop_strings(body)
    demand = demand_of(body)
    n, logprobs = body.choices, body.reported_logprobs
    sampling = sampling_params(body, service.defaults, n, vocab_size=service.vocab_size, logprobs=logprobs)
    service.check_size(_shown_characters(body), "messages")
    prompt, gates = await service.in_worker(lambda: _prepare(service, body, demand))
    room = service.room(prompt.tokens, "messages")
    limit = room if body.token_limit is None else min(body.token_limit, room)  # an upper bound, says OpenAI

    answer = _Answer(
        service=service,
        request=request,
        body=body,
        prompt_tokens=len(prompt.tokens),
        choices=[
            ChatChoice(
                service.tokenizer,
                _new_stream(service, body, prompt),
                stops,
                named_tool=isinstance(body.tool_choice, ToolChoice),
            )
            for _ in range(n)
        ],
        id=new_id("chatcmpl"),
    )
    ids = tuple(prompt.tokens)
    requests = [
        service.engine_request(
            answer.id,
            index,
            ids,
            limit,
            params,
            ignore_eos=body.ignore_eos,
            grammar=gate,
            cache_salt=body.cache_salt,
        )
        for index, (params, gate) in enumerate(zip(sampling, gates, strict=True))
    ]
    generation = submit(service.bridge, requests, "n")
    if body.stream:
        return StreamResponse(_stream(answer, generation), generation.close)
    return await _whole(answer, generation)


def _shown_characters(body: ChatRequest) -> int:
    """Characters that are part of the prompt for certain: a template may leave out reasoning or tools."""
    texts = [message.content for message in body.messages if not isinstance(message, AssistantMessage)]
    return sum(len(text) if isinstance(text, str) else sum(len(part.text) for part in text) for text in texts)


def _prepare(service: Service, body: ChatRequest, demand: Demand) -> tuple[Prompt, Sequence[Gate | None]]:
    """The prompt, and for each choice the grammar that it follows. Raises ApiError 400."""
    try:
        prompt = service.renderer.render(
            body.plain_messages,
            body.plain_tools,
            tool_choice=plain_tool_choice(body),
            reasoning=body.reasoning_switch,
            reasoning_effort=body.reasoning_effort,
            response_format=plain_response_format(body),
        )
        if not demand.asks:
            return prompt, [None] * body.choices
        return prompt, service.grammars.gates(demand, body.choices, thinking=prompt.starts_in_thinking)
    except RenderError as error:
        raise ApiError(str(error), param=error.param, code="invalid_value") from None
    except DemandError as error:
        raise invalid_value(error.field, str(error), "invalid_json_schema") from None


def _new_stream(service: Service, body: ChatRequest, prompt: Prompt) -> ChatStream:
    return ChatStream(
        starts_in_thinking=prompt.starts_in_thinking,
        tools_allowed=body.may_call_tools,
        special=service.tokenizer.control,
    )


async def _whole(answer: _Answer, generation: Generation) -> Response:
    collected = [_Collected() for _ in answer.choices]
    try:
        async for made in steps(generation, answer.choices):
            for index, deltas, finish in made:
                collected[index].add(deltas)
                if finish is not None:
                    collected[index].finish = answer.choices[index].finish_name(finish)
    finally:
        generation.close()
        answer.request.notes.update(answer.usage().notes())
    completion = ChatCompletion(
        id=answer.id,
        created=answer.created,
        model=answer.service.model,
        choices=[one.choice(answer, index) for index, one in enumerate(collected)],
        usage=answer.usage(),
    )
    return Response(200, encode(completion))


class _Collected:
    """The deltas of one choice, put together."""

    def __init__(self) -> None:
        self.finish: FinishName = "stop"
        self._content: list[str] = []
        self._logged: list[LoggedToken] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallStart, list[str]]] = []

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, Content):
                self._content.append(delta.text)
                if isinstance(delta, LoggedContent):
                    self._logged += delta.logged
            elif isinstance(delta, Reasoning):
                self._reasoning.append(delta.text)
            elif isinstance(delta, ToolCallStart):
                self._calls.append((delta, []))
            elif isinstance(delta, ToolCallArguments):
                self._calls[delta.index][1].append(delta.fragment)

    def choice(self, answer: _Answer, index: int) -> MessageChoice:
        message = AnswerMessage(content="".join(self._content))
        if self._reasoning:
            message.reasoning_content = "".join(self._reasoning)
        if self._calls:
            message.content = message.content or None
            message.tool_calls = [
                MessageToolCall(start.id, FunctionCall(start.name, "".join(fragments)))
                for start, fragments in self._calls
            ]
        logprobs = chat_logprobs(answer.service.tokenizer, self._logged) if answer.body.logprobs else None
        return MessageChoice(index=index, message=message, logprobs=logprobs, finish_reason=self.finish)


async def _stream(answer: _Answer, generation: Generation) -> AsyncGenerator[bytes, None]:
    first = AnswerDelta(role="assistant", content="")
    yield b"".join([_event(answer, ChunkChoice(index, first)) for index in range(len(answer.choices))])
    try:
        async for made in steps(generation, answer.choices):
            yield b"".join([_event(answer, choice) for step in made for choice in _chunk_choices(answer, step)])
        if answer.body.include_usage:
            last = answer.chunk([])
            last.usage = answer.usage()
            yield sse.event(encode(last))
    except Exception as error:
        yield sse.event(as_api_error(error).encode())
    finally:
        answer.request.notes.update(answer.usage().notes())
    yield sse.DONE


def _event(answer: _Answer, choice: ChunkChoice) -> bytes:
    return sse.event(encode(answer.chunk([choice])))


def _chunk_choices(answer: _Answer, step: Step[Delta]) -> Iterator[ChunkChoice]:
    for delta in step.deltas:
        if (answered := _answer_delta(delta)) is not None:
            logged = delta.logged if isinstance(delta, LoggedContent) else ()
            logprobs = chat_logprobs(answer.service.tokenizer, logged) if logged else None
            yield ChunkChoice(step.choice, answered, logprobs)
    if step.finish is not None:
        name = answer.choices[step.choice].finish_name(step.finish)
        yield ChunkChoice(step.choice, AnswerDelta(), finish_reason=name)


def _answer_delta(delta: Delta) -> AnswerDelta | None:
    """None for what has no counterpart in OpenAI's stream."""
    if isinstance(delta, Content):
        return AnswerDelta(content=delta.text)
    if isinstance(delta, Reasoning):
        return AnswerDelta(reasoning_content=delta.text)
    if isinstance(delta, ToolCallStart):
        function = FunctionDelta(delta.name, "")
        return AnswerDelta(tool_calls=[ToolCallDelta(delta.index, delta.id, "function", function)])
    if isinstance(delta, ToolCallArguments):
        return AnswerDelta(tool_calls=[ToolCallDelta(delta.index, function=FunctionDelta(arguments=delta.fragment))])
    return None

"""An OpenAI-compatible endpoint as a benchmark uses it: streamed completions with the times of their tokens."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from .http import Address, Exchange, HttpError, fetch
from .workload import Request

_END = b"\n\n"


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODE = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Answer:
    """What became of a request.

    Attributes:
      request: what was asked.
      sent: when, on time.perf_counter's clock, as all times.
      times: when each event with a token came.
      ended: when the stream ended.
      prompt_tokens, completion_tokens, cached_tokens: as the endpoint counts them; cached_tokens None where it does
        not. Without a count the events count.
      finish: why it ended, as the endpoint says.
      error: what went wrong, "" for nothing.
      left: whether the client left before the end, as it was told to.
      text: what was said.
      tokens, margins: where log-probabilities were asked for, each token's text, and by how much the likeliest token
        led the second one.
    """

    request: Request
    sent: float
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish: str = ""
    error: str = ""
    left: bool = False
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go.

    Attributes:
      address: of the server; of the first, where several replicas share the requests.
      model: its name there.
      key: an API key, if it wants one.
      extras: whether it takes `ignore_eos` and `cache_salt`, beside OpenAI's fields, as this server and vLLM do.
      timeout_s: for one answer.
      others: the other replicas' addresses. A request goes to the one that has the fewest at that time.
      running: requests on their way, by address.
    """

    address: Address
    model: str
    key: str | None = None
    extras: bool = True
    timeout_s: float = 600.0
    others: tuple[Address, ...] = ()
    running: Counter[Address] = field(default_factory=Counter)

    @classmethod
    async def find(cls, *urls: str, model: str | None = None, key: str | None = None, extras: bool = True) -> Endpoint:
        """Asks the first of some replicas for its model. Raises OSError or ValueError where there is none."""
        address, *others = map(Address.of, urls)
        if model is None:
            status, body = await fetch(address, "/v1/models", key=key)
            if status != 200:
                raise HttpError(f"/v1/models: status {status}")
            model = msgspec.json.decode(body)["data"][0]["id"]
        return cls(address, model, key, extras, others=tuple(others))

    def replicas(self) -> list[Endpoint]:
        """Each of them by itself."""
        return [replace(self, address=address, others=()) for address in (self.address, *self.others)]

    async def get(self, target: str) -> bytes | None:
        """The body at a path, None where the endpoint has nothing there."""
        status, body = await fetch(self.address, target, key=self.key)
        return body if status == 200 else None

    def body(self, request: Request) -> bytes:
        """The completion request as JSON."""
        fields: dict[str, Any] = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.extras:
            fields["ignore_eos"] = True
            fields |= {"cache_salt": request.salt} if request.salt else {}
        if request.logprobs is not None:
            fields["logprobs"] = request.logprobs
        return msgspec.json.encode(fields)

    async def ask(self, request: Request, watched: dict[int, Answer] | None = None) -> Answer:
        """Streams one completion; what goes wrong is in the answer. It grows in `watched`, by the request's number."""
        answer = Answer(request, time.perf_counter())
        if watched is not None:
            watched[request.number] = answer
        address = min((self.address, *self.others), key=lambda one: self.running[one])
        self.running[address] += 1
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._stream(answer, address)
        except TimeoutError:
            answer.error = f"no end within {self.timeout_s:g} s"
        except (OSError, msgspec.MsgspecError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        finally:
            self.running[address] -= 1
        answer.ended = time.perf_counter()
        answer.completion_tokens = answer.completion_tokens or len(answer.times)
        if not (answer.error or answer.left or answer.finish):
            answer.error = "the stream ended without a reason"
        return answer

    async def _stream(self, answer: Answer, address: Address) -> None:
        leave = answer.request.leave_after
        async with Exchange(address, "POST", "/v1/completions", self.body(answer.request), self.key) as response:
            data, texts = b"", []
            async for piece in response.pieces():
                now = time.perf_counter()
                data += piece
                if response.status != 200:
                    continue
                *events, data = data.replace(b"\r\n", b"\n").split(_END)
                for event in events:
                    if event.startswith(b"data: {"):
                        texts.append(_take(answer, _DECODE(event[6:]), now))
                if leave is not None and len(answer.times) >= leave:
                    answer.left = True
                    break
            answer.text = "".join(texts)
            if response.status != 200:
                answer.error = f"status {response.status}: {data[:300].decode(errors='replace')}"


def _take(answer: Answer, event: _Event, now: float) -> str:
    """Notes an event; gives its text."""
    if event.error is not None:
        answer.error = str(event.error)[:300]
    if event.usage is not None:
        answer.prompt_tokens = event.usage.prompt_tokens
        answer.completion_tokens = event.usage.completion_tokens
        details = event.usage.prompt_tokens_details
        answer.cached_tokens = answer.cached_tokens if details is None else details.cached_tokens
    text = ""
    for choice in event.choices:
        text += choice.text
        answer.finish = choice.finish_reason or answer.finish
        answer.times.append(now)
        if choice.logprobs is not None:
            answer.tokens += choice.logprobs.tokens
            answer.margins += [_margin(top) for top in choice.logprobs.top_logprobs or ()]
    return text


def _margin(top: dict[str, float] | None) -> float:
    """By how much the likeliest token leads the second; infinite where only one is known."""
    best = sorted((top or {}).values(), reverse=True)[:2]
    return best[0] - best[1] if len(best) == 2 else float("inf")

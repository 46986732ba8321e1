"""POST /tokenize and /detokenize: the tokens a prompt has, and the text that tokens stand for."""

from __future__ import annotations

import msgspec

from ..chat.render import RenderError
from ..http.message import Request, Response
from ..protocol.decode import encode
from ..protocol.errors import ApiError
from ..protocol.tokens import TokenizeRequest, parse_detokenize, parse_tokenize
from .service import Service, require_json


class Tokenized(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | msgspec.UnsetType = msgspec.UNSET


async def tokenize(service: Service, request: Request) -> Response:
    require_json(request)
    body = parse_tokenize(request.body)
    if body.model is not None:
        service.check_model(body.model)
    tokens = await service.in_worker(lambda: _tokens(service, body))
    answer = Tokenized(count=len(tokens), max_model_len=service.max_context, tokens=tokens)
    if body.return_token_strs:
        answer.token_strs = [service.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
    return Response(200, encode(answer))


async def detokenize(service: Service, request: Request) -> Response:
    require_json(request)
    body = parse_detokenize(request.body, service.vocab_size)
    if body.model is not None:
        service.check_model(body.model)
    text = await service.in_worker(lambda: service.tokenizer.decode(body.tokens))
    return Response(200, encode({"prompt": text}))


def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        bos = service.tokenizer.bos_id
        begin = [] if bos is None or body.add_special_tokens is False else [bos]
        return begin + service.tokenizer.encode_text(body.prompt)
    try:
        return service.renderer.render(
            body.plain_messages,
            body.plain_tools,
            reasoning=body.reasoning_switch,
            reasoning_effort=body.reasoning_effort,
        ).tokens
    except RenderError as error:
        raise ApiError(str(error), param=error.param, code="invalid_value") from None

"""Failures as the openai package's exceptions."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from north_jax.text import Tokenizer
from serve.engine.types import TokenEvent
from serve.http.limits import Limits
from tests.serve.api.conftest import ServeScript, Speak
from tests.serve.http_harness import RawClient
from tests.serve.server_thread import MODEL, RunningServer

USER: Any = [{"role": "user", "content": "Hi"}]
TEXT = "<|END_THINKING|><|START_TEXT|>one two three"


def ask(server: RunningServer, **settings: Any) -> Any:
    settings = {"model": MODEL, "messages": USER} | settings
    return server.client.chat.completions.create(**settings)


def test_unknown_models(serve_script: ServeScript) -> None:
    client = serve_script(TEXT).client
    for call in (
        lambda: client.chat.completions.create(model="other", messages=USER),
        lambda: client.completions.create(model="other", prompt="x"),
        lambda: client.models.retrieve("other"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_bad_requests_name_the_parameter(serve_script: ServeScript) -> None:
    server = serve_script(TEXT)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, temperature=3)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, extra_body={"colour": "red"})
    assert (caught.value.param, caught.value.code) == ("colour", "unknown_parameter")
    assert server.engine.requests == []


def test_a_history_that_the_template_cannot_show(serve_script: ServeScript) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(serve_script(TEXT), messages=[{"role": "tool", "tool_call_id": "call_9", "content": "x"}])
    assert caught.value.param == "messages[0].tool_call_id"


def test_only_json_is_taken(serve_script: ServeScript) -> None:
    """A web page can make a browser post text and forms to a local address, but not JSON."""
    server = serve_script(TEXT)
    body = json.dumps({"model": MODEL, "messages": USER}).encode()
    with RawClient(server.connect()) as client:
        for content_type, status in (
            (b"", 415),
            (b"content-type: text/plain\r\n", 415),
            (b"content-type: application/x-www-form-urlencoded\r\n", 415),
            (b"content-type: application/JSON; charset=utf-8\r\n", 200),
        ):
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + content_type
            response = client.exchange(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert response.status == status


def test_a_full_queue_is_429_with_the_time_to_wait(serve_script: ServeScript) -> None:
    server = serve_script(TEXT, max_queue=2, gated=True)
    streams = [ask(server, stream=True) for _ in range(2)]
    with pytest.raises(openai.RateLimitError) as caught:
        ask(server)
    assert caught.value.response.headers["retry-after"] == "2"
    assert caught.value.code == "rate_limit_exceeded"
    for stream in streams:
        stream.close()


def test_a_queue_that_fills_up_among_choices_keeps_none_of_them(serve_script: ServeScript) -> None:
    server = serve_script(TEXT, max_queue=3, gated=True)
    with ask(server, n=2, stream=True):
        with pytest.raises(openai.RateLimitError):
            ask(server, n=2)
        server.engine.wait_for_cancelled(1)
    server.engine.wait_until_idle()


def test_more_choices_than_there_can_ever_be_room_for_are_no_matter_of_waiting(serve_script: ServeScript) -> None:
    server = serve_script(TEXT, max_queue=2)
    with pytest.raises(openai.BadRequestError, match="at most 2 choices at once, not 3") as caught:
        ask(server, n=3)
    assert caught.value.param == "n"
    for prompt, param in ((["a", "b", "c"], "prompt"), ("a", "n")):
        with pytest.raises(openai.BadRequestError) as caught:
            server.client.completions.create(model=MODEL, prompt=prompt, n=3)
        assert caught.value.param == param
    assert server.engine.requests == []


def test_a_text_that_cannot_fit_is_refused_before_any_work_on_it(
    serve_script: ServeScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding megabytes takes many seconds, in which everybody else's prompt would wait."""
    server = serve_script(TEXT, max_context=100)
    monkeypatch.setattr(Tokenizer, "encode_text", lambda *_: pytest.fail("the text was encoded"))
    text = "a" * 1_000_000
    for content in (text, [{"type": "text", "text": text[:500_000]}, {"type": "text", "text": text[500_000:]}]):
        with pytest.raises(openai.BadRequestError, match="a text of 1000000 characters") as caught:
            ask(server, messages=[{"role": "user", "content": content}])
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.completions.create(model=MODEL, prompt=["", text])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt[1]")


def test_an_engine_failure_is_a_500(serve_script: ServeScript, speak: Speak) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        ask(serve_script([*speak(TEXT), RuntimeError("device lost")]))
    assert caught.value.type == "server_error"
    assert "device lost" in caught.value.message


def test_an_engine_failure_ends_a_stream_with_an_error(serve_script: ServeScript, speak: Speak) -> None:
    stream = ask(serve_script([*speak(TEXT), RuntimeError("device lost")]), stream=True)
    received = ""
    with pytest.raises(openai.APIError, match="device lost"):
        for chunk in stream:
            received += chunk.choices[0].delta.content or ""
    assert received == "one two three"


def test_an_engine_failure_ends_the_other_choices(serve_script: ServeScript, speak: Speak) -> None:
    def script(request: Any) -> list[Any]:
        return [RuntimeError("device lost")] if request.sampling.seed == 1 else speak(TEXT) * 100

    server = serve_script(script, step_seconds=0.001)
    with pytest.raises(openai.InternalServerError):
        ask(server, n=3, seed=0)
    server.engine.wait_for_cancelled(2)


def test_an_unexpected_failure_is_a_500_without_details(
    serve_script: ServeScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve_script(TEXT)
    monkeypatch.setattr(server.engine, "submit", lambda request, deliver: 1 / 0)
    with pytest.raises(openai.InternalServerError) as caught:
        ask(server)
    assert "division" not in caught.value.message


def test_a_body_over_the_limit(serve_script: ServeScript) -> None:
    server = serve_script(TEXT, limits=Limits(body_bytes=10_000))
    with pytest.raises(openai.APIStatusError) as caught:
        ask(server, messages=[{"role": "user", "content": "x" * 20_000}])
    assert caught.value.status_code == 413


def test_models_health_and_version(serve_script: ServeScript) -> None:
    server = serve_script(TEXT, gated=True, max_context=1234)
    model: Any
    [model] = server.client.models.list()
    assert model.id == MODEL
    assert model.object == "model"
    assert server.client.models.retrieve(MODEL) == model
    assert model.max_model_len == 1234
    with RawClient(server.connect()) as client, ask(server, stream=True):
        health = json.loads(client.exchange(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").body)
        assert (health["status"], health["running"]) == ("ok", 1)
        assert json.loads(client.exchange(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n").body)["version"]


def test_a_late_token_after_the_end_is_harmless(serve_script: ServeScript, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may have a token under way when a request is cancelled."""
    server = serve_script(TEXT + " four" * 100, step_seconds=0.001)
    delivers: list[Any] = []
    submit = server.engine.submit

    def listening_submit(request: Any, deliver: Any) -> None:
        delivers.append(deliver)
        submit(request, deliver)

    monkeypatch.setattr(server.engine, "submit", listening_submit)
    assert ask(server, stop="two").choices[0].message.content == "one "
    delivers[0](TokenEvent(5, None))
    assert ask(server, stop="two").choices[0].message.content == "one "

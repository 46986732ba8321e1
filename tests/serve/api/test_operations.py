"""What whoever runs the server uses: metrics, access log, API key, tokens of a text."""

from __future__ import annotations

import logging
import re
import time
import urllib.request
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from north_jax.text import Tokenizer
from tests.serve.api.conftest import ServeScript
from tests.serve.api.test_chat import HELLO, USER, ask, stream
from tests.serve.api.test_completions import complete
from tests.serve.server_thread import MODEL, RunningServer


def figures(server: RunningServer) -> dict[str, float]:
    """name{label="value",…} → value."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as response:
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = response.read().decode()
    return {
        sample.name + "".join(f"[{value}]" for key, value in sample.labels.items() if key != "le"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("le") in (None, "+Inf")
    }


def test_metrics(serve_script: ServeScript) -> None:
    server = serve_script(HELLO, cached_tokens=7)
    tokens = ask(server).usage.completion_tokens
    stream(server)
    with pytest.raises(openai.BadRequestError):
        ask(server, temperature=3)
    with pytest.raises(openai.NotFoundError):
        server.client.get("/nothing/like/it", cast_to=object)
    found = figures(server)
    assert found["north_time_to_first_token_seconds_count"] == 2
    assert found["north_inter_token_seconds_count"] == 2 * (tokens - 1)
    assert found["north_choices_total[stop]"] == 2
    assert found["north_http_requests_total[POST][/v1/chat/completions][200]"] == 2
    assert found["north_http_requests_total[POST][/v1/chat/completions][400]"] == 1
    assert found["north_http_requests_total[other][none][404]"] == 1
    assert found["north_http_request_seconds_count[/v1/chat/completions]"] == 3
    assert found["north_requests_running"] == found["north_requests_queued"] == 0
    assert found["north_engine_up"] == 1
    for name in ("north_kv_pages[used]", "north_prompt_tokens_total[cache]", "north_preemptions_total"):
        assert name in found


def test_metrics_count_who_left(serve_script: ServeScript) -> None:
    server = serve_script(HELLO, gated=True)
    with server.client.chat.completions.create(model=MODEL, messages=USER, stream=True):
        server.engine.step(2)
    server.engine.wait_for_cancelled()
    assert figures(server)["north_choices_total[cancelled]"] == 1


def test_an_access_log_line_says_who_what_and_how_much(
    serve_script: ServeScript, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve_script(HELLO, cached_tokens=3)
    with caplog.at_level(logging.INFO, "serve.access"):
        raw = server.client.chat.completions.with_raw_response.create(model=MODEL, messages=USER)
        stream(server)
        with pytest.raises(openai.BadRequestError):
            ask(server, temperature=3)
        deadline = time.monotonic() + 5
        while len(caplog.records) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = [dict(pair.split("=", 1) for pair in record.getMessage().split(" ")) for record in caplog.records]
    assert [line["status"] for line in lines] == ["200", "200", "400"]
    assert lines[0]["id"] == raw.headers["x-request-id"]
    usage = raw.parse().usage
    for line in lines[:2]:
        assert (line["method"], line["path"], line["client"]) == ("POST", "/v1/chat/completions", "127.0.0.1")
        assert line["prompt"] == str(usage.prompt_tokens) and line["cached"] == "3"
        assert line["completion"] == str(usage.completion_tokens)
        assert re.fullmatch(r"\d+\.\d", line["ms"])


def test_an_api_key(serve_script: ServeScript) -> None:
    server = serve_script(HELLO, api_key="secret")
    good = openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="x", max_retries=0, default_headers={"Authorization": "bearer secret"}
    )
    for wrong, code in (({"Authorization": "Bearer other"}, "invalid_api_key"), ({"Authorization": "secret"}, None)):
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, default_headers=wrong)
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code in (code, "invalid_api_key")
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/models", "/v1/models/scripted"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(server.url + path, timeout=10)
    for path in ("/health", "/version", "/metrics"):
        assert urllib.request.urlopen(server.url + path, timeout=10).status == 200
    assert server.engine.requests == []
    assert good.models.list().data[0].id == MODEL


def test_tokens_of_a_text_and_back(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    server = serve_script(HELLO)
    text = "def f(): return '😀 <|START_TEXT|>'"
    answer = post(server, "/tokenize", {"prompt": text, "return_token_strs": True})
    expected = tokenizer.encode_text(text)
    assert answer["tokens"] == [tokenizer.bos_id, *expected]
    assert (answer["count"], answer["max_model_len"]) == (len(expected) + 1, 4096)
    assert len(answer["token_strs"]) == answer["count"]
    plain = post(server, "/tokenize", {"prompt": text, "add_special_tokens": False, "model": MODEL})
    assert plain["tokens"] == expected and "token_strs" not in plain
    assert post(server, "/detokenize", {"tokens": expected}) == {"prompt": text}


def test_tokens_of_a_conversation_are_those_of_a_completion(serve_script: ServeScript) -> None:
    server = serve_script(HELLO)
    settings: Any = {"messages": USER, "reasoning_effort": "none"}
    ask(server, **settings)
    assert tuple(post(server, "/tokenize", settings)["tokens"]) == server.engine.requests[0].prompt


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
        ("/tokenize", {"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "x", "colour": 1}, "colour"),
        ("/detokenize", {"tokens": [5, 640]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_wrong_requests_for_tokens(serve_script: ServeScript, path: str, body: Any, param: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        post(serve_script(HELLO), path, body)
    assert caught.value.param == param


def test_defaults_of_the_command_line_come_before_the_checkpoint_s(serve_script: ServeScript) -> None:
    server = serve_script(HELLO, defaults={"temperature": 0.25, "top_k": 9})
    complete(server, "x")
    complete(server, "x", temperature=1)
    first, second = (request.sampling for request in server.engine.requests)
    assert (first.temperature, first.top_k, first.top_p) == (0.25, 9, 0.95)
    assert (second.temperature, second.top_k) == (1, 9)


def post(server: RunningServer, path: str, body: Any) -> Any:
    return server.client.with_options(base_url=server.url).post(path, body=body, cast_to=object)

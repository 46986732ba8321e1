"""The benchmark's client: HTTP in any cuts, requests from a seed, figures from answers."""

from __future__ import annotations

import asyncio
import random
import xml.etree.ElementTree
from itertools import islice

import numpy as np
import pytest

from north_jax.bench.serving import figures, soak
from north_jax.bench.serving.endpoint import Answer
from north_jax.bench.serving.http import Address, Chunks, HttpError, fetch
from north_jax.bench.serving.plot import svg
from north_jax.bench.serving.spent import spent
from north_jax.bench.serving.workload import Lengths, Mix, Prompts, Request, arrivals, endless, requests

MIX = Mix(Lengths(20, 60), Lengths(5, 9))
PROMPTS = Prompts(1000)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", Address("127.0.0.1", 8000, "")),
        ("http://127.0.0.1:8000/v1/", Address("127.0.0.1", 8000, "")),
        ("https://models.example/openai/v1", Address("models.example", 443, "/openai", True)),
    ],
)
def test_addresses(url: str, address: Address) -> None:
    assert Address.of(url) == address
    with pytest.raises(ValueError, match="expected http"):
        Address.of("127.0.0.1:8000")


def test_chunked_bodies_come_out_of_any_cuts() -> None:
    rng = random.Random(0)
    parts = [rng.randbytes(rng.randrange(1, 300)) for _ in range(50)]
    wire = b"".join(b"%x;note\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    for _ in range(20):
        chunks, out, data = Chunks(), b"", wire
        while data:
            cut = rng.randrange(1, 400)
            out += chunks.feed(data[:cut])
            data = data[cut:]
        assert out == b"".join(parts) and chunks.over
    with pytest.raises(HttpError, match="size"):
        Chunks().feed(b"xyz\r\n")


def test_a_server_that_leaves_is_an_error() -> None:
    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab")
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(rude, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(HttpError, match="middle"):
            await fetch(Address("127.0.0.1", port, ""), "/")
        server.close()

    asyncio.run(main())


def test_requests_are_those_of_their_seed_and_share_nothing() -> None:
    some = requests(MIX, PROMPTS, 20, seed=3)
    assert some == requests(MIX, PROMPTS, 20, seed=3) == list(islice(endless(MIX, PROMPTS, seed=3), 20))
    assert some != requests(MIX, PROMPTS, 20, seed=4)
    assert len({tuple(request.prompt[:8]) for request in some}) == 20
    assert all(20 <= len(request.prompt) <= 60 and 5 <= request.max_tokens <= 9 for request in some)
    assert all(100 <= id < 900 for request in some for id in request.prompt)
    assert len({request.max_tokens for request in some}) > 2


def test_a_share_of_the_prompt_can_be_the_same() -> None:
    alike = requests(Mix(Lengths(40, 40), Lengths(1, 1), prefix_share=0.5), PROMPTS, 5, seed=0)
    assert len({tuple(request.prompt[:20]) for request in alike}) == 1
    assert len({tuple(request.prompt[20:]) for request in alike}) == 5
    words = requests(MIX, Prompts(1000, text=True), 1, seed=0)[0].prompt
    assert isinstance(words, str) and 20 <= len(words.split()) <= 60


def test_arrivals_are_those_of_a_poisson_process() -> None:
    times = arrivals(4000, 8.0, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0 and times == arrivals(4000, 8.0, seed=1)
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.06)


@pytest.mark.parametrize("text", ["", "0", "9-3", "a", "3-", "-3"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="length"):
        Lengths.parse(text)


def answer(sent: float, times: list[float], **fields: object) -> Answer:
    made = Answer(Request(0, [1], 10), sent, times=times, ended=times[-1] if times else sent, prompt_tokens=100)
    made.completion_tokens = len(times)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_figures_are_those_of_the_times() -> None:
    answers = [
        answer(0.0, [1.0, 1.5, 2.0], cached_tokens=50),
        answer(1.0, [3.0, 5.0], cached_tokens=0),
        answer(0.5, [], error="status 500"),
    ]
    row = figures.figures(answers)
    assert (row["requests"], row["errors"], row["wall_s"], row["output_tokens"]) == (3, 1, 5.0, 5)
    assert row["output_tok_s"] == 1.0
    assert row["decode_tok_s"] == 1.2  # of 2 and ½ tokens a second, rounded
    assert row["ttft_ms"]["mean"] == 1500 and row["inter_token_ms"]["max"] == 2000
    assert row["prefix_hit_rate"] == 0.25
    assert figures.figures([answers[2]]) == {"requests": 1, "errors": 1, "left": 0}
    assert figures.gaps(answers, 1.6, 2.5) == [500.0]
    assert figures.tokens_between(answers, 1.5, 3.0) == 2
    assert "| x | 3 | 1 | 5.0 | 1.0 |" in figures.table([row | {"scenario": "x"}])


def test_pictures_are_svg() -> None:
    for answers in ([], [answer(0.0, [1.0, 1.5, 2.0]), answer(0.2, [0.3])]):
        root = xml.etree.ElementTree.fromstring(svg("a < b", answers))
        assert root.tag.endswith("svg")


def test_where_answers_part() -> None:
    one = answer(0, [1.0], tokens=["a", "b", "c"], margins=[1.0, 0.02, 3.0])
    assert soak.parted(one, one) is None
    other = answer(0, [1.0], tokens=["a", "x", "y"], margins=[1.0, 0.5, 3.0])
    assert soak.parted(one, other) == (1, 0.02)
    assert soak.parted(one, answer(0, [1.0], tokens=["a", "b"], margins=[1.0, 0.5])) == (2, float("inf"))


def test_leaks_are_named() -> None:
    clean = {"north_requests_running": 0.0, "north_engine_up": 1.0, 'north_choices_total{reason="error"}': 2.0}
    assert soak.leaks(clean, clean)["leaks"] == []
    worse = {'north_kv_pages{state="used"}': 3.0, "north_engine_up": 0.0, 'north_choices_total{reason="error"}': 4.0}
    worse['north_http_requests_total{method="POST",route="/",status="500"}'] = 1.0
    assert len(soak.leaks(clean, worse)["leaks"]) == 4


def test_where_a_server_s_time_went() -> None:
    before = {
        'north_engine_seconds_total{part="prefill"}': 1.0,
        'north_engine_seconds_total{part="decode"}': 2.0,
        'north_prefill_chunks_total{tokens="1024"}': 3.0,
        'north_prompt_tokens_total{source="computed"}': 3000.0,
        "north_generated_tokens_total": 50.0,
        "north_time_to_first_token_seconds_count": 3.0,
    }
    grown = {
        'north_engine_seconds_total{part="prefill"}': 1.5,
        'north_engine_seconds_total{part="decode"}': 4.0,
        'north_prefill_chunks_total{tokens="64"}': 2.0,
        'north_prompt_tokens_total{source="computed"}': 3096.0,
        "north_generated_tokens_total": 154.0,
        "north_time_to_first_token_seconds_count": 7.0,
    }
    assert spent(before, before | grown) == {
        "engine_s": {"prefill": 0.5, "decode": 2.0},
        "chunks": {"64": 2},
        "padding": 0.25,
        "decode_only_tok_s": 50.0,
    }
    assert spent({}, {"vllm:something": 1.0}) == {}

"""Requests that must be refused: oversize, malformed, ambiguous. The client always gets to read the reason."""

import json
import time

import pytest

from serve.http.limits import Limits
from serve.http.router import Router
from tests.serve.http.conftest import ROUTES
from tests.serve.http_harness import Harness, RawClient, http_server

HOST = b"host: localhost\r\n"
POST = b"POST /echo HTTP/1.1\r\n" + HOST
CHUNKED = b"transfer-encoding: chunked\r\n"

# Each could be read in two ways by two servers in a row, or is not HTTP at all.
MALFORMED = {
    "length and chunked": POST + b"content-length: 5\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    "chunked and length": POST + CHUNKED + b"content-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcde",
    "list of lengths": POST + b"content-length: 5, 6\r\n\r\nabcde",
    "negative length": POST + b"content-length: -5\r\n\r\nabcde",
    "signed length": POST + b"content-length: +5\r\n\r\nabcde",
    "hexadecimal length": POST + b"content-length: 0x5\r\n\r\nabcde",
    "underscored length": POST + b"content-length: 1_0\r\n\r\nabcdefghij",
    "endless length": POST + b"content-length: " + b"9" * 5000 + b"\r\n\r\n",
    "chunked in HTTP/1.0": b"POST /echo HTTP/1.0\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    "two hosts": b"GET /echo HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    "no host": b"GET /echo HTTP/1.1\r\n\r\n",
    "space before colon": POST + b"content-length : 5\r\n\r\nabcde",
    "space in name": POST + b"content length: 5\r\n\r\nabcde",
    "null in value": POST + b"x: a\0b\r\n\r\n",
    "bare return in value": POST + b"x: a\rcontent-length: 5\r\n\r\n",
    "line starting with space": b"GET /echo HTTP/1.1\r\n " + HOST + b"\r\n",
    "hexadecimal prefix in chunk": POST + CHUNKED + b"\r\n0x5\r\nabcde\r\n0\r\n\r\n",
    "negative chunk": POST + CHUNKED + b"\r\n-5\r\nabcde\r\n0\r\n\r\n",
    "chunk longer than it says": POST + CHUNKED + b"\r\n3\r\nabcde\r\n0\r\n\r\n",
    "endless chunk size": POST + CHUNKED + b"\r\n" + b"f" * 100 + b"\r\nabc",
    "no target": b"GET HTTP/1.1\r\n" + HOST + b"\r\n",
    "space in target": b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n",
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "no version": b"GET /echo\r\n" + HOST + b"\r\n",
}
OTHER = {
    "unknown encoding": (POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "identity": (POST + b"transfer-encoding: identity\r\n\r\n", 501),
    "chunked twice": (POST + b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 501),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "HTTP/9.9": (b"GET /echo HTTP/9.9\r\n" + HOST + b"\r\n", 505),
}


@pytest.mark.parametrize("shape", MALFORMED)
def test_malformed_requests(client: RawClient, shape: str) -> None:
    response = client.exchange(MALFORMED[shape])
    assert response.status == 400
    assert response.headers["connection"] == "close"
    assert json.loads(response.body)["error"]["type"] == "invalid_request_error"
    assert client.rest() == b"", "what follows a malformed request must not be read as another"


@pytest.mark.parametrize("shape", OTHER)
def test_unsupported_requests(client: RawClient, shape: str) -> None:
    data, status = OTHER[shape]
    response = client.exchange(data)
    assert response.status == status
    assert client.rest() == b""


def test_a_smuggled_request_is_not_answered(client: RawClient) -> None:
    inner = b"GET /echo?smuggled HTTP/1.1\r\n" + HOST + b"\r\n"
    client.send(POST + b"content-length: %d\r\n" % (5 + len(inner)) + CHUNKED + b"\r\n0\r\n\r\n" + inner)
    assert client.response().status == 400
    assert b"smuggled" not in client.rest()


@pytest.mark.parametrize("at_once", [True, False], ids=["one write", "many writes"])
@pytest.mark.parametrize("shape", ["one long header", "many headers", "long target"])
def test_headers_over_the_limit(client: RawClient, shape: str, at_once: bool) -> None:
    limit = Limits().header_bytes
    data = {
        "one long header": b"GET /echo HTTP/1.1\r\n" + HOST + b"x: " + b"a" * limit + b"\r\n\r\n",
        "many headers": b"GET /echo HTTP/1.1\r\n" + HOST + b"name: value\r\n" * (limit // 10) + b"\r\n",
        "long target": b"GET /" + b"a" * limit + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    }[shape]
    for piece in [data] if at_once else [data[start : start + 4096] for start in range(0, len(data), 4096)]:
        client.send(piece)
    response = client.response()
    assert response.status == 431
    assert json.loads(response.body)["error"]["code"] == "headers_too_large"


def test_trailers_over_the_limit(client: RawClient) -> None:
    trailers = b"name: value\r\n" * 5000
    assert client.exchange(POST + CHUNKED + b"\r\n0\r\n" + trailers + b"\r\n").status == 431


@pytest.fixture(scope="module")
def small() -> object:
    limits = Limits(body_bytes=1000, header_seconds=0.3, body_seconds=0.3, idle_seconds=0.4)
    with http_server(Router(ROUTES), limits) as harness:
        yield harness


def test_a_body_at_the_limit_is_taken(small: Harness) -> None:
    with small.client() as client:
        assert client.exchange(POST + b"content-length: 1000\r\n\r\n" + b"a" * 1000).status == 200


def test_a_declared_body_over_the_limit_is_refused_before_it_is_sent(small: Harness) -> None:
    with small.client() as client:
        response = client.exchange(POST + b"content-length: 1001\r\nexpect: 100-continue\r\n\r\n")
        assert response.status == 413
        assert json.loads(response.body)["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("chunked", [True, False])
def test_the_client_reads_the_413_although_it_is_still_sending(small: Harness, chunked: bool) -> None:
    size = 20_000_000  # far more than socket buffers hold
    with small.client() as client:
        if chunked:
            client.send(POST + CHUNKED + b"\r\n%x\r\n" % size)
        else:
            client.send(POST + b"content-length: %d\r\n\r\n" % size)
        client.send(b"a" * size)  # would fail with a reset if the server just closed
        assert client.response().status == 413


def test_slow_headers_slow_bodies_and_idle_connections_end(small: Harness) -> None:
    began = time.monotonic()
    with small.client() as headers, small.client() as body, small.client() as idle:
        headers.send(b"GET /echo HTTP/1.1\r\n")
        body.send(POST + b"content-length: 10\r\n\r\nabc")
        assert headers.response().status == 408
        assert body.response().status == 408
        assert idle.rest() == b""
    assert time.monotonic() - began < 5


def test_dripping_does_not_extend_the_time_for_headers(small: Harness) -> None:
    with small.client() as client:
        client.send(b"GET /echo HTTP/1.1\r\n")
        for _ in range(3):
            time.sleep(0.15)
            client.send(b"x: y\r\n")
        assert client.response().status == 408


def test_too_many_connections_are_told_so() -> None:
    """A server of its own: others' connections may still be closing, and these four must not time out."""
    with http_server(Router(ROUTES), Limits(connections=4)) as harness:
        held = [harness.client() for _ in range(4)]
        try:
            for client in held:
                assert client.exchange(b"GET /echo HTTP/1.1\r\n" + HOST + b"\r\n").status == 200
            with harness.client() as one_too_many:
                response = one_too_many.response()
            assert response.status == 503
            assert response.headers["retry-after"] == "1"
        finally:
            for client in held:
                client.socket.close()


def test_a_body_that_ends_early(client: RawClient) -> None:
    client.send(POST + b"content-length: 10\r\n\r\nabc")
    client.socket.shutdown(1)
    assert client.response().status == 400

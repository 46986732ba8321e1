"""What HTTP/1.1 lets a client send, over raw sockets."""

import json
import socket

import pytest

from tests.serve.http_harness import Harness, RawClient

HOST = b"host: localhost\r\n"


def get(path: bytes = b"/echo", headers: bytes = b"") -> bytes:
    return b"GET " + path + b" HTTP/1.1\r\n" + HOST + headers + b"\r\n"


def post(body: bytes, path: bytes = b"/echo", headers: bytes = b"") -> bytes:
    length = b"content-length: %d\r\n" % len(body)
    return b"POST " + path + b" HTTP/1.1\r\n" + HOST + length + headers + b"\r\n" + body


def test_a_response_has_its_length_and_an_id(client: RawClient) -> None:
    first, second = client.exchange(get()), client.exchange(get())
    assert first.status == second.status == 200
    assert first.headers["content-type"] == "application/json"
    assert first.headers["server"] == "test"
    assert first.headers["date"].endswith("GMT")
    assert first.headers["x-request-id"].startswith("req_")
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


def test_keep_alive_until_the_client_says_close(client: RawClient) -> None:
    for number in range(3):
        assert json.loads(client.exchange(post(b"%d" % number)).body)["body"] == str(number)
    response = client.exchange(get(headers=b"connection: close\r\n"))
    assert response.headers["connection"] == "close"
    assert client.rest() == b""


def test_pipelined_requests_are_answered_in_order(client: RawClient) -> None:
    bodies = [f"request {number}".encode() for number in range(20)]
    # A slow handler first: a later, quick one must not overtake it.
    client.send(b"".join(post(body, b"/slow" if number % 5 == 0 else b"/echo") for number, body in enumerate(bodies)))
    assert [json.loads(client.response().body)["body"].encode() for _ in bodies] == bodies


@pytest.mark.parametrize("size", [10, 30_000, 400_000])
def test_pipelining_goes_on_where_reading_was_paused(client: RawClient, size: int) -> None:
    body = b"x" * size  # a dozen of the larger ones are more than is read ahead
    for _ in range(12):
        client.send(post(body, b"/slow"))
    for _ in range(12):
        assert len(json.loads(client.response().body)["body"]) == len(body)


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_requests_cut_anywhere(client: RawClient, piece: int) -> None:
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = post(b"0123456789") + get(b"/echo?a=b")
    for start in range(0, len(data), piece):
        client.send(data[start : start + piece])
    assert json.loads(client.response().body)["body"] == "0123456789"
    assert json.loads(client.response().body)["query"] == "a=b"


def test_chunked_body(client: RawClient) -> None:
    head = b"POST /echo HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n"
    chunks = b"3\r\nabc\r\nA;extension=1\r\n0123456789\r\n0\r\ntrailer: yes\r\n\r\n"
    assert json.loads(client.exchange(head + chunks).body)["body"] == "abc0123456789"
    assert client.exchange(get()).status == 200  # the connection is still in step


def test_a_body_in_tiny_chunks(server: Harness, client: RawClient) -> None:
    """Thousands of events from one read: they are taken in several turns, and others are answered in between."""
    head = b"POST /echo HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n"
    client.send(head + b"1\r\na\r\n" * 40_000)
    with server.client() as other:
        assert other.exchange(get()).status == 200
    assert len(json.loads(client.exchange(b"0\r\n\r\n").body)["body"]) == 40_000


def test_expect_continue(client: RawClient) -> None:
    head, body = post(b"payload", headers=b"expect: 100-continue\r\n").split(b"\r\n\r\n")
    assert client.exchange(head + b"\r\n\r\n").status == 100
    assert json.loads(client.exchange(body).body)["body"] == "payload"


def test_head_has_no_body(client: RawClient) -> None:
    client.send(b"HEAD /echo HTTP/1.1\r\n" + HOST + b"\r\n")
    response = client.response(head_only=True)
    assert response.status == 200
    assert int(response.headers["content-length"]) > 0
    assert client.exchange(get()).status == 200


def test_head_of_a_stream_and_of_an_error(client: RawClient) -> None:
    client.send(b"HEAD /count?3 HTTP/1.1\r\n" + HOST + b"\r\n")
    assert client.response(head_only=True).status == 200
    client.send(b"HEAD /nothing HTTP/1.1\r\n" + HOST + b"\r\n")
    assert client.response(head_only=True).status == 404
    assert client.exchange(get()).status == 200


def test_http_1_0(client: RawClient) -> None:
    response = client.exchange(b"GET /echo HTTP/1.0\r\n\r\n")
    assert response.status == 200
    assert client.rest() == b""


def test_a_stream_to_http_1_0_ends_with_the_connection(client: RawClient) -> None:
    client.send(b"GET /count?3 HTTP/1.0\r\n\r\n")
    assert client.response().body == b"0\n1\n2\n"


def test_stream_is_chunked_and_the_connection_goes_on(client: RawClient) -> None:
    response = client.exchange(get(b"/count?100"))
    assert response.headers["transfer-encoding"] == "chunked"
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.body == b"".join(b"%d\n" % number for number in range(100))
    assert client.exchange(get()).status == 200


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/echo?x=1&y=%20", "/echo", "x=1&y=%20"),
        (b"http://localhost:99/echo?x", "/echo", "x"),
        (b"HTTP://other/echo", "/echo", ""),
        (b"/echo??", "/echo", "?"),
    ],
)
def test_request_targets(client: RawClient, target: bytes, path: str, query: str) -> None:
    seen = json.loads(client.exchange(get(target)).body)
    assert (seen["path"], seen["query"]) == (path, query)


@pytest.mark.parametrize(
    ("target", "thing"),
    [(b"/things/a", "a"), (b"/things/org/name", "org/name"), (b"/things/org%2Fna%20me", "org/na me")],
)
def test_path_parameter(client: RawClient, target: bytes, thing: str) -> None:
    assert json.loads(client.exchange(get(target)).body)["parameters"] == {"thing": thing}


def test_unknown_paths_and_methods_are_openai_errors(client: RawClient) -> None:
    response = client.exchange(post(b"some body", b"/nothing"))
    assert response.status == 404
    assert json.loads(response.body)["error"]["code"] == "unknown_url"
    response = client.exchange(b"DELETE /echo HTTP/1.1\r\n" + HOST + b"\r\n")
    assert response.status == 405
    assert response.headers["allow"] == "GET, HEAD, POST"
    assert json.loads(response.body)["error"]["code"] == "method_not_allowed"
    assert client.exchange(get(b"/things/")).status == 404
    assert client.exchange(b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n").status == 404
    assert client.exchange(get()).status == 200


def test_a_handler_that_fails_is_a_500_without_details(client: RawClient) -> None:
    response = client.exchange(get(b"/fail"))
    assert response.status == 500
    assert json.loads(response.body)["error"]["type"] == "server_error"
    assert b"planted" not in response.body
    assert client.exchange(get()).status == 200


def test_requests_already_sent_are_answered_after_a_half_close(server: Harness) -> None:
    with server.client() as client:
        client.send(get() * 5)
        client.socket.shutdown(socket.SHUT_WR)
        assert client.rest().count(b"HTTP/1.1 200") == 5


def test_upgrade_is_ignored(client: RawClient) -> None:
    assert client.exchange(get(headers=b"connection: upgrade\r\nupgrade: h2c\r\n")).status == 200
    assert client.exchange(get()).status == 200

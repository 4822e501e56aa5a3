"""Client connections to a gateway, over real sockets."""

import asyncio
import json

import pytest

from serve_app.errors import Outcome
from serve_app.serving import http_server

from .builders import (
    FakeDispatcher,
    chat,
    chunk,
    exchange,
    gateway,
    http_post,
    serving,
    streams,
)
from .conftest import GatewayHarness

ASKED = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


CLOSE = b"connection: close"


async def test_requests_in_one_piece_are_answered_one_after_the_other(harness: GatewayHarness) -> None:
    harness.engine.token_delay_s = 0.01
    first = http_post(chat(stream=True, max_tokens=3), b"x-request-id: one")
    second = http_post(chat(max_tokens=2), b"x-request-id: two", CLOSE)
    answer = (await exchange(harness.port, first, ASKED, second)).lower()
    marks = [b"x-request-id: one", b"data: [done]", b'{"status":"ok"}', b"x-request-id: two"]
    places = [answer.index(mark) for mark in marks]
    assert places == sorted(places)
    assert answer.count(b"http/1.1 200 ok\r\n") == 3
    assert harness.dispatcher.outcomes() == [Outcome.COMPLETED] * 2


async def test_the_head_of_an_answer_is_sent_with_its_first_piece(harness: GatewayHarness) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
    writer.write(http_post(chat(max_tokens=2)))
    async with asyncio.timeout(20):
        head, _, body = (await reader.read(65_536)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert json.loads(body)["choices"][0]["message"]["content"] == "w0 w1"
    writer.close()


async def test_every_answer_has_the_id_of_its_request(harness: GatewayHarness) -> None:
    for path in ("/v1/models", "/health", "/nowhere"):
        for given in ("mine", ""):
            answer = await harness.http.get(path, headers={"x-request-id": given} if given else {})
            (returned_id,) = answer.headers.get_list("x-request-id")
            assert returned_id == given if given else returned_id.startswith("gw")


async def test_head_is_answered_without_a_body(harness: GatewayHarness) -> None:
    answer = await exchange(harness.port, b"HEAD /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]) > 0
    assert body == b""


async def test_a_client_that_expects_100_continue_gets_it(harness: GatewayHarness) -> None:
    request = http_post(chat(), b"expect: 100-continue", CLOSE)
    head, mark, body = request.partition(b"\r\n\r\n")
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
    writer.write(head + mark)
    async with asyncio.timeout(20):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()


OFFER = (b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: AAEAAEAA")


async def test_a_request_that_offers_another_protocol_is_answered_in_this_one(
    harness: GatewayHarness,
) -> None:
    """Java's HttpClient does this; the connection then serves requests with and without the offer."""
    offered = http_post(chat(max_tokens=2), b"x-request-id: one", *OFFER)
    last = http_post(
        chat(max_tokens=2), b"x-request-id: three", b"connection: Upgrade, close", b"upgrade: h2c"
    )
    answer = (await exchange(harness.port, offered, ASKED, offered.replace(b"one", b"two"), last)).lower()
    marks = [b"x-request-id: one", b'{"status":"ok"}', b"x-request-id: two", b"x-request-id: three"]
    places = [answer.index(mark) for mark in marks]
    assert places == sorted(places)
    assert answer.count(b"http/1.1 200 ok\r\n") == 4
    assert harness.dispatcher.outcomes() == [Outcome.COMPLETED] * 3


async def test_such_a_request_may_arrive_in_pieces(harness: GatewayHarness) -> None:
    chunked = b"transfer-encoding: chunked"
    body = json.dumps(chat(max_tokens=2)).encode()
    lines = b"\r\n".join((b"host: x", *OFFER, chunked))
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\n%b\r\n\r\n" % lines
    for piece in (head[:30], head[30:], b"%x\r\n%b\r\n" % (len(body), body), b"0\r\n\r\n"):
        writer.write(piece)
        await asyncio.sleep(0.05)
    async with asyncio.timeout(20):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()


async def test_a_tunnel_is_rejected(harness: GatewayHarness) -> None:
    answer = await exchange(harness.port, b"CONNECT x:443 HTTP/1.1\r\nhost: x:443\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")


async def test_a_rejected_request_whose_body_does_not_arrive_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "REST_OF_BODY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(http_server, "CHECK_INTERVAL_S", 0.1)
    async with serving(gateway(FakeDispatcher([]))) as port:
        answer = await exchange(port, b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc")
        assert answer.startswith(b"HTTP/1.1 404 ")


async def test_a_rejected_request_whose_body_arrives_later_leaves_its_connection_open() -> None:
    async with serving(gateway(FakeDispatcher([]))) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc")
        async with asyncio.timeout(20):
            await reader.readuntil(b"not_found")
            writer.write(b"defghi" + ASKED)
            await reader.readuntil(b'{"status":"ok"}')
        writer.close()


async def test_a_slow_reader_gets_every_piece_in_order(harness: GatewayHarness) -> None:
    """The answer exceeds all buffers between client and engine."""
    text = "x" * 20_000
    harness.engine.answers.append(streams(*(chunk(f"{number} {text}") for number in range(1_500))))
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
    writer.write(http_post(chat(stream=True), CLOSE))
    await asyncio.sleep(0.5)
    assert harness.engine.running == 1
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    found = [int(piece.split(b" ", 1)[0]) for piece in answer.split(b'"content": "')[1:]]
    assert found == list(range(1_500))
    assert b"data: [DONE]\n\n" in answer
    assert harness.dispatcher.outcomes() == [Outcome.COMPLETED]

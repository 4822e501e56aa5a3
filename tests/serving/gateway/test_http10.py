"""HTTP/1.0 clients over raw sockets."""

import asyncio
import json

import pytest

from .builders import chat, exchange, http_post, streams
from .conftest import GatewayHarness


def request_bytes(*lines: bytes) -> bytes:
    """Return a request of a stream in HTTP/1.0."""
    return http_post(chat(stream=True, max_tokens=3), *lines).replace(b"HTTP/1.1", b"HTTP/1.0", 1)


def parsed(answer: bytes) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body of an answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:]), body


@pytest.mark.parametrize("lines", [(), (b"connection: close",), (b"connection: keep-alive",)])
async def test_a_stream_ends_with_its_connection_and_has_no_chunks(
    harness: GatewayHarness, lines: tuple[bytes, ...]
) -> None:
    answer = await exchange(harness.port, request_bytes(*lines))
    assert answer.startswith(b"HTTP/1.1 200 ")
    headers, body = parsed(answer)
    assert "transfer-encoding" not in headers
    assert "content-length" not in headers
    assert headers["connection"] == "close"
    *events, done, end = body.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    words = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"]["content"] for event in events]
    assert words == ["w0 ", "w1 ", "w2 "]


async def test_a_stream_is_forwarded_as_it_arrives(harness: GatewayHarness) -> None:
    rest = asyncio.Event()
    harness.engine.answers.append(streams({"choices": []}, rest.wait))
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
    writer.write(request_bytes())
    begun = await asyncio.wait_for(reader.readuntil(b'{"choices": []}\n\n'), 10)
    assert b"transfer-encoding" not in begun.lower()
    rest.set()
    assert await asyncio.wait_for(reader.read(), 10) == b"data: [DONE]\n\n"
    writer.close()


@pytest.mark.parametrize("path", ["/v1/models", "/nothere", "/metrics"])
async def test_an_answer_of_known_length_states_it(harness: GatewayHarness, path: str) -> None:
    headers, body = parsed(await exchange(harness.port, f"GET {path} HTTP/1.0\r\nhost: a\r\n\r\n".encode()))
    assert headers["content-length"] == str(len(body))
    assert "transfer-encoding" not in headers

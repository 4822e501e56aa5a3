"""HTTP/1.0 clients over raw sockets."""

import asyncio
import json
from dataclasses import dataclass

import pytest

from .builders import chat, start_stream
from .conftest import Stage

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class RawAnswer:
    """Raw answer up to the end of its connection."""

    status: int
    headers: dict[str, str]
    body: bytes


async def exchange(
    port: int, version: str, path: str = CHAT, body: bytes = b"", headers: str = ""
) -> RawAnswer:
    """Send one request and read until the server closes."""
    method = "POST" if body else "GET"
    length = f"content-length: {len(body)}\r\n" if body else ""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/{version}\r\nhost: a\r\n{length}{headers}\r\n".encode() + body)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    head, _, content = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    pairs = dict(line.lower().split(": ", 1) for line in lines)
    return RawAnswer(int(status.split()[1]), pairs, content)


def events(body: bytes) -> list[str]:
    assert body.endswith(b"\n\n")
    return [event.removeprefix("data: ") for event in body.decode().split("\n\n")[:-1]]


async def test_a_stream_ends_with_its_connection_and_has_no_chunks(stage: Stage) -> None:
    answer = await exchange(stage.port, "1.0", body=json.dumps(chat(stream=True, max_tokens=3)).encode())
    assert answer.status == 200
    assert "transfer-encoding" not in answer.headers
    assert "content-length" not in answer.headers
    assert answer.headers["connection"] == "close"
    found = events(answer.body)
    assert found[-1] == "[DONE]"
    assert [json.loads(event)["choices"][0]["delta"]["content"] for event in found[:-1]] == [
        "w0 ",
        "w1 ",
        "w2 ",
    ]


async def test_a_stream_is_forwarded_as_it_arrives(stage: Stage) -> None:
    rest = asyncio.Event()

    async def half_and_then_the_rest(scope, parsed, send) -> None:  # type: ignore[no-untyped-def]
        await start_stream(send)
        await send({"type": "http.response.body", "body": b'data: {"choices": []}\n\n', "more_body": True})
        await rest.wait()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    stage.engine.answers.append(half_and_then_the_rest)
    body = json.dumps(chat(stream=True)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
    writer.write(f"POST {CHAT} HTTP/1.0\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    begun = await asyncio.wait_for(reader.readuntil(b'{"choices": []}\n\n'), 10)
    assert b"transfer-encoding" not in begun.lower()
    rest.set()
    assert await asyncio.wait_for(reader.read(), 10) == b"data: [DONE]\n\n"
    writer.close()


@pytest.mark.parametrize("path", ["/v1/models", "/nothere", "/metrics"])
async def test_an_answer_of_known_length_states_it(stage: Stage, path: str) -> None:
    answer = await exchange(stage.port, "1.0", path)
    assert answer.headers["content-length"] == str(len(answer.body))
    assert "transfer-encoding" not in answer.headers


async def test_an_http_1_0_client_with_keep_alive_gets_connection_close(stage: Stage) -> None:
    body = json.dumps(chat(stream=True)).encode()
    answer = await exchange(stage.port, "1.0", body=body, headers="connection: keep-alive\r\n")
    assert answer.headers["connection"] == "close"
    assert events(answer.body)[-1] == "[DONE]"


async def test_newer_clients_get_chunks_as_before(stage: Stage) -> None:
    body = json.dumps(chat(stream=True)).encode()
    answer = await exchange(stage.port, "1.1", body=body, headers="connection: close\r\n")
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.body.endswith(b"0\r\n\r\n")

"""Audit of client outcomes, against servers that produce each of them."""

import json
from collections.abc import Awaitable, Callable

import httpx
import pytest

from experiments.common.audit import ENDS, SUMMARY, Ended, account, answered_twice, asked, summary
from serve_app.engines.engine import Receive, Scope, Send
from tests.serving.gateway.builders import serving

Script = Callable[[Send, str], Awaitable[None]]


def event(document: object) -> bytes:
    return f"data: {json.dumps(document)}\n\n".encode()


USAGE = event({"choices": [], "usage": {"completion_tokens": 5}})
DONE = b"data: [DONE]\n\n"
ERROR = event({"error": {"message": "the engine stopped", "code": "engine_error"}})


def stream(*parts: bytes, name: str | None = None, whole: bool = True) -> Script:
    async def script(send: Send, asked_as: str) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"x-request-id", (name or asked_as).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if not whole:
            raise ConnectionError
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return script


def rejection(status: int, body: bytes) -> Script:
    async def script(send: Send, _asked_as: str) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return script


@pytest.mark.parametrize(
    ("script", "end"),
    [
        (stream(USAGE, DONE), "answered"),
        (rejection(503, b'{"error":{"message":"no replica"}}'), "rejected with a reason"),
        (stream(USAGE, ERROR), "ended with an error event"),
        (rejection(503, b"<html>"), "connection broken before an answer"),
        (stream(USAGE), "cut without a sign"),
        (stream(USAGE, whole=False), "connection broken in mid-answer"),
        (stream(USAGE, DONE, DONE), "cut without a sign"),
        (stream(USAGE, DONE, name="another"), "swapped or of a wrong length"),
        (stream(DONE), "swapped or of a wrong length"),
    ],
)
async def test_each_end_is_distinguished_from_the_others(script: Script, end: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await script(send, dict(scope["headers"])[b"x-request-id"].decode())

    async with serving(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        found, _ = await asked(http, "r1", 5)
    assert found == end
    assert found in ENDS


async def test_a_server_that_is_not_there_breaks_the_connection() -> None:
    async with httpx.AsyncClient(base_url="http://127.0.0.1:9") as http:
        assert (await asked(http, "r1", 5))[0] == "connection broken before an answer"


def test_the_account_has_every_end_and_the_log_shows_doubled_answers() -> None:
    ended = [Ended("a", "answered", 0.0, 1.0), Ended("b", "lost", 0.0, 60.0), Ended("c", "answered", 0, 1)]
    found = account(ended)
    assert (found["answered"], found["lost"], sum(found.values())) == (2, 1, 3)
    line = "event=concluded outcome=completed model=demo attempts=1 client_request_id={}"
    lines = [line.format(name) for name in ("short-1", "short-2", "short-1", "other-1", "other-1")]
    assert answered_twice(lines, "short-") == 1


def test_the_summary_adds_up_forbidden_ends() -> None:
    ends = dict(zip(ENDS, (10, 2, 3, 4, 5, 6, 7, 8), strict=True))
    found = summary({"sent": 1_045, "ends": ends, "answered_twice": 1})
    assert dict(zip(SUMMARY, found, strict=True)) == {
        "requests": "1,045",
        "answered once": "10",
        "rejected with a reason": "2",
        "ended with an error event": "3",
        "connection broken": "9",
        "lost, doubled, cut without a sign, or swapped": "22",
    }

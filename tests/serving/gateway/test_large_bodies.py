"""Large bodies, over HTTP: one client's does not keep the gateway from serving others."""

import asyncio
import threading

import pytest

from serve_app.serving.gateway.request.structure import check_structure

from .builders import MODEL, chat, eventually
from .conftest import Stage

CHAT = "/v1/chat/completions"
HEAD = {"content-type": "application/json"}


def of_empty_messages(size_bytes: int) -> bytes:
    return b'{"model":"%s","messages":[' % MODEL.encode() + b",".join([b"{}"] * (size_bytes // 3)) + b"]}"


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_a_body_of_countless_objects_is_refused_before_it_is_parsed(stage: Stage, path: str) -> None:
    answer = await stage.http.post(path, content=of_empty_messages(2 * 1024 * 1024), headers=HEAD)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "body_too_complex"
    assert stage.engine.bodies == []


async def test_a_body_nested_without_end_is_refused(stage: Stage) -> None:
    nested = b'{"model":"%s","messages":[],"x":' % MODEL.encode() + b"[" * 40_000 + b"]" * 40_000 + b"}"
    answer = await stage.http.post(CHAT, content=nested, headers=HEAD)
    assert answer.status_code == 400


async def test_others_are_served_while_a_large_body_is_parsed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def slow_check(body: bytes) -> None:
        if len(body) > 1_000_000:
            reached.set()
            go_on.wait(30)
        check_structure(body)

    monkeypatch.setattr("serve_app.serving.gateway.request.reader.check_structure", slow_check)
    large = chat(messages=[{"role": "user", "content": "word " * 400_000}])
    first = asyncio.ensure_future(stage.http.post(CHAT, json=large))
    try:
        await eventually(reached.is_set)
        assert (await stage.http.post(CHAT, json=chat())).status_code == 200
        assert not first.done()
    finally:
        go_on.set()
    assert (await first).status_code == 200

"""Large bodies over HTTP must not block other clients."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.errors import Outcome
from serve_app.serving.gateway.request.body import check_structure
from tests.serving.channel.harness import wait_until

from .builders import MODEL, chat, rejection
from .conftest import GatewayHarness, running_gateway

CHAT = "/v1/chat/completions"
HEAD = {"content-type": "application/json"}


def of_empty_messages(size_bytes: int) -> bytes:
    return b'{"model":"%s","messages":[' % MODEL.encode() + b",".join([b"{}"] * (size_bytes // 3)) + b"]}"


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_a_body_of_countless_objects_is_rejected_before_it_is_parsed(
    harness: GatewayHarness, path: str
) -> None:
    answer = await harness.http.post(path, content=of_empty_messages(2 * 1024 * 1024), headers=HEAD)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "body_too_complex"
    assert harness.engine.bodies == []


async def test_others_are_served_while_a_large_body_is_parsed(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def slow_check(body: bytes) -> None:
        if len(body) > 1_000_000:
            reached.set()
            go_on.wait(30)
        check_structure(body)

    monkeypatch.setattr("serve_app.serving.gateway.request.reader.check_structure", slow_check)
    large = chat(messages=[{"role": "user", "content": "word " * 400_000}])
    first = asyncio.ensure_future(harness.http.post(CHAT, json=large))
    try:
        await wait_until(reached.is_set)
        assert (await harness.http.post(CHAT, json=chat())).status_code == 200
        assert not first.done()
    finally:
        go_on.set()
    assert (await first).status_code == 200


LARGE: Any = [{"role": "user", "content": "word " * 120_000}]  # 600 kB
ONE_MIB = 1024 * 1024


async def test_bodies_beyond_the_budget_are_rejected_until_there_is_room() -> None:
    async with running_gateway(max_held_body_bytes=ONE_MIB) as harness:
        dispatcher = harness.dispatcher
        dispatcher.gate.clear()
        waiting = asyncio.ensure_future(harness.http.post(CHAT, json=chat(messages=LARGE)))
        await wait_until(lambda: dispatcher.waiting == 1)
        rejected = await harness.http.post(CHAT, json=chat(messages=LARGE))
        assert rejected.status_code == 503
        assert rejected.json()["error"]["code"] == "body_memory_full"
        assert int(rejected.headers["retry-after"]) >= 1
        # Small bodies use a reserve that large ones cannot fill.
        small = [asyncio.ensure_future(harness.http.post(CHAT, json=chat())) for _ in range(5)]
        await wait_until(lambda: dispatcher.waiting == 6)
        dispatcher.gate.set()
        for answer in (waiting, *small):
            assert (await answer).status_code == 200
        assert (await harness.http.post(CHAT, json=chat(messages=LARGE))).status_code == 200
        await wait_for_held_bytes(harness, lambda held: held == 0)


async def test_a_body_is_dropped_once_its_answer_has_begun(harness: GatewayHarness) -> None:
    harness.engine.token_delay_s = 0.2
    request_body = chat(messages=LARGE, stream=True, max_tokens=500)
    async with harness.http.stream("POST", CHAT, json=request_body) as answer:
        async for _ in answer.aiter_lines():
            await wait_for_held_bytes(harness, lambda held: held == 0)
            assert harness.engine.running == 1
            break
    await wait_until(lambda: harness.engine.aborted == 1)


async def test_a_body_is_dropped_with_a_request_that_ends_in_the_queue(harness: GatewayHarness) -> None:
    harness.dispatcher.script.append(rejection(Outcome.REJECTED_QUEUE_FULL, "full"))
    assert (await harness.http.post(CHAT, json=chat(messages=LARGE))).status_code == 429
    await wait_for_held_bytes(harness, lambda held: held == 0)


async def test_a_body_is_given_up_with_the_client_that_was_sending_it(harness: GatewayHarness) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", harness.port)
    writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n" % CHAT.encode())
    writer.write(b"{" + b" " * 100_000)
    await wait_until(lambda: harness.gateway.in_flight == 1)
    await wait_for_held_bytes(harness, lambda held: held > 0)
    writer.transport.abort()
    await wait_until(lambda: harness.gateway.in_flight == 0)
    await wait_for_held_bytes(harness, lambda held: held == 0)
    assert 'outcome="cancelled"' in (await harness.http.get("/metrics")).text
    assert harness.dispatcher.events == []


async def wait_for_held_bytes(harness: GatewayHarness, holds: Callable[[float], bool]) -> None:
    """Wait until /metrics shows this many held bytes; the page is refreshed periodically."""
    async with asyncio.timeout(30):
        while True:
            page = (await harness.http.get("/metrics")).text
            (line,) = [each for each in page.splitlines() if each.startswith("ewsjf_gateway_held_body_bytes")]
            if holds(float(line.rpartition(" ")[2])):
                return
            await asyncio.sleep(0.05)

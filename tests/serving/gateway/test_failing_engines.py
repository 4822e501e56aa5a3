"""Engines that reject, fail or die, as HTTP clients see them, with a real scheduler."""

import asyncio
import time
from typing import Any
from unittest.mock import Mock

import pytest

from serve_app.engines.engine import Scope, Send
from serve_app.serving.gateway import UpstreamSettings
from tests.serving.channel.harness import scheduler_settings, wait_until

from .builders import MODEL, Engine, chat, error_json, reply_json, streams
from .fleet import Fleet, fleet_of, gathered

CHAT = "/v1/chat/completions"


class Rejecting(Engine):
    """Engine that answers every request with one status."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        await reply_json(send, self.status, error_json("not for you", self.status))


class SelectivelyFailingEngine(Engine):
    """Engine that fails on certain content, as vLLM does on images that it cannot fetch."""

    fails_after_s = 0.1

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        if b"poison" in body:
            await asyncio.sleep(self.fails_after_s)
            await reply_json(send, 500, error_json("cannot fetch the image", 500))
            return
        await super()._answer(scope, body, send)


async def send_request(fleet: Fleet, content: str = "hello", **headers: str) -> Any:
    body = chat(messages=[{"role": "user", "content": content}])
    return await fleet.http.post(CHAT, json=body, headers=headers)


@pytest.mark.parametrize("status", [401, 503])
async def test_a_request_that_every_engine_rejects_ends_by_its_deadline(status: int) -> None:
    engines = [Rejecting(status), Rejecting(status)]
    async with fleet_of(engines) as fleet, asyncio.timeout(30):
        began = time.monotonic()
        answer = await send_request(fleet, **{"x-queue-timeout-s": "1"})
        assert answer.status_code in {502, 503, 504}
        assert f"the engine answered {status}" in answer.json()["error"]["message"]
        assert time.monotonic() - began < 15
        # Backoff of 0, 0.1, 0.2, 0.4 s within a second, rather than one attempt per replica report.
        assert 2 <= sum(len(engine.bodies) for engine in engines) <= 7
        assert len(fleet.core) == 0


async def test_a_request_that_every_engine_rejects_ends_by_its_budget() -> None:
    engines = [Rejecting(503), Rejecting(503)]
    settings = scheduler_settings(model=MODEL, max_put_backs=4)
    async with fleet_of(engines, settings=settings) as fleet, asyncio.timeout(30):
        answer = await send_request(fleet)
        assert answer.status_code == 502
        assert "4 times" in answer.json()["error"]["message"]
        assert sum(len(engine.bodies) for engine in engines) == 4


async def test_one_replica_with_a_wrong_key_costs_no_client_anything() -> None:
    engines = [Rejecting(401), Engine(), Engine()]
    async with fleet_of(engines) as fleet:
        answers = await gathered(*(send_request(fleet) for _ in range(40)))
        assert {answer.status_code for answer in answers} == {200}


async def test_one_tenants_failing_requests_leave_the_fleet_to_the_others() -> None:
    """Fifteen concurrent failing requests, and good ones in sequence, on four idle replicas."""
    engines = [SelectivelyFailingEngine() for _ in range(4)]
    good: list[Any] = []
    patient = {"x-queue-timeout-s": "60"}
    async with fleet_of(engines, upstream=UpstreamSettings(connect_timeout_s=60.0)) as fleet:
        suspended = fleet.core.ledger.suspend = Mock(wraps=fleet.core.ledger.suspend)

        async def keep_failing() -> list[Any]:
            return [await send_request(fleet, "poison", **{"x-tenant": "a"}, **patient) for _ in range(7)]

        failing = asyncio.gather(*(keep_failing() for _ in range(15)))
        while not failing.done():
            good.append(await send_request(fleet, "hello", **{"x-tenant": "b"}, **patient))
            await asyncio.sleep(0.05)
        failed = [answer for answers in await failing for answer in answers]
        assert {answer.status_code for answer in good} == {200}
        # The engine's own message reaches the client.
        assert {answer.status_code for answer in failed} == {500}
        assert "cannot fetch the image" in failed[0].text
        assert sum(b"poison" in body for engine in engines for body in engine.bodies) <= 2 * len(failed)
        # No request that failed on one replica was served by another.
        assert not suspended.called


async def test_an_engines_own_failure_is_tried_once_elsewhere() -> None:
    engines = [Rejecting(500), Engine()]
    async with fleet_of(engines) as fleet:
        answers = await gathered(*(send_request(fleet) for _ in range(20)))
        answers += [await send_request(fleet) for _ in range(3)]
        assert {answer.status_code for answer in answers} == {200}
        # Other replicas served the requests, so the first replica is at fault.
        assert fleet.core.ledger["s0"].suspension.count > 0


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/embeddings"])
async def test_an_answer_that_takes_too_long_is_computed_once(path: str) -> None:
    """Regression: it was once computed on each of three replicas and then rejected."""

    async def hangs(*_: Any) -> None:
        await asyncio.sleep(3_600)

    engines = [Engine() for _ in range(3)]
    silent = UpstreamSettings(silence_timeout_s=0.5)
    async with fleet_of(engines, upstream=silent) as fleet:
        for engine in engines:
            engine.answers.append(hangs)
        body = chat() if path == CHAT else {"model": MODEL, "input": "hello"}
        answer = await fleet.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_timeout")
        assert answer.headers["x-should-retry"] == "false"
        assert sum(len(engine.bodies) for engine in engines) == 1
        await wait_until(lambda: not any(engine.running for engine in engines))
        assert len(fleet.core) == 0


async def test_an_engine_that_dies_before_the_first_token_of_a_response_is_replaced_transparently() -> None:
    """vLLM sends `response.created` and `response.in_progress` before it computes anything."""
    engines = [Engine(), Engine()]
    dead = {"response": {"id": "dead", "usage": None}}
    created, begun = ({"type": f"response.{kind}", **dead} for kind in ("created", "in_progress"))
    engines[0].answers.append(streams(created, 0.05, begun, 0.05, ConnectionError("died in its prefill")))
    async with fleet_of(engines) as fleet:
        body = {"model": MODEL, "input": "hello", "stream": True}
        answer = await fleet.http.post("/v1/responses", json=body)
        assert '"dead"' not in answer.text
        assert answer.text.count("event: response.created") == 1
        assert "event: response.completed" in answer.text
        assert '"error": null' in answer.text
        assert [len(engine.bodies) for engine in engines] == [1, 1]


async def test_the_first_token_of_a_response_is_reported_when_it_arrives() -> None:
    prefill_s = 0.3
    kinds = [f"response.{kind}" for kind in ("created", "in_progress", "output_item.added", "completed")]
    created, begun, added, completed = ({"type": kind, "response": {}} for kind in kinds)
    engine = Engine()
    engine.answers.append(streams(created, begun, prefill_s, added, completed, ends=b""))
    async with fleet_of([engine]) as fleet:
        body = {"model": MODEL, "input": "hello", "stream": True}
        async with fleet.http.stream("POST", "/v1/responses", json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line.startswith("event: ")]
        assert lines == [f"event: {kind}" for kind in kinds]
        page = (await fleet.http.get("/metrics")).text
        (ttft_s,) = (
            float(line.split()[-1])
            for line in page.splitlines()
            if line.startswith("ewsjf_gateway_time_to_first_token_seconds_sum")
        )
        assert ttft_s >= prefill_s

"""Engines that refuse, fail or die, as clients see them: through HTTP, with a real scheduler behind."""

import asyncio
import time
from typing import Any

import pytest

from serve_app.engines.engine import Scope, Send
from tests.serving.channel.harness import scheduler_settings

from .builders import MODEL, Engine, chat, error_json, reply_json
from .fleet import Fleet, fleet_of, gathered

CHAT = "/v1/chat/completions"


class Refusing(Engine):
    """An engine that answers every request with one status."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        await reply_json(send, self.status, error_json("not for you", self.status))


class Choosy(Engine):
    """An engine that fails on some requests by their content, as vLLM does on images that it cannot fetch."""

    fails_after_s = 0.3

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        if b"poison" in body:
            await asyncio.sleep(self.fails_after_s)
            await reply_json(send, 500, error_json("cannot fetch the image", 500))
            return
        await super()._answer(scope, body, send)


async def ask(fleet: Fleet, content: str = "hello", **headers: str) -> Any:
    body = chat(messages=[{"role": "user", "content": content}])
    return await fleet.http.post(CHAT, json=body, headers=headers)


@pytest.mark.parametrize("status", [401, 403, 429, 503])
async def test_a_request_that_every_engine_refuses_ends_by_its_deadline(status: int) -> None:
    engines = [Refusing(status), Refusing(status)]
    async with fleet_of(engines) as fleet, asyncio.timeout(30):
        began = time.monotonic()
        answer = await ask(fleet, **{"x-queue-timeout-s": "2"})
        assert answer.status_code in {502, 503, 504}
        assert f"the engine answered {status}" in answer.json()["error"]["message"]
        assert time.monotonic() - began < 15
        # 0, 0.1, 0.2, 0.4, 0.8: what fits two seconds, instead of one at every report of each replica.
        assert 2 <= sum(len(engine.bodies) for engine in engines) <= 9
        assert len(fleet.core) == 0


async def test_a_request_that_every_engine_refuses_ends_by_its_budget() -> None:
    engines = [Refusing(503), Refusing(503)]
    settings = scheduler_settings(model=MODEL, max_put_backs=4)
    async with fleet_of(engines, settings=settings) as fleet, asyncio.timeout(30):
        answer = await ask(fleet)
        assert answer.status_code == 502
        assert "4 times" in answer.json()["error"]["message"]
        assert sum(len(engine.bodies) for engine in engines) == 4


async def test_one_replica_with_a_wrong_key_costs_no_client_anything() -> None:
    engines = [Refusing(401), Engine(), Engine()]
    async with fleet_of(engines) as fleet:
        answers = await gathered(*(ask(fleet) for _ in range(40)))
        assert {answer.status_code for answer in answers} == {200}


async def test_one_tenants_failing_requests_leave_the_fleet_to_the_others() -> None:
    """50 that fail a second and 8 good ones on four idle replicas, for five seconds."""
    engines = [Choosy() for _ in range(4)]
    async with fleet_of(engines) as fleet:

        async def paced(content: str, per_s: float, tenant: str) -> list[Any]:
            calls = []
            for _ in range(int(per_s * 5)):
                headers = {"x-tenant": tenant, "x-queue-timeout-s": "5"}
                calls.append(asyncio.create_task(ask(fleet, content, **headers)))
                await asyncio.sleep(1 / per_s)
            return await gathered(*calls)

        failed, good = await gathered(paced("poison", 50, "a"), paced("hello", 8, "b"))
        served = sum(answer.status_code == 200 for answer in good)
        assert served == len(good)
        # An engine's own words reach the client that asked.
        assert {answer.status_code for answer in failed} == {500}
        assert "cannot fetch the image" in failed[0].text
        assert sum(b"poison" in body for engine in engines for body in engine.bodies) <= 2 * len(failed)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_own_failure_is_tried_once_elsewhere(stream: bool) -> None:
    engines = [Refusing(500), Engine()]
    async with fleet_of(engines) as fleet:
        answers = await gathered(*(fleet.http.post(CHAT, json=chat(stream=stream)) for _ in range(20)))
        answers += [await fleet.http.post(CHAT, json=chat(stream=stream)) for _ in range(3)]
        assert {answer.status_code for answer in answers} == {200}
        # Others have shown that the first replica is at fault.
        assert fleet.core.ledger["s0"].suspensions > 0

"""Client view of a cold application, and of one with dead or suspended parts."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from experiments.common.application import serve_config, served_application
from tests.chaos.killable_engines import FILE_VARIABLE
from tests.e2e.served import Served, wait_for

pytestmark = [pytest.mark.application, pytest.mark.timeout(400)]

MODEL = {
    "name": "demo",
    "pools": [
        {
            "name": "only",
            "engine": {"emulated": {"profile": "laptop", "max_num_seqs": 2}},
            "resources": {"num_cpus": 0.1},
        }
    ],
}

# Serve's default of 90 s would take that long to wait for.
KEEP_ALIVE_S = 3


@dataclass(frozen=True)
class KillableApplication:
    """An application, and the file that kills its engines."""

    served: Served
    file: Path

    async def send_request(
        self, http: httpx.AsyncClient, max_tokens: int = 5, timeout_s: float = 200.0
    ) -> httpx.Response:
        body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True}
        return await http.post("/v1/completions", json=body, headers={"x-queue-timeout-s": f"{timeout_s}"})


@pytest.fixture(scope="module")
def killable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableApplication]:
    file = tmp_path_factory.mktemp("killable") / "dead"
    config = serve_config("ewsjf", {"models": [MODEL]}, import_path="tests.chaos.killable_engines:build_app")
    config["http_options"]["keep_alive_timeout_s"] = KEEP_ALIVE_S
    with served_application(config, environment={FILE_VARIABLE: str(file)}) as application:
        served = Served(application)
        served.wait_until_ready()
        yield KillableApplication(served, file)


def code_of(response: httpx.Response) -> str:
    code: str = response.json().get("error", {}).get("code", "")
    return code


async def test_a_burst_on_a_cold_application_is_rejected_at_once(killable: KillableApplication) -> None:
    """This test comes first: no wait was measured yet, and about five requests per second are served."""
    async with httpx.AsyncClient(base_url=killable.served.url, timeout=100) as http:
        answers = await asyncio.gather(*(killable.send_request(http, 100, timeout_s=2.0) for _ in range(60)))
    ends = Counter(answer.status_code for answer in answers)
    assert set(ends) <= {200, 429, 504}
    assert ends[200] > 0
    assert ends[429] > 30, ends
    rejected = [answer for answer in answers if answer.status_code == 429]
    assert {code_of(answer) for answer in rejected} == {"deadline_unmeetable"}
    delays_s = sorted(float(answer.headers["retry-after-ms"]) / 1_000 for answer in rejected)
    # The retries follow one another and end within about ten seconds.
    assert delays_s[0] < delays_s[len(delays_s) // 2] < delays_s[-1] < 30


async def test_a_request_is_not_lost_on_a_connection_that_was_idle_while_its_gateway_was_suspended(
    killable: KillableApplication,
) -> None:
    """It arrives on an idle kept-alive connection, and the gateway reads it after the idle limit."""
    (gateway,) = killable.served.replicas("gateway")
    async with httpx.AsyncClient(base_url=killable.served.url, timeout=100) as http:
        assert (await killable.send_request(http)).status_code == 200
        await asyncio.sleep(KEEP_ALIVE_S - 0.3)
        gateway.suspend()
        try:
            pending = asyncio.create_task(killable.send_request(http))
            await asyncio.sleep(0.7)
        finally:
            gateway.resume()
        assert (await pending).status_code == 200


async def test_dead_engines_cause_503_and_are_replaced(killable: KillableApplication) -> None:
    """Queued and new requests get 503 long before their timeout of 200 s."""
    async with httpx.AsyncClient(base_url=killable.served.url, timeout=250) as http:
        assert (await killable.send_request(http)).status_code == 200
        # Two run, three queue in the engine, and the others queue in the scheduler.
        waiting = [asyncio.create_task(killable.send_request(http, 4_000)) for _ in range(12)]
        await asyncio.to_thread(
            wait_for, lambda: killable.served.metric("ewsjf_requests_waiting") > 0, 30, "a queue"
        )
        killable.file.touch()
        await asyncio.to_thread(
            wait_for, lambda: httpx.get(f"{killable.served.url}/ready").status_code == 503, 30, "not ready"
        )
        answers = await asyncio.gather(*waiting)
        rejected = [answer for answer in answers if answer.status_code == 503]
        assert {code_of(answer) for answer in rejected} == {"no_replica"}
        assert rejected
        assert "demo has had no live replica" in rejected[0].json()["error"]["message"]
        # The others were in the engine and were broken off by its death.
        assert {answer.status_code for answer in answers} <= {503, 500, 502}

        late = await killable.send_request(http)
        assert (late.status_code, code_of(late)) == (503, "no_replica")
        assert 0 < float(late.headers["retry-after"]) <= 60

        killable.file.unlink()

        def serves() -> bool:
            response = httpx.get(f"{killable.served.url}/ready")
            return response.status_code == 200

        await asyncio.to_thread(wait_for, serves, 200, "a new engine")
        assert (await killable.send_request(http)).status_code == 200

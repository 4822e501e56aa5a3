"""Parameter tuner in a served application: it fits the engine, tries a step, and stays frozen.

The search is confident of bad values (`poisoned_tuner`), so that a trial begins on any machine.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from experiments.common.application import serve_config, served_application
from serve_app.cli import main
from tests.e2e.served import Served, wait_for

pytestmark = pytest.mark.timeout(400)

MODEL = {
    "name": "demo",
    "pools": [
        {
            "name": "all",
            "engine": {"emulated": {"profile": "laptop", "advanced": {"speed_up": 2.0}}},
            "resources": {"num_cpus": 0.1},
        }
    ],
    "tuner": {"advanced": {"min_requests": 40, "every_s": 1.0, "core_share": 1.0}},
}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # With a persisted state, the tuner starts at once.
    state_uri = str(tmp_path_factory.mktemp("state"))
    args = {"models": [MODEL], "gateways": {"replicas": 1, "num_cpus": 0.1}, "state_uri": state_uri}
    config = serve_config("ewsjf", args, import_path="tests.e2e.poisoned_tuner:build_app")
    with served_application(config, environment={}, start_timeout_s=200.0) as application:
        yield Served(application)


def tuner_of(served: Served) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(served.application.fetched("/debug/tuner"))["models"][0]
    return shown


@pytest.mark.slow
async def test_it_learns_the_engine_tries_a_step_and_a_freeze_outlives_the_scheduler(
    tuned: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned.wait_until_ready()

    def waits_for_the_twin() -> bool:
        return "the twin is fitted after 200 streamed responses" in tuner_of(tuned)["state"]

    def canary_started() -> bool:
        return "started" in audit_actions(tuner_of(tuned))

    await asyncio.to_thread(wait_for, waits_for_the_twin, 60, "the tuner to wait for its twin")
    async with traffic(tuned):
        await asyncio.to_thread(wait_for, canary_started, 200, "a trial")
    shown = await asyncio.to_thread(tuner_of, tuned)
    assert shown["state"] == "trial in progress"
    assert shown["twin"]["step_times"].startswith("fitted to the engines")
    assert set(shown["twin"]["error"]) == {"ttft_ratio", "tpot_ratio", "requests"}
    assert tuned.metric("ewsjf_twin_error_ratio", latency="ttft") == shown["twin"]["error"]["ttft_ratio"]

    def status(*options: str) -> str:
        assert main(["status", "--url", tuned.url, *options]) == 0
        return capsys.readouterr().out

    assert "mean TTFT" in await asyncio.to_thread(status)
    await asyncio.to_thread(status, "--freeze-tuner")
    await asyncio.to_thread(
        wait_for, lambda: {"frozen", "rolled back"} <= audit_actions(tuner_of(tuned)), 30, "the trial to end"
    )
    before = tuned.metric("ewsjf_scheduler_incarnation")
    tuned.replicas("scheduler")[0].kill()

    def is_frozen() -> bool:
        is_new = tuned.metric("ewsjf_scheduler_incarnation") > before
        return is_new and "frozen by an admin" in tuner_of(tuned)["state"]

    await asyncio.to_thread(wait_for, is_frozen, 60, "the new scheduler to be frozen")


def audit_actions(tuner: dict[str, Any]) -> set[str]:
    return {each["what"] for each in tuner.get("audit", ())}


@contextlib.asynccontextmanager
async def traffic(served: Served) -> Any:
    """Stream requests of several lengths, a few at a time, until the block ends."""

    async def client(number: int) -> None:
        body = {"model": "demo", "prompt": "word " * (20 + 150 * number), "max_tokens": 16, "stream": True}
        while True:
            (await http.post("/v1/completions", json=body)).raise_for_status()

    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        clients = [asyncio.create_task(client(number)) for number in range(4)]
        try:
            yield
        finally:
            for each in clients:
                each.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

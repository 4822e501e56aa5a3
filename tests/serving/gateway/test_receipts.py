"""Receipts over HTTP: by which ids they are found, and what the gateway adds to them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.serving.channel.harness import wait_until
from tests.serving.gateway.builders import MODEL, chunk, replies, streams, usage_json
from tests.serving.gateway.dashboard.conftest import harness
from tests.serving.gateway.dashboard.harness import KEY, DashboardHarness

__all__ = ["harness"]

PATH = "/v1/chat/completions"
NAMED = {"x-request-id": "mine"}


@pytest.fixture
async def http(harness: DashboardHarness) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=harness.url, timeout=20, headers=headers) as client:
        yield client


async def send_request(
    http: httpx.AsyncClient, headers: dict[str, str] = NAMED, **fields: Any
) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **fields}
    return await http.post(PATH, headers=headers, json=body)


async def receipt(http: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    found: dict[str, Any] = (await http.get(f"/debug/requests/{request_id}")).json()
    return found


def stages(found: dict[str, Any]) -> dict[str, float]:
    return {each["stage"]: each["ms"] for each in found["stages"]}


@pytest.mark.parametrize(
    ("headers", "status", "outcome"),
    [
        ({"x-request-id": "mine", "x-queue-timeout-s": "0.3"}, 504, "expired"),
        ({"x-queue-timeout-s": "0.3"}, 504, "expired"),
        ({"x-request-id": "mine", "x-queue": "no-wait"}, 429, "rejected_queue_full"),
    ],
)
async def test_a_request_that_is_not_served_is_found_by_the_id_of_its_answer(
    harness: DashboardHarness, http: httpx.AsyncClient, headers: dict[str, str], status: int, outcome: str
) -> None:
    await harness.fill()

    answer = await send_request(http, headers)

    named = answer.headers["x-request-id"]
    found = await receipt(http, named)
    assert (answer.status_code, found["outcome"]) == (status, outcome)
    assert named == found["client_request_id"] == headers.get("x-request-id", found["request_id"])
    assert (found["endpoint"], found["attempts"]) == (PATH, [])
    assert found["message"]
    # SDKs show the id of the engine's answer.
    for name in (found["request_id"], f"chatcmpl-{found['request_id']}"):
        assert found == await receipt(http, name)
    assert set(stages(found)) == {"gateway", "channel", "queue"}
    wait_ms = found["queue"]["ms"]
    assert stages(found)["queue"] == wait_ms == pytest.approx(300 if status == 504 else 0, abs=250)
    assert sum(each["ms"] for each in found["queue"]["causes"]) == pytest.approx(wait_ms, abs=0.01)


async def test_a_request_is_found_while_it_waits_and_after_its_client_left(
    harness: DashboardHarness, http: httpx.AsyncClient
) -> None:
    await harness.fill()
    waits = asyncio.create_task(send_request(http))
    await wait_until(lambda: harness.waiting("mine"))

    found = await receipt(http, "mine")
    # `fill` leaves one more request queued.
    assert (found["state"], found["queue"]["waiting"]) == ("waiting", 2)
    assert found["queue"]["position"] in (1, 2)
    waits.cancel()
    await wait_until(lambda: not harness.waiting("mine"))
    found = await receipt(http, "mine")
    assert (found["state"], found["outcome"], found["endpoint"]) == ("ended", "cancelled", PATH)


async def test_a_program_shows_the_turns_of_its_conversations(
    harness: DashboardHarness, http: httpx.AsyncClient
) -> None:
    for own in ({"x-session-id": "root"}, {"x-session-id": "helper", "x-parent-session-id": "root"}):
        await send_request(http, {"x-program-id": "job", **own}, stream=True)

    (found,) = (await http.get("/debug/programs/job")).json()["programs"]
    assert (found["program"], found["model"], found["turns"], found["conversations"]) == ("job", MODEL, 2, 2)
    root, helper = found["last_turns"]
    assert (root["session"], root["is_sub_agent"], root["state"]) == ("root", False, "completed")
    assert (helper["session"], helper["is_sub_agent"], helper["state"]) == ("helper", True, "completed")
    assert min(root["engine_s"], helper["engine_s"]) > 0


TIMES = {"queue_time_ms": 2.0, "time_to_first_token_ms": 3.0, "generation_time_ms": 4.0}


@pytest.mark.parametrize(
    ("stream", "metrics", "parts"),
    [
        (True, TIMES, {"engine_queue": 2.0, "prefill": 3.0}),
        (False, TIMES, {"engine_queue": 2.0, "prefill": 3.0, "generation": 4.0}),
        *((False, bad, {}) for bad in ("words", [1], {"queue_time_ms": "soon"}, {"queue_time_ms": -1}, 5)),
    ],
)
async def test_the_times_that_an_engine_reports_are_parts_and_bad_ones_are_ignored(
    harness: DashboardHarness, http: httpx.AsyncClient, stream: bool, metrics: Any, parts: dict[str, float]
) -> None:
    last = {"object": "chat.completion", "choices": [], "usage": usage_json(7, 1), "metrics": metrics}
    harness.engine.answers.append(streams(0.02, chunk("hi"), 0.02, last) if stream else replies(200, last))

    answer = await send_request(http, stream=stream)

    assert stream or answer.json()["metrics"] == metrics
    found = await receipt(http, "mine")
    assert found["tokens"]["prompt"] == 7
    shown = [part for stage in found["stages"] for part in stage.get("parts", ())]
    assert {part["part"]: part["ms"] for part in shown if part["part"] != "network"} == parts
    assert not any(part["estimated"] for part in shown)


async def test_a_client_that_wants_its_receipt_gets_all_its_stages_and_no_tenants(
    harness: DashboardHarness, http: httpx.AsyncClient
) -> None:
    wants = {**NAMED, "x-ewsjf-receipt": "1"}
    summary = json.loads((await send_request(http, wants)).headers["x-ewsjf-receipt"])
    assert summary.keys() == {"wait_ms", "causes_ms", "ahead", "stages_ms"}
    assert summary["stages_ms"] == stages(await receipt(http, "mine"))
    assert summary["stages_ms"].keys() == {"gateway", "channel", "queue", "engine"}

    streamed = await send_request(http, wants, stream=True)
    *_, done, comment, end = streamed.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    last = json.loads(comment.removeprefix(": ewsjf-receipt "))["stages_ms"]
    assert last == stages(await receipt(http, "mine"))
    assert last.keys() == {"gateway", "channel", "queue", "until_first_token", "generation"}
    assert json.loads(streamed.headers["x-ewsjf-receipt"])["stages_ms"].items() <= last.items()
    assert "ewsjf-receipt" not in (await send_request(http, stream=True)).text

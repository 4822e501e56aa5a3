"""Receipts over HTTP, by the client's request ID, for every endpoint and outcome."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from serve_app.request import PriorityClass
from tests.serving.channel.harness import wait_until
from tests.serving.gateway.builders import (
    MODEL,
    anthropic_stream,
    chunk,
    replies,
    streams,
    usage_json,
)
from tests.serving.gateway.dashboard.harness import KEY, DashboardHarness, running_dashboard

PATH = "/v1/chat/completions"


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[DashboardHarness]:
    async with running_dashboard(tmp_path / "keys.json") as made:
        yield made


@pytest.fixture
async def http(harness: DashboardHarness) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=harness.url, timeout=20) as client:
        yield client


def send_request(http: httpx.AsyncClient, named: str = "", **changes: Any) -> "asyncio.Task[httpx.Response]":
    """Send a request in the background; extra headers and body fields are optional."""
    headers = {"authorization": f"Bearer {KEY}", **changes.pop("headers", {})}
    if named:
        headers["x-request-id"] = named
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **changes}
    return asyncio.create_task(http.post(PATH, headers=headers, json=body))


async def receipt(http: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    answer = await http.get(f"/debug/requests/{request_id}", headers={"authorization": f"Bearer {KEY}"})
    found: dict[str, Any] = answer.json()
    return found


def stages(found: dict[str, Any]) -> dict[str, float]:
    return {each["stage"]: each["ms"] for each in found["stages"]}


async def test_a_request_that_expires_is_found_by_its_clients_id(
    harness: DashboardHarness, http: httpx.AsyncClient
) -> None:
    await harness.fill()

    answer = await send_request(http, "mine", headers={"x-queue-timeout-s": "0.3"})

    assert (answer.status_code, answer.headers["x-request-id"]) == (504, "mine")
    found = await receipt(http, "mine")
    assert found["outcome"] == "expired"
    assert (found["client_request_id"], found["endpoint"]) == ("mine", PATH)
    assert found == await receipt(http, found["request_id"])
    # SDKs show the id of the engine's answer.
    assert found == await receipt(http, f"chatcmpl-{found['request_id']}")
    assert set(stages(found)) == {"gateway", "channel", "queue"}
    assert stages(found)["queue"] == pytest.approx(300, abs=250)
    assert sum(each["ms"] for each in found["queue"]["causes"]) == pytest.approx(
        found["queue"]["ms"], abs=0.01
    )


async def test_a_request_that_is_not_admitted_is_found_by_its_clients_id(
    harness: DashboardHarness, http: httpx.AsyncClient
) -> None:
    await harness.fill()

    answer = await send_request(http, "mine", headers={"x-queue": "no-wait"})

    assert answer.status_code == 429
    found = await receipt(http, "mine")
    assert found["outcome"].startswith("rejected")
    assert (found["endpoint"], found["attempts"]) == (PATH, [])
    assert found["message"]


async def test_a_request_whose_client_leaves_the_queue_is_found_by_its_clients_id(
    harness: DashboardHarness, http: httpx.AsyncClient
) -> None:
    await harness.fill()
    waits = send_request(http, "mine")
    await wait_until(lambda: harness.waiting("mine"))
    waits.cancel()
    await wait_until(lambda: not harness.waiting("mine"))

    found = await receipt(http, "mine")

    assert found["outcome"] == "cancelled"
    assert found["endpoint"] == PATH


async def test_a_request_without_an_id_of_its_own_is_found_by_that_of_its_answer(
    harness: DashboardHarness, http: httpx.AsyncClient
) -> None:
    await harness.fill()

    answer = await send_request(http, headers={"x-queue-timeout-s": "0.2"})

    found = await receipt(http, answer.headers["x-request-id"])
    assert found["request_id"] == found["client_request_id"] == answer.headers["x-request-id"]


async def test_a_gateways_own_rejections_have_no_receipt(
    harness: DashboardHarness, http: httpx.AsyncClient
) -> None:
    answer = await send_request(http, "mine", model="unknown")

    assert answer.status_code == 404
    summary = await receipt(http, "mine")
    assert "Requests that the gateway rejected" in summary["error"]["message"]


async def test_a_program_shows_the_turns_of_its_conversations(
    harness: DashboardHarness, http: httpx.AsyncClient
) -> None:
    messages = [{"role": "user", "content": "a long task. " * 200}]
    for turn, session in enumerate(("root", "root", "helper")):
        parent = {"x-parent-session-id": "root"} if session == "helper" else {}
        headers = {"x-session-id": session, "x-program-id": "job", **parent}
        whole = [*messages, {"role": "assistant", "content": "w0"}, {"role": "user", "content": f"{turn}"}]
        await send_request(http, headers=headers, stream=True, messages=messages if turn == 0 else whole)

    answer = await http.get("/debug/programs/job", headers={"authorization": f"Bearer {KEY}"})

    (found,) = answer.json()["programs"]
    assert (found["program"], found["model"], found["turns"], found["conversations"]) == ("job", MODEL, 3, 2)
    assert found["engine_s"] == pytest.approx(found["first_token_s"] + found["generation_s"])
    assert [(each["session"], each["is_sub_agent"]) for each in found["last_turns"]] == [
        ("root", False),
        ("root", False),
        ("helper", True),
    ]
    assert all(each["state"] == "completed" and each["engine_s"] > 0 for each in found["last_turns"])
    missing = await http.get("/debug/programs/other", headers={"authorization": f"Bearer {KEY}"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


TIMES = {"queue_time_ms": 2.0, "time_to_first_token_ms": 3.0, "generation_time_ms": 4.0}


async def test_the_prefill_is_estimated_where_the_engine_reports_nothing(
    harness: DashboardHarness, http: httpx.AsyncClient
) -> None:
    await send_request(http, "mine", stream=True)

    found = await receipt(http, "mine")
    first = next(each for each in found["stages"] if each["stage"] == "until_first_token")
    parts = {each["part"]: each for each in first["parts"]}
    assert set(parts) == {"engine_queue", "prefill"}
    assert all(each["estimated"] for each in first["parts"])
    assert sum(each["ms"] for each in first["parts"]) == pytest.approx(first["ms"], abs=0.01)
    assert parts["prefill"]["ms"] <= found["attempts"][-1]["expected_prefill_ms"]


async def test_the_times_that_an_engine_reports_are_not_estimated(
    harness: DashboardHarness, http: httpx.AsyncClient
) -> None:
    last = {"choices": [], "usage": usage_json(7, 1), "metrics": TIMES}
    harness.engine.answers.append(streams(0.02, chunk("hi"), 0.02, last))
    await send_request(http, "streamed", stream=True)
    whole = {"object": "chat.completion", "choices": [], "usage": usage_json(7, 1), "metrics": TIMES}
    harness.engine.answers.append(replies(200, whole))
    await send_request(http, "whole")

    found = {name: await receipt(http, name) for name in ("streamed", "whole")}
    parts = {
        (name, each["part"]): (each["ms"], each["estimated"])
        for name, receipt_of in found.items()
        for stage_of in receipt_of["stages"]
        for each in stage_of.get("parts", ())
        if each["part"] != "network"
    }
    assert parts == {
        ("streamed", "engine_queue"): (2.0, False),
        ("streamed", "prefill"): (3.0, False),
        ("whole", "engine_queue"): (2.0, False),
        ("whole", "prefill"): (3.0, False),
        ("whole", "generation"): (4.0, False),
    }


@pytest.mark.parametrize("metrics", ["words", [1], {"queue_time_ms": "soon"}, {"queue_time_ms": -1}, 5])
async def test_metrics_of_another_kind_are_ignored(
    harness: DashboardHarness, http: httpx.AsyncClient, metrics: Any
) -> None:
    whole = {"object": "chat.completion", "choices": [], "usage": usage_json(7, 1), "metrics": metrics}
    harness.engine.answers.append(replies(200, whole))

    assert (await send_request(http, "mine")).json()["metrics"] == metrics

    found = await receipt(http, "mine")
    assert found["tokens"]["prompt"] == 7
    assert all("parts" not in each for each in found["stages"])


async def test_an_admin_sees_which_tenants_were_served_in_between(
    harness: DashboardHarness, http: httpx.AsyncClient
) -> None:
    places = await harness.fill()
    harness.submit("theirs", tenant="rival", priority=PriorityClass.INTERACTIVE)
    waits = send_request(http, "mine", headers={"x-ewsjf-receipt": "1"})
    await wait_until(lambda: harness.waiting("mine"))
    for number in range(places):
        harness.end(f"f{number}")
    answer = await waits

    found = await receipt(http, "mine")
    served = found["queue"]["served"]
    assert (served["pool"], served["is_complete"], served["others"]) == ("short", True, 0)
    assert {"class": "interactive", "tenant": "rival", "requests": 1} in served["by"]
    assert served["requests"] == sum(each["requests"] for each in served["by"])
    assert served["requests"] >= sum(found["queue"]["ahead"].values()) > 0
    assert "rival" not in answer.headers["x-ewsjf-receipt"]


async def test_an_answer_in_one_piece_has_all_stages_in_its_header(
    harness: DashboardHarness, http: httpx.AsyncClient
) -> None:
    answer = await send_request(http, "mine", headers={"x-ewsjf-receipt": "1"})

    summary = json.loads(answer.headers["x-ewsjf-receipt"])
    assert summary["stages_ms"] == stages(await receipt(http, "mine"))
    assert set(summary["stages_ms"]) == {"gateway", "channel", "queue", "engine"}


async def test_a_stream_ends_with_a_comment_with_all_stages(
    harness: DashboardHarness, http: httpx.AsyncClient
) -> None:
    answer = await send_request(http, "mine", stream=True, headers={"x-ewsjf-receipt": "1"})

    *_, done, comment, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    summary = json.loads(comment.removeprefix(": ewsjf-receipt "))
    assert summary["stages_ms"] == stages(await receipt(http, "mine"))
    assert set(summary["stages_ms"]) == {"gateway", "channel", "queue", "until_first_token", "generation"}
    in_header = json.loads(answer.headers["x-ewsjf-receipt"])["stages_ms"]
    assert in_header.items() <= summary["stages_ms"].items()
    assert "ewsjf-receipt" not in (await send_request(http, stream=True)).text


async def test_the_clients_of_openai_and_anthropic_pass_over_the_comment(harness: DashboardHarness) -> None:
    headers = {"x-ewsjf-receipt": "1"}
    async with openai.AsyncOpenAI(base_url=f"{harness.url}/v1", api_key=KEY, max_retries=0) as sdk:
        for _ in range(2):
            stream = await sdk.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=3,
                stream=True,
                extra_headers=headers,
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            assert "".join(pieces) == "w0 w1 w2 "
    harness.engine.answers.append(anthropic_stream)
    async with (
        anthropic.AsyncAnthropic(base_url=harness.url, auth_token=KEY, max_retries=0) as other,
        other.messages.stream(
            model=MODEL, max_tokens=3, messages=[{"role": "user", "content": "hi"}], extra_headers=headers
        ) as events,
    ):
        assert await events.get_final_text() == "hi"


async def test_a_request_that_waits_can_be_looked_up(
    harness: DashboardHarness, http: httpx.AsyncClient
) -> None:
    await harness.fill()
    first = send_request(http, "first")
    await wait_until(lambda: harness.waiting("first"))
    second = send_request(http, "second")
    await wait_until(lambda: harness.waiting("second"))
    await asyncio.sleep(0.02)

    found = await receipt(http, "second")

    assert (found["outcome"], found["state"]) == (None, "waiting")
    assert (found["client_request_id"], found["tenant"], found["model"]) == ("second", "ops", MODEL)
    queue = found["queue"]
    # `fill` leaves one more request queued, of another tenant.
    assert (queue["pool"], queue["waiting"]) == ("short", 3)
    first_place = (await receipt(http, "first"))["queue"]["position"]
    assert 1 <= first_place < queue["position"] <= 3
    assert queue["current_cause"] == "engines_busy"
    assert queue["obstacles"] == "short: every replica is at its limit"
    # Nothing was dispatched while others waited, so no start can be predicted.
    assert (queue["expected_ms"], queue["expected_between_ms"]) == (None, None)
    assert stages(found) == {"queue": queue["ms"]}
    assert queue["ms"] > 20
    assert sum(each["ms"] for each in queue["causes"]) == pytest.approx(queue["ms"], abs=1)
    assert 0 < queue["expires_in_ms"] < 1e6
    later = await receipt(http, found["request_id"])
    assert later["queue"]["ms"] > queue["ms"]
    for each in (first, second):
        each.cancel()


async def test_a_waiting_request_gets_an_expected_start_once_others_were_dispatched(
    harness: DashboardHarness, http: httpx.AsyncClient
) -> None:
    await harness.fill()
    waits = send_request(http, "mine", headers={"x-priority": "batch"})
    await wait_until(lambda: harness.waiting("mine"))
    for number in range(4):
        harness.submit(f"others{number}")
    # The drain rate needs a second of queueing.
    await asyncio.sleep(1.1)
    for number in range(3):
        harness.end(f"f{number}")

    async with asyncio.timeout(10):
        while (queue := (await receipt(http, "mine"))["queue"])["expected_ms"] is None:  # noqa: ASYNC110 - pages emit no events
            await asyncio.sleep(0.05)

    earliest, latest = queue["expected_between_ms"]
    assert 0 < earliest < queue["expected_ms"] < latest
    waits.cancel()


async def test_a_request_that_runs_can_be_looked_up(
    harness: DashboardHarness, http: httpx.AsyncClient
) -> None:
    harness.engine.token_delay_s = 0.2
    runs = send_request(http, "mine", stream=True)
    await wait_until(lambda: harness.waiting("mine"))
    while (found := await receipt(http, "mine"))["queue"]["ms"] and "generation" not in stages(found):
        assert (found["outcome"], found["state"]) == (None, "running")
        await asyncio.sleep(0.01)

    assert (found["state"], found["attempts"][0]["replica"]) == ("running", "s0")
    assert set(stages(found)) == {"queue", "until_first_token", "generation"}
    await runs
    ended = await receipt(http, "mine")
    assert (ended["state"], ended["outcome"]) == ("ended", "completed")


async def test_of_requests_with_one_clients_id_the_open_one_is_shown(
    harness: DashboardHarness, http: httpx.AsyncClient
) -> None:
    await send_request(http, "same")
    harness.engine.token_delay_s = 0.2
    runs = send_request(http, "same")
    await wait_until(lambda: harness.waiting("same"))

    assert (await receipt(http, "same"))["state"] == "running"

    await runs

"""Receipts over HTTP: of whatever a client asked for, however it ended, by the id that the client knows."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.serving.channel.harness import until
from tests.serving.gateway.builders import MODEL
from tests.serving.gateway.dashboard.stage import KEY, PageStage, page_stage

PATH = "/v1/chat/completions"


@pytest.fixture
async def stage() -> AsyncIterator[PageStage]:
    async with page_stage() as made:
        yield made


@pytest.fixture
async def http(stage: PageStage) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stage.url, timeout=20) as client:
        yield client


def asked(http: httpx.AsyncClient, named: str = "", **changes: Any) -> "asyncio.Task[httpx.Response]":
    """Send a request under way; `headers` and fields of the body may be given."""
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
    stage: PageStage, http: httpx.AsyncClient
) -> None:
    await stage.fill()

    answer = await asked(http, "mine", headers={"x-queue-timeout-s": "0.3"})

    assert (answer.status_code, answer.headers["x-request-id"]) == (504, "mine")
    found = await receipt(http, "mine")
    assert found["outcome"] == "expired"
    assert (found["client_request_id"], found["endpoint"]) == ("mine", PATH)
    assert found == await receipt(http, found["request_id"])
    assert set(stages(found)) == {"gateway", "channel", "queue"}
    assert stages(found)["queue"] == pytest.approx(300, abs=250)
    assert sum(each["ms"] for each in found["queue"]["causes"]) == pytest.approx(
        found["queue"]["ms"], abs=0.01
    )


async def test_a_request_that_is_not_admitted_is_found_by_its_clients_id(
    stage: PageStage, http: httpx.AsyncClient
) -> None:
    await stage.fill()

    answer = await asked(http, "mine", headers={"x-queue": "no-wait"})

    assert answer.status_code == 429
    found = await receipt(http, "mine")
    assert found["outcome"].startswith("rejected")
    assert (found["endpoint"], found["attempts"]) == (PATH, [])
    assert found["message"]


async def test_a_request_whose_client_leaves_the_queue_is_found_by_its_clients_id(
    stage: PageStage, http: httpx.AsyncClient
) -> None:
    await stage.fill()
    waits = asked(http, "mine")
    await until(lambda: stage.waiting("mine"))
    waits.cancel()
    await until(lambda: not stage.waiting("mine"))

    found = await receipt(http, "mine")

    assert found["outcome"] == "cancelled"
    assert found["endpoint"] == PATH


async def test_a_request_without_an_id_of_its_own_is_found_by_that_of_its_answer(
    stage: PageStage, http: httpx.AsyncClient
) -> None:
    await stage.fill()

    answer = await asked(http, headers={"x-queue-timeout-s": "0.2"})

    found = await receipt(http, answer.headers["x-request-id"])
    assert found["request_id"] == found["client_request_id"] == answer.headers["x-request-id"]


async def test_what_a_gateway_refuses_by_itself_is_said_to_have_no_receipt(
    stage: PageStage, http: httpx.AsyncClient
) -> None:
    answer = await asked(http, "mine", model="unheard-of")

    assert answer.status_code == 404
    told = await receipt(http, "mine")
    assert "no scheduler was asked: a body, key or model that is not allowed" in told["error"]["message"]

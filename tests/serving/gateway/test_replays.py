"""Replays beside a gateway: the real process and its limits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from serve_app.serving.gateway.admin import Replays
from serve_app.serving.gateway.answer.responses import RequestRejected
from serve_app.tuning.counterfactuals.recording import encode_recording, example_of_tenant, with_tenant_name
from serve_app.tuning.counterfactuals.what_if import what_if
from tests.serving.gateway.builders import MODEL, Answers, admin_client
from tests.tuning.counterfactuals.production import burst, produce

RECORDING = produce(burst(40, 0)).recording("r35")
WHAT_IF = what_if(RECORDING)


@asynccontextmanager
async def gateway(recording: str) -> AsyncIterator[httpx.AsyncClient]:
    """Run a gateway whose scheduler has one recording, of the request `mine`."""

    async def recorded(request_id: str) -> str:
        return recording if request_id == "mine/1" else ""

    async def receipt(request_id: str) -> dict[str, Any]:
        if request_id == example_of_tenant(WHAT_IF):
            return {"request_id": request_id, "tenant": "rival"}
        return {"request_id": request_id} if request_id == "runs" else {}

    async with admin_client({MODEL: Answers(receipt=receipt, recording=recorded)}) as http:
        http.base_url = http.base_url.join("/debug/requests/")
        yield http


async def test_a_gateway_replays_the_recording_and_still_answers_others() -> None:
    async with gateway(encode_recording(RECORDING)) as http:
        asked = asyncio.create_task(http.get("mine%2F1/what-if"))
        while not asked.done():
            began = asyncio.get_running_loop().time()
            assert (await http.get("nobody-s")).status_code == 404
            assert asyncio.get_running_loop().time() - began < 1.0
            second = await http.get("mine%2F1/what-if")
            if second.status_code != 200:
                assert second.status_code == 429
                assert int(second.headers["retry-after"]) >= 1
            await asyncio.sleep(0.05)
        assert (await asked).json() == with_tenant_name(WHAT_IF, "rival")
        document = await http.get("mine%2F1/recording")
        assert document.text == encode_recording(RECORDING)


async def test_the_error_names_what_cannot_be_replayed() -> None:
    async with gateway('{"version": 99}') as http:
        answer = await http.get("mine%2F1/what-if")
        assert answer.status_code == 409
        assert "got 99" in answer.json()["error"]["message"]
        for part in ("what-if", "recording"):
            early = await http.get(f"runs/{part}")
            assert early.status_code == 409
            assert "available after its end" in early.json()["error"]["message"]
        assert (await http.get("nobody-s/what-if")).status_code == 404


async def test_a_replay_that_takes_too_long_is_ended() -> None:
    replays = Replays(time_limit_s=0.05)
    with pytest.raises(RequestRejected) as rejected:
        await replays.what_if(encode_recording(RECORDING))
    assert rejected.value.status == 504
    # The failure does not reject the next replay.
    assert (await Replays().what_if(encode_recording(RECORDING)))["changes"]
    with pytest.raises(RequestRejected, match="exceeded"):
        await replays.what_if(encode_recording(RECORDING))


async def test_a_broken_replay_is_reported() -> None:
    with pytest.raises(RequestRejected, match="No module named") as rejected:
        await Replays(module="serve_app.no_such_module").what_if("{}")
    assert rejected.value.status == 500

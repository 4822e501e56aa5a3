"""Debug endpoints: queue, status and tuner, for every model behind a gateway."""

import asyncio
import logging
from typing import Any, NoReturn

import pytest

from serve_app.serving.gateway import ApiKey, Gateway, GatewaySettings, ServedModel
from serve_app.serving.gateway.admin import PoolWatcher
from tests.serving.gateway.builders import Answers, FakeDispatcher, admin_client, http_client

OTHER = {"authorization": "Bearer k2"}


async def unreachable(*_: str) -> NoReturn:
    raise ConnectionError("gone")


@pytest.mark.parametrize("query", ["queue", "status"])
async def test_each_scheduler_is_queried_and_an_unreachable_one_is_named(query: str) -> None:
    async def answer() -> dict[str, Any]:
        return {"model": "a", "waiting": 3}

    schedulers = {"a": Answers(**{query: answer}), "b": Answers(**{query: unreachable})}
    async with admin_client(schedulers) as http:
        first, second = (await http.get(f"/debug/{query}")).json()["models"]
        rejected = await http.get(f"/debug/{query}", headers=OTHER)
    assert first == {"model": "a", "waiting": 3}
    assert second["model"] == "b"
    assert "gone" in second["error"]
    assert rejected.json()["error"]["code"] == "not_allowed"


async def test_a_scheduler_that_hangs_does_not_delay_the_query_of_the_next() -> None:
    both_are_queried = asyncio.Barrier(2)

    async def status() -> dict[str, Any]:
        await both_are_queried.wait()
        return {}

    async with admin_client({"a": Answers(status=status), "b": Answers(status=status)}) as http:
        assert (await http.get("/debug/status")).json() == {"models": [{}, {}]}


async def test_a_watcher_that_hangs_does_not_delay_the_query_of_the_next() -> None:
    both_are_queried = asyncio.Barrier(2)

    async def describe() -> list[dict[str, object]]:
        await both_are_queried.wait()
        return [{"url": "http://engine"}]

    async def change(*_: str) -> NoReturn:
        raise NotImplementedError

    settings = GatewaySettings(
        models=(ServedModel(name="a"),), keys=(ApiKey(tenant="ops", key="k1", admin=True),)
    )
    watchers = {("a", pool): PoolWatcher(describe, change) for pool in ("long", "short")}
    app = Gateway(settings, {"a": FakeDispatcher([])}, "gw", watchers=watchers)
    async with http_client(app, headers={"authorization": "Bearer k1"}) as http:
        found = (await http.get("/admin/endpoints")).json()
    assert found == {"endpoints": [{"model": "a", "url": "http://engine"}] * 2}


async def test_the_tuner_of_each_model_can_be_inspected_alone() -> None:
    async def status() -> dict[str, Any]:
        return {"model": "a", "waiting": 3, "tuner": {"mode": "on", "state": "searching"}}

    async with admin_client({"a": Answers(status=status)}) as http:
        response = await http.get("/debug/tuner")
    assert response.json() == {"models": [{"model": "a", "mode": "on", "state": "searching"}]}


async def test_admins_freeze_and_thaw_every_tuner() -> None:
    freezes: list[tuple[str, str]] = []

    def scheduler(model: str) -> Answers:
        async def freeze(reason: str) -> None:
            if model == "b" and not reason:
                raise ConnectionError("gone")
            freezes.append((model, reason))

        return Answers(freeze=freeze)

    async with admin_client({name: scheduler(name) for name in "ab"}) as http:
        assert (await http.post("/debug/tuner/freeze", headers=OTHER)).status_code == 403
        assert freezes == []
        (frozen, _) = (await http.post("/debug/tuner/freeze")).json()["models"]
        assert "there are no trials until POST /debug/tuner/thaw" in frozen["message"]
        assert freezes == [("a", "frozen by an admin"), ("b", "frozen by an admin")]
        first, second = (await http.post("/debug/tuner/thaw")).json()["models"]
    thawed = "the tuner is thawed: trials are allowed again"
    assert first == {"model": "a", "frozen": "", "message": thawed}
    assert "gone" in second["error"]


async def test_a_cross_origin_request_cannot_freeze_a_tuner_without_keys() -> None:
    async with admin_client({"a": Answers()}, keys=()) as http:
        del http.headers["authorization"]
        post = await http.post("/debug/tuner/freeze", headers={"origin": "https://evil.example"})
        gets = [await http.get(f"/debug/{path}") for path in ("queue", "status", "tuner")]
    assert [response.status_code for response in (post, *gets)] == [401] * 4


async def test_of_two_receipts_that_of_the_model_that_served_is_shown() -> None:
    def scheduler(model: str, outcome: str | None) -> Answers:
        async def receipt(request_id: str) -> dict[str, Any]:
            return {"request_id": request_id, "model": model, "outcome": outcome}

        return Answers(receipt=receipt)

    for outcome in ("completed", None):
        schedulers = {"a": scheduler("a", "rejected_queue_full"), "b": scheduler("b", outcome)}
        async with admin_client(schedulers) as http:
            assert (await http.get("/debug/requests/r1")).json()["model"] == "b"


async def test_an_id_in_a_path_is_decoded_once() -> None:
    queried: list[str] = []

    async def receipt(name: str) -> dict[str, Any]:
        queried.append(name)
        return {}

    async with admin_client({"a": Answers(receipt=receipt, program=receipt)}) as http:
        await http.get("/debug/requests/a%2525b")
        await http.get("/debug/programs/a%2525b")
    assert queried == ["a%25b", "a%25b"]


async def test_changes_by_admins_leave_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    async with admin_client({"a": Answers()}) as http:
        await http.post("/debug/tuner/freeze")
        await http.post("/admin/mode", json={"active_share": 0.5})
        await http.get("/debug/tuner")
        await http.post("/debug/tuner/thaw", headers=OTHER)
    lines = [each.getMessage() for each in caplog.records if "event=audit" in each.getMessage()]
    assert lines == [
        "event=audit action=tuner_freeze by=config/ops client=127.0.0.1",
        "event=audit action=mode_changed by=config/ops client=127.0.0.1 model='a' active_share=0.5",
    ]


async def test_a_full_capture_is_requested_by_a_parameter() -> None:
    queries: list[tuple[bool, ...]] = []

    async def capture(*arguments: bool) -> list[dict[str, Any]]:
        queries.append(arguments)
        return [{"input_length": 5}]

    async with admin_client({"a": Answers(capture=capture)}) as http:
        for path in ("/debug/capture", "/debug/capture?full=false", "/debug/capture?full=true"):
            assert (await http.get(path)).json() == {"input_length": 5, "model": "a"}
        assert (await http.get("/debug/capture?full=true", headers=OTHER)).status_code == 403
    # A scheduler of an older release rejects unknown arguments.
    assert queries == [(), (), (True,)]

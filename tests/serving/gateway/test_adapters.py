"""LoRA adapters that engines list: served under their names by the engines that list them."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from serve_app.serving.gateway import ServedModel
from serve_app.serving.gateway.answer.responses import ForbiddenError
from serve_app.serving.gateway.keys import Caller
from serve_app.serving.gateway.models import ServedModels
from serve_app.serving.remote import endpoint
from tests.engines.servers import serving, until
from tests.serving.remote.servers import WatchedFleet, watched
from tests.serving.test_api_keys import record

from .builders import MODEL, FakeDispatcher, emulated


class Servers:
    """Emulated servers with adapters, and a fleet that watches them."""

    def __init__(self, fleet: WatchedFleet, urls: list[str]) -> None:
        self.fleet, self.urls = fleet, urls

    async def send_request(self, model: str, **headers: str) -> httpx.Response:
        request_body = {"model": model, "prompt": "hello", "max_tokens": 2}
        return await self.fleet.http.post("/v1/completions", json=request_body, headers=headers)

    async def listed(self) -> dict[str, Any]:
        found = (await self.fleet.http.get("/v1/models")).json()["data"]
        return {model["id"]: model.get("parent") for model in found}

    async def lists(self, *adapters: str) -> bool:
        return set(await self.listed()) == {MODEL, *adapters}

    async def change_adapter(self, number: int, action: str, adapter: str) -> None:
        async with httpx.AsyncClient(base_url=self.urls[number]) as http:
            body = {"lora_name": adapter, "lora_path": "/adapters/x"}
            assert (await http.post(f"/v1/{action}_lora_adapter", json=body)).status_code == 200

    def name(self, number: int) -> str:
        return "short/" + self.urls[number].removeprefix("http://")


@pytest.fixture
async def servers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Servers]:
    monkeypatch.setattr(endpoint, "_LOOK_AGAIN_S", 0.2)
    async with AsyncExitStack() as stack:
        urls = []
        for adapters in (("sql", "both"), ("both",), ()):
            engine = await stack.enter_async_context(emulated(speed_up=4.0, lora_modules=adapters))
            urls.append(await stack.enter_async_context(serving(engine.app)))
        fleet = await stack.enter_async_context(watched(*urls))
        found = Servers(fleet, urls)
        await until(lambda: found.lists("sql", "both"))
        yield found


async def test_names_that_engines_list_are_models_with_a_parent(servers: Servers) -> None:
    assert await servers.listed() == {MODEL: None, "sql": MODEL, "both": MODEL}
    shown = (await servers.fleet.http.get("/v1/models/sql")).json()
    assert (shown["id"], shown["parent"], shown["max_model_len"]) == ("sql", MODEL, 4096)
    missing = await servers.fleet.http.get("/v1/models/nothing")
    assert missing.status_code == 404
    assert "models: both, sql, tiny" in missing.json()["error"]["message"]


async def test_requests_go_to_engines_that_list_the_adapter(servers: Servers) -> None:
    for _ in range(6):
        answer = await servers.send_request("sql")
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "sql"
        assert answer.headers["x-replica"] == servers.name(0)
        assert (await servers.send_request("both")).headers["x-replica"] in (servers.name(0), servers.name(1))
        tokens = await servers.fleet.http.post("/tokenize", json={"model": "sql", "prompt": "hello"})
        assert tokens.status_code == 200, tokens.text


async def test_the_replica_that_recently_ran_an_adapter_runs_it_again(servers: Servers) -> None:
    first = (await servers.send_request("both")).headers["x-replica"]
    # The other replica has more free tokens now, but has not run the adapter.
    assert {(await servers.send_request("both")).headers["x-replica"] for _ in range(5)} == {first}


async def test_adapters_change_without_a_restart(servers: Servers) -> None:
    await servers.change_adapter(2, "load", "new")
    await until(lambda: servers.lists("sql", "both", "new"))
    answer = await servers.send_request("new")
    assert (answer.status_code, answer.headers["x-replica"]) == (200, servers.name(2))
    await servers.change_adapter(0, "unload", "sql")
    await until(lambda: servers.lists("both", "new"))
    rejected = await servers.send_request("sql")
    assert rejected.status_code == 404
    assert rejected.json()["error"]["code"] == "model_not_found"


def test_a_key_names_the_adapters_that_it_may_use() -> None:
    class Scheduler(FakeDispatcher):
        def adapters(self) -> dict[str, frozenset[str]]:
            return {"sql": frozenset({"r1"}), "both": frozenset({"r1"}), MODEL: frozenset({"r1"})}

    served = ServedModels((ServedModel(name=MODEL),), {MODEL: Scheduler([])})
    caller = Caller.with_key(record(models=(MODEL, "sql"))[0])
    assert [found.name for found in served.usable(caller)] == [MODEL, "sql"]
    assert served.find("sql", caller).models[0].adapter == "sql"
    # An adapter cannot take a configured name.
    assert served.find(MODEL, caller).models[0].adapter is None
    with pytest.raises(ForbiddenError, match="may not use the model 'both'"):
        served.find("both", caller)

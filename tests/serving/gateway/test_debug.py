"""What admins may see and stop, of every model behind a gateway."""

import httpx
import pytest

from serve_app.serving.gateway import ApiKey, Gateway, GatewaySettings, ServedModel
from tests.serving.gateway.builders import Answers

from .builders import FakeDispatcher


@pytest.mark.parametrize("path", ["/debug/queue", "/debug/status"])
async def test_each_scheduler_is_looked_into_and_a_silent_one_is_named(path: str) -> None:
    async def shown() -> dict[str, object]:
        return {"model": "a", "waiting": 3}

    async def of_another() -> dict[str, object]:
        return {"model": "not this"}

    async def silent() -> dict[str, object]:
        raise ConnectionError("gone")

    models = (ServedModel(name="a"), ServedModel(name="b"))
    dispatchers = {"a": FakeDispatcher([]), "b": FakeDispatcher([])}
    keys = (ApiKey(tenant="ops", key="k1", admin=True), ApiKey(tenant="t", key="k2"))
    settings = GatewaySettings(models=models, keys=keys)

    async def frozen(_: str) -> None:
        raise AssertionError

    wanted = Answers(queue=shown, status=of_another, freeze=frozen)
    if path == "/debug/status":
        wanted = Answers(queue=of_another, status=shown, freeze=frozen)
    views = {"a": wanted, "b": Answers(queue=silent, status=silent, freeze=frozen)}
    app = Gateway(settings, dispatchers, "gw", views)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gw") as http:
        answer = await http.get(path, headers={"authorization": "Bearer k1"})
        first, second = answer.json()["models"]
        refused = await http.get(path, headers={"authorization": "Bearer k2"})
    assert first == {"model": "a", "waiting": 3}
    assert second["model"] == "b"
    assert "gone" in second["error"]
    assert refused.json()["error"]["code"] == "not_allowed"


async def test_the_tuner_of_each_model_can_be_looked_at_alone() -> None:
    async def status() -> dict[str, object]:
        return {"model": "a", "waiting": 3, "tuner": {"mode": "on", "state": "searching"}}

    async def unused(_: str = "") -> dict[str, object]:
        raise AssertionError

    views = {"a": Answers(queue=unused, status=status, freeze=unused)}
    settings = GatewaySettings(
        models=(ServedModel(name="a"),), keys=(ApiKey(tenant="o", key="k", admin=True),)
    )
    app = Gateway(settings, {"a": FakeDispatcher([])}, "gw", views)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gw") as http:
        answer = await http.get("/debug/tuner", headers={"authorization": "Bearer k"})
    assert answer.json() == {"models": [{"model": "a", "mode": "on", "state": "searching"}]}


async def test_admins_freeze_and_thaw_every_tuner() -> None:
    heard: list[tuple[str, str]] = []

    async def nothing() -> dict[str, object]:
        return {}

    def views(model: str) -> Answers:
        async def freeze(reason: str) -> None:
            if model == "b" and not reason:
                raise ConnectionError("gone")
            heard.append((model, reason))

        return Answers(queue=nothing, status=nothing, freeze=freeze)

    models = (ServedModel(name="a"), ServedModel(name="b"))
    keys = (ApiKey(tenant="ops", key="k1", admin=True), ApiKey(tenant="t", key="k2"))
    dispatchers = {"a": FakeDispatcher([]), "b": FakeDispatcher([])}
    settings = GatewaySettings(models=models, keys=keys)
    app = Gateway(settings, dispatchers, "gw", {name: views(name) for name in "ab"})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gw") as http:
        admin, other = ({"authorization": f"Bearer {key}"} for key in ("k1", "k2"))
        assert (await http.post("/debug/tuner/freeze", headers=other)).status_code == 403
        assert heard == []
        (said, _) = (await http.post("/debug/tuner/freeze", headers=admin)).json()["models"]
        assert "no others are tried until POST /debug/tuner/thaw" in said["message"]
        assert heard == [("a", "frozen by an admin"), ("b", "frozen by an admin")]
        answer = (await http.post("/debug/tuner/thaw", headers=admin)).json()["models"]
    thawed = "the tuner is thawed: other values may be tried again"
    assert answer[0] == {"model": "a", "frozen": "", "message": thawed}
    assert "gone" in answer[1]["error"]


async def test_a_page_of_somebody_else_cannot_freeze_the_tuner_of_a_laptop() -> None:
    async def frozen(_: str = "") -> dict[str, object]:
        raise AssertionError

    views = {"a": Answers(queue=frozen, status=frozen, freeze=frozen)}
    app = Gateway(GatewaySettings(models=(ServedModel(name="a"),)), {"a": FakeDispatcher([])}, "gw", views)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gw") as http:
        answer = await http.post("/debug/tuner/freeze", headers={"origin": "https://evil.example"})
        looked = [await http.get(f"/debug/{view}") for view in ("queue", "status", "tuner")]
    assert [each.status_code for each in (answer, *looked)] == [401] * 4

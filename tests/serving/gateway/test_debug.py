"""Admin endpoints: inspection and cancellation, for every model behind a gateway."""

from typing import Any, NoReturn

import pytest

from tests.serving.gateway.builders import Answers, admin_client

OTHER = {"authorization": "Bearer k2"}


async def silent(*_: str) -> NoReturn:
    raise ConnectionError("gone")


@pytest.mark.parametrize("question", ["queue", "status"])
async def test_each_scheduler_is_queried_and_a_silent_one_is_named(question: str) -> None:
    async def shown() -> dict[str, Any]:
        return {"model": "a", "waiting": 3}

    views = {"a": Answers(**{question: shown}), "b": Answers(**{question: silent})}
    async with admin_client(views) as http:
        first, second = (await http.get(f"/debug/{question}")).json()["models"]
        rejected = await http.get(f"/debug/{question}", headers=OTHER)
    assert first == {"model": "a", "waiting": 3}
    assert second["model"] == "b"
    assert "gone" in second["error"]
    assert rejected.json()["error"]["code"] == "not_allowed"


async def test_the_tuner_of_each_model_can_be_inspected_alone() -> None:
    async def status() -> dict[str, Any]:
        return {"model": "a", "waiting": 3, "tuner": {"mode": "on", "state": "searching"}}

    async with admin_client({"a": Answers(status=status)}) as http:
        answer = await http.get("/debug/tuner")
    assert answer.json() == {"models": [{"model": "a", "mode": "on", "state": "searching"}]}


async def test_admins_freeze_and_thaw_every_tuner() -> None:
    freezes: list[tuple[str, str]] = []

    def views(model: str) -> Answers:
        async def freeze(reason: str) -> None:
            if model == "b" and not reason:
                raise ConnectionError("gone")
            freezes.append((model, reason))

        return Answers(freeze=freeze)

    async with admin_client({name: views(name) for name in "ab"}) as http:
        assert (await http.post("/debug/tuner/freeze", headers=OTHER)).status_code == 403
        assert freezes == []
        (answered, _) = (await http.post("/debug/tuner/freeze")).json()["models"]
        assert "there are no trials until POST /debug/tuner/thaw" in answered["message"]
        assert freezes == [("a", "frozen by an admin"), ("b", "frozen by an admin")]
        answer = (await http.post("/debug/tuner/thaw")).json()["models"]
    thawed = "the tuner is thawed: trials are allowed again"
    assert answer[0] == {"model": "a", "frozen": "", "message": thawed}
    assert "gone" in answer[1]["error"]


async def test_a_foreign_page_cannot_freeze_the_tuner_of_a_laptop() -> None:
    async with admin_client({"a": Answers()}, keys=()) as http:
        del http.headers["authorization"]
        answer = await http.post("/debug/tuner/freeze", headers={"origin": "https://evil.example"})
        looked = [await http.get(f"/debug/{view}") for view in ("queue", "status", "tuner")]
    assert [each.status_code for each in (answer, *looked)] == [401] * 4

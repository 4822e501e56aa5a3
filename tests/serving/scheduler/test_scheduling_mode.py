"""Scheduling mode of a live scheduler over HTTP: observe, partly active, active, and back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from serve_app.cli import main
from serve_app.core.learned_state import learned_state, restore_state
from serve_app.core.scheduler import Scheduler
from serve_app.serving.gateway import ApiKey
from tests.builders import settings
from tests.serving.gateway.builders import MODEL, Engine
from tests.serving.gateway.fleet import Fleet, fleet_of


@asynccontextmanager
async def fleet_with_admin(engine: Engine) -> AsyncIterator[tuple[Fleet, httpx.AsyncClient]]:
    async with fleet_of([engine], keys=(ApiKey(tenant="ops", key="sk-admin", admin=True),)) as fleet:
        fleet.http.headers["authorization"] = "Bearer sk-admin"
        yield fleet, fleet.http


async def test_observe_then_a_part_then_all_and_back_by_one_command_each() -> None:
    async with fleet_with_admin(Engine(token_delay_s=0.01)) as (_fleet, http):

        async def send_request(count: int) -> list[httpx.Response]:
            body = {"model": MODEL, "prompt": "hello", "max_tokens": 2, "stream": True}
            return list(
                await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(count)))
            )

        shown = (await http.get("/admin/mode")).json()["models"][0]
        assert (shown["mode"], shown["active_share"]) == ("active", 1.0)
        changed = await http.post("/admin/mode", json={"active_share": 0.0})
        assert changed.json()["models"][0]["mode"] == "observe"
        answers = await send_request(20)
        assert all(answer.status_code == 200 for answer in answers)
        assert {answer.headers.get("x-scheduled") for answer in answers} == {"no"}
        await http.post("/admin/mode", json={"active_share": 0.5, "model": MODEL})
        parts = {answer.headers.get("x-scheduled") for answer in await send_request(40)}
        assert parts == {"no", None}
        measured = (await http.get("/admin/mode")).json()["models"][0]["measured"]
        scheduled, bypassed = measured["scheduled"]["all"], measured["bypassed"]["all"]
        assert scheduled["requests"] + bypassed["requests"] == 60
        assert min(scheduled["requests"], bypassed["requests"]) >= 5
        assert 0 < bypassed["ttft_p50_s"] <= bypassed["ttft_p99_s"]
        assert measured["bypassed"]["short"]["requests"] == bypassed["requests"]
        await http.post("/admin/mode", json={"active_share": 1})
        assert {answer.headers.get("x-scheduled") for answer in await send_request(5)} == {None}
        document = (await http.get("/admin/mode")).json()["models"][0]
        found = [
            (each["mode"], each["scheduled"]["all"]["requests"], each["bypassed"]["all"]["requests"])
            for each in document["windows"]
        ]
        split = scheduled["requests"], bypassed["requests"] - 20
        assert found == [("active", 0, 0), ("observe", 0, 20), ("partly active", *split), ("active", 5, 0)]
        assert document["measured"] == measured
        ends = [(each["since"], each["until"]) for each in document["windows"]]
        assert [until for _, until in ends[:-1]] == [since for since, _ in ends[1:]]
        assert ends[-1][1] is None


async def test_the_command_line_shows_and_changes_it(capsys: pytest.CaptureFixture[str]) -> None:
    async with fleet_with_admin(Engine()) as (fleet, http):
        where = ["--url", str(http.base_url), "--api-key", "sk-admin"]

        async def mode(*words: str) -> tuple[int, str]:
            status = await asyncio.to_thread(main, ["mode", *words, *where])
            return status, capsys.readouterr().out

        assert await mode() == (0, "tiny: active, 100% of the requests are scheduled\n")
        assert await mode("observe") == (0, "tiny: observe, 0% of the requests are scheduled\n")
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 2, "stream": True}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        _, shown = await mode("active", "--share", "10%")
        assert shown.startswith("tiny: partly active, 10% of the requests are scheduled\n")
        assert "| bypassed " in shown
        assert fleet.control_plane.live.mode.active_share == 0.1
        assert (await mode("active"))[1].startswith("tiny: active, 100%")
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        _, shown = await mode()
        observed, active = shown.splitlines()[-2:]
        assert "| 0%" in observed
        assert "| bypassed " in observed
        assert "| now" in active
        assert "| 100%" in active
        assert "| scheduled " in active


@pytest.mark.parametrize("words", [["active", "--share", "150%"], ["off"]])
def test_words_that_make_no_sense_are_rejected(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["mode", *words])
    assert ended.value.code == 2


def test_a_share_belongs_to_active(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mode", "observe", "--share", "0.5"]) == 2
    assert "--share needs `mode active`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"active_share": 1.5}, "a share from 0 to 1"),
        ({"share": 0.5}, "the body must be like"),
        ({"active_share": 0.5, "model": "other"}, "models: tiny"),
    ],
)
async def test_mistakes_are_reported_and_change_nothing(body: dict[str, Any], says: str) -> None:
    async with fleet_with_admin(Engine()) as (fleet, http):
        answer = await http.post("/admin/mode", json=body)
        assert (answer.status_code, says in answer.text) == (400, True), answer.text
        assert fleet.control_plane.live.mode.active_share == 1


async def test_the_tuner_tries_nothing_while_others_pass_by() -> None:
    async with fleet_of([Engine()]) as fleet:
        live = fleet.control_plane.live
        live.mode.change(0.25)
        observed = live.tuner.observed(outcomes=True)
        assert observed.frozen == "75% of the requests are not scheduled (mode)"
        live.mode.change(1.0)
        assert live.tuner.observed(outcomes=True).frozen == ""


def test_a_choice_holds_after_a_restart_until_the_configuration_changes() -> None:
    before = Scheduler(settings())
    before.pass_through.change(0.2)
    kept = learned_state(before)
    same, other = Scheduler(settings()), Scheduler(settings(active_share=0.5))
    restore_state(same, kept)
    restore_state(other, kept)
    assert (same.pass_through.active_share, other.pass_through.active_share) == (0.2, 0.5)


def test_a_state_of_a_version_before_the_mode_is_taken_over() -> None:
    kept = learned_state(Scheduler(settings()))
    for name in ("active_share", "configured_active_share"):
        kept.pop(name)
    later = Scheduler(settings(active_share=0.5))
    restore_state(later, kept)
    assert later.pass_through.active_share == 0.5

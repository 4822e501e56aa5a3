"""Latency targets and longest gaps of streams: clients over HTTP, a live scheduler and scripted engines."""

import asyncio
from typing import Any

import httpx
import pytest

from serve_app.core.latency_targets import TargetLimits
from serve_app.request import LatencyTarget
from serve_app.serving.gateway.settings import RouteSettings
from tests.serving.channel.harness import wait_until
from tests.serving.gateway.builders import MODEL, Engine, chat
from tests.serving.gateway.conftest import GatewayHarness
from tests.serving.gateway.fleet import Fleet, fleet_of
from tests.serving.gateway.test_routes import served

CHAT = "/v1/chat/completions"
TTFT, TPOT = "x-slo-ttft-ms", "x-slo-tpot-ms"


async def samples(http: httpx.AsyncClient, start: str) -> dict[str, float]:
    """Return the lines of the page of metrics that begin with a name."""
    page = (await http.get("/metrics")).text
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if line.startswith(start)]
    return {name.removeprefix(start): float(value) for name, value in lines}


async def receipt(fleet: Fleet, name: str) -> dict[str, Any]:
    live = fleet.control_plane.live
    return await live.receipts.document(name, live.now())


def counted(target: str, result: str) -> str:
    return f'{{class="default",model="{MODEL}",result="{result}",target="{target}",tenant="default"}}'


# What clients send.


@pytest.mark.parametrize("prefix", ["x-slo-", "x-llm-d-slo-"])
async def test_a_target_is_read_from_own_headers_and_those_of_llm_d(
    harness: GatewayHarness, prefix: str
) -> None:
    headers = {f"{prefix}ttft-ms": "1500", f"{prefix}tpot-ms": "33.5", "x-slo": "Refuse"}
    assert (await harness.http.post(CHAT, json=chat(), headers=headers)).status_code == 200
    expected = LatencyTarget(ttft_s=1.5, tpot_s=0.0335, refuse=True)
    assert harness.dispatcher.submissions[-1].target == expected
    await harness.http.post(CHAT, json=chat())
    assert harness.dispatcher.submissions[-1].target is None


@pytest.mark.parametrize("name", [TTFT, TPOT])
@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", "86400001", ""])
async def test_a_target_that_is_no_sensible_number_is_an_error_with_its_range(
    harness: GatewayHarness, name: str, value: str
) -> None:
    answer = await harness.http.post(CHAT, json=chat(), headers={name: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == name
    assert "a number of milliseconds above 0, up to 86400000" in error["message"]


async def test_another_word_than_refuse_is_an_error(harness: GatewayHarness) -> None:
    answer = await harness.http.post(CHAT, json=chat(), headers={"x-slo": "please"})
    assert answer.status_code == 400
    assert "accepted: refuse" in answer.json()["error"]["message"]


async def test_a_target_of_another_gateway_with_an_impossible_value_is_ignored_and_counted(
    harness: GatewayHarness,
) -> None:
    answer = await harness.http.post(CHAT, json=chat(), headers={"x-llm-d-slo-ttft-ms": "soon"})
    assert answer.status_code == 200
    assert harness.dispatcher.submissions[-1].target is None
    assert sum((await samples(harness.http, "ewsjf_gateway_ignored_headers_total")).values()) == 1


async def test_requests_of_a_route_have_its_target_unless_they_state_one() -> None:
    limits = TargetLimits(ttft_s=2.0, tpot_s=0.05)
    route = RouteSettings(name="assistant", models={"stable": 1}, latency_target=limits)
    async with served(route) as models:
        await models.send_request()
        await models.send_request(headers={TTFT: "500"})
        await models.send_request("stable")
        of_route, own, direct = (each.target for each in models.schedulers["stable"].submissions)
    assert of_route == LatencyTarget(ttft_s=2.0, tpot_s=0.05)
    assert own == LatencyTarget(ttft_s=0.5, tpot_s=0.05)
    assert direct is None


# What becomes of it.


async def test_met_and_missed_targets_are_counted_and_in_receipts() -> None:
    async with fleet_of([Engine(token_delay_s=0.05)]) as fleet:
        for name, limits in (("in-time", {TTFT: "60000", TPOT: "60000"}), ("late", {TTFT: "1", TPOT: "1"})):
            body, headers = chat(stream=True, max_tokens=4), {"x-request-id": name, **limits}
            assert (await fleet.http.post(CHAT, json=body, headers=headers)).status_code == 200
        found = await samples(fleet.http, "ewsjf_latency_targets_total")
        expected = [(target, result) for target in ("ttft", "tpot") for result in ("met", "missed")]
        assert found == {counted(*each): 1.0 for each in expected}
        target = (await receipt(fleet, "late"))["latency_target"]
        assert (target["ttft_ms"], target["tpot_ms"], target["refuse"]) == (1.0, 1.0, False)
        assert target["ttft_met"] is False
        assert target["expected_ttft_ms"] > 0
        assert (await receipt(fleet, "in-time"))["latency_target"]["ttft_met"] is True


async def test_a_refused_request_gets_429_with_the_expected_time_and_a_retry_after() -> None:
    async with fleet_of([Engine()]) as fleet:
        # It has to learn that they are always missed.
        for _ in range(30):
            await fleet.http.post(CHAT, json=chat(stream=True), headers={TTFT: "0.001"})
        headers = {TTFT: "0.001", "x-slo": "refuse"}
        refused = await fleet.http.post(CHAT, json=chat(stream=True), headers=headers)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert "the first token is expected after" in error["message"]
        assert "the chance to miss the target of 0.001 ms is 100%" in error["message"]
        assert "even on an idle replica" in error["message"]
        assert (await samples(fleet.http, "ewsjf_latency_targets_total"))[counted("ttft", "refused")] == 1.0


# The longest gap.


async def test_the_longest_gap_of_a_stream_and_its_cause_are_in_its_receipt() -> None:
    engine = Engine(token_delay_s=0.05)
    async with fleet_of([engine]) as fleet:

        async def ask(name: str, content: str, count: int) -> None:
            body = chat(stream=True, max_tokens=count, messages=[{"role": "user", "content": content}])
            answer = await fleet.http.post(CHAT, json=body, headers={"x-request-id": name})
            assert answer.status_code == 200

        await ask("alone", "hi", 4)
        runs = asyncio.create_task(ask("beside", "hi", 8))
        await wait_until(lambda: len(engine.bodies) == 2)
        await asyncio.gather(runs, *(ask(f"prefill-{number}", "long " * 200, 4) for number in range(3)))
        alone, beside = [(await receipt(fleet, name))["longest_gap"] for name in ("alone", "beside")]
        assert alone["cause"] == "other"
        assert alone["prefill_tokens"] == 0
        assert 45 < alone["ms"] < 5_000
        causes = await samples(fleet.http, "ewsjf_longest_gap_seconds_count")
        assert sum(causes.values()) == 5
        assert beside["cause"] in {"prefill", "other"}
        assert (beside["cause"] == "prefill") == (beside["prefill_tokens"] > 100)


async def test_an_answer_that_is_not_streamed_has_no_gap() -> None:
    async with fleet_of([Engine()]) as fleet:
        answer = await fleet.http.post(CHAT, json=chat(), headers={"x-request-id": "whole"})
        assert answer.status_code == 200
        assert (await receipt(fleet, "whole"))["longest_gap"] is None

"""Headers of other gateways: what they mean here, and that none of them ever fails a request."""

from collections.abc import Mapping
from typing import Any

import pytest

from serve_app.errors import Outcome
from serve_app.request import LatencyTarget, PriorityClass
from serve_app.serving.gateway import ApiKey
from serve_app.serving.gateway.request.fields import ObjectiveSettings
from tests.serving.gateway.builders import chat, rejection
from tests.serving.gateway.conftest import GatewayHarness, running_gateway

CHAT = "/v1/chat/completions"
FAIRNESS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
OBJECTIVE = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
TTL = "x-llm-d-inference-ttl"


async def submission(harness: GatewayHarness, headers: dict[str, str], **fields: Any) -> Any:
    """Send a request, and return its submission."""
    answer = await harness.http.post(CHAT, json=chat(**fields), headers=headers)
    assert answer.status_code == 200, answer.text
    return harness.dispatcher.submissions[-1]


async def ignored(harness: GatewayHarness) -> dict[str, float]:
    """Return the counts of ignored headers by name, from the page of metrics."""
    name = "ewsjf_gateway_ignored_headers_total{"
    page = (await harness.http.get("/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith(name)]
    return {line.split('header="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


async def ignored_objectives(harness: GatewayHarness) -> dict[str, float]:
    """Return the counts of ignored objectives by name, from the page of metrics."""
    found = {}
    for line in (await harness.http.get("/metrics")).text.splitlines():
        if line.startswith("ewsjf_gateway_ignored_headers_total{") and f'header="{OBJECTIVE[0]}"' in line:
            found[line.split('objective="')[1].split('"')[0]] = float(line.split()[-1])
    return found


@pytest.mark.parametrize("name", FAIRNESS)
async def test_a_fairness_id_is_the_tenant(harness: GatewayHarness, name: str) -> None:
    assert (await submission(harness, {name: "team"}, user="someone")).tenant == "team"
    assert (await submission(harness, {name: "team", "x-tenant": "own"})).tenant == "own"
    assert await ignored(harness) == {}


@pytest.mark.parametrize("name", OBJECTIVE)
async def test_an_objective_with_the_name_of_a_class_is_the_class(harness: GatewayHarness, name: str) -> None:
    assert (await submission(harness, {name: "Batch"})).priority is PriorityClass.BATCH
    headers = {name: "batch", "x-priority": "interactive"}
    assert (await submission(harness, headers)).priority is PriorityClass.INTERACTIVE


PREMIUM: Mapping[str, Any] = {
    "class": "interactive",
    "queue_timeout_s": 20.5,
    "latency_target": {"ttft_s": 0.3, "tpot_s": 0.05, "refuse": True},
}


@pytest.mark.parametrize("name", OBJECTIVE)
async def test_an_objective_gives_what_the_request_does_not_state(harness: GatewayHarness, name: str) -> None:
    harness.gateway.change({"objectives": {"premium-traffic": PREMIUM, "nightly": {"class": "batch"}}})
    found = await submission(harness, {name: "premium-traffic"})
    assert (found.priority, found.queue_timeout_s) == (PriorityClass.INTERACTIVE, 20.5)
    assert found.target == LatencyTarget(ttft_s=0.3, tpot_s=0.05, refuse=True)
    found = await submission(harness, {name: "nightly"})
    assert (found.priority, found.queue_timeout_s, found.target) == (PriorityClass.BATCH, None, None)

    stated = {"x-priority": "default", TTL: "1500ms", "x-slo-ttft-ms": "900"}
    found = await submission(harness, {name: "premium-traffic", **stated})
    assert (found.priority, found.queue_timeout_s) == (PriorityClass.DEFAULT, 1.5)
    assert found.target == LatencyTarget(ttft_s=0.9, tpot_s=0.05, refuse=True)
    assert await ignored(harness) == {}


async def test_configured_objectives_precede_those_of_the_cluster_and_these_the_names_of_classes(
    harness: GatewayHarness,
) -> None:
    async def classes(*names: str) -> list[PriorityClass]:
        return [(await submission(harness, {OBJECTIVE[1]: name})).priority for name in names]

    default, interactive, batch = PriorityClass.DEFAULT, PriorityClass.INTERACTIVE, PriorityClass.BATCH
    harness.gateway.show_objectives("pool", {"premium": 100, "batch": 5, "standard": 0, "nightly": -10})
    assert await classes("premium", "batch", "standard", "nightly") == [
        interactive,
        interactive,
        default,
        batch,
    ]
    harness.gateway.change({"objectives": {"Premium": {"class": "batch"}}})
    assert await classes("premium", "PREMIUM", "batch", "interactive") == [
        batch,
        batch,
        interactive,
        interactive,
    ]
    harness.gateway.show_objectives("pool", {})
    harness.gateway.change({"objectives": {}})
    assert await classes("premium", "batch") == [default, batch]


async def test_unknown_objectives_are_counted_by_name_up_to_a_bound_and_have_no_effect() -> None:
    keys = (
        ApiKey(tenant="slow", key="slow", default_class=PriorityClass.BATCH),
        ApiKey(tenant="ops", key="ops", admin=True),
    )
    async with running_gateway(keys=keys) as harness:

        async def sent(name: str) -> PriorityClass:
            headers = {"authorization": "Bearer slow", OBJECTIVE[0]: name}
            return (await submission(harness, headers)).priority  # type: ignore[no-any-return]

        assert await sent("two words") is PriorityClass.BATCH
        for number in range(40):
            await sent(f"o{number}")
        await sent("O3")
        harness.http.headers["authorization"] = "Bearer ops"
        counts = await ignored_objectives(harness)
        assert counts == {**{f"o{number}": 1.0 for number in range(31)}, "o3": 2.0, "other": 10.0}

        page = (await harness.http.get("/debug/status")).json()
        assert page["unknown_objectives"] == counts
        assert page["known_objectives"] == ["batch", "default", "interactive"]
        harness.gateway.change({"objectives": {f"o{number}": {} for number in range(40)}})
        page = (await harness.http.get("/debug/status")).json()
        assert page["unknown_objectives"] == {"other": 10}


@pytest.mark.parametrize(
    ("value", "seconds"), [("1500ms", 1.5), ("1m30s", 90.0), (".5h", 1800.0), ("2us", 2e-6)]
)
async def test_a_ttl_is_the_queue_timeout(harness: GatewayHarness, value: str, seconds: float) -> None:
    assert (await submission(harness, {TTL: value})).queue_timeout_s == pytest.approx(seconds)
    assert (await submission(harness, {TTL: value, "x-queue-timeout-s": "7"})).queue_timeout_s == 7.0


async def test_impossible_values_are_ignored_and_counted_once_each(
    harness: GatewayHarness, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        headers = {FAIRNESS[0]: "two words", OBJECTIVE[1]: "premium", TTL: "soon"}
        found = await submission(harness, headers)
        assert (found.tenant, found.priority, found.queue_timeout_s) == (
            "default",
            PriorityClass.DEFAULT,
            None,
        )
    for value in ("-1s", "1", "1s2", "0s", "25h", "1e3s"):
        assert (await submission(harness, {TTL: value})).queue_timeout_s is None, value
    assert await ignored(harness) == {FAIRNESS[0]: 2, OBJECTIVE[1]: 2, TTL: 8}
    assert sum("event=ignored_header" in each.message for each in caplog.records) == 3


async def test_a_key_decides_which_values_are_allowed() -> None:
    keys = (
        ApiKey(tenant="team", key="own", highest_class=PriorityClass.DEFAULT),
        ApiKey(tenant="proxy", key="proxy", may_act_for_tenants=True, admin=True),
    )
    objectives = {"premium": ObjectiveSettings(class_=PriorityClass.INTERACTIVE, queue_timeout_s=5.0)}
    async with running_gateway(keys=keys, objectives=objectives) as harness:
        headers = {FAIRNESS[0]: "guest", OBJECTIVE[0]: "interactive"}
        found = await submission(harness, {"authorization": "Bearer own", **headers})
        assert (found.tenant, found.priority) == ("team", PriorityClass.DEFAULT)
        found = await submission(harness, {"authorization": "Bearer proxy", **headers})
        assert (found.tenant, found.priority) == ("guest", PriorityClass.INTERACTIVE)

        found = await submission(harness, {"authorization": "Bearer own", OBJECTIVE[0]: "premium"})
        assert (found.priority, found.queue_timeout_s) == (PriorityClass.DEFAULT, None)
        found = await submission(harness, {"authorization": "Bearer proxy", OBJECTIVE[0]: "premium"})
        assert (found.priority, found.queue_timeout_s) == (PriorityClass.INTERACTIVE, 5.0)
        harness.http.headers["authorization"] = "Bearer proxy"
        assert await ignored_objectives(harness) == {"interactive": 1, "premium": 1}
        assert "unknown_objectives" not in (await harness.http.get("/debug/status")).json()


async def test_a_slow_body_is_counted_once(harness: GatewayHarness) -> None:
    async def pieces() -> Any:
        yield b'{"model": "tiny", "messages": '
        yield b'[{"role": "user", "content": "hi"}]}'

    headers = {"content-type": "application/json", TTL: "soon"}
    assert (await harness.http.post(CHAT, content=pieces(), headers=headers)).status_code == 200
    assert await ignored(harness) == {TTL: 1}


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome.REJECTED_QUEUE_FULL, "rejected-saturated"),
        (Outcome.REJECTED_DEADLINE_UNMEETABLE, "rejected-saturated"),
        (Outcome.EXPIRED, "rejected-ttl-expired"),
        (Outcome.REJECTED_RATE_LIMITED, None),
    ],
)
async def test_a_rejection_has_the_reason_of_the_field(
    harness: GatewayHarness, outcome: Outcome, reason: str | None
) -> None:
    harness.dispatcher.script.append(rejection(outcome, "no", retry_after_s=1.0))
    answer = await harness.http.post(CHAT, json=chat())
    assert answer.headers.get("x-llm-d-request-dropped-reason") == reason

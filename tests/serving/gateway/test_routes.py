"""Routes: shares of models, requests that stay with one model, fallbacks, and the names that clients see."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import Outcome, SettingsError
from serve_app.serving.api_keys import changed_keys
from serve_app.serving.gateway import Gateway, GatewaySettings, ServedModel
from serve_app.serving.gateway.settings import RouteSettings
from tests.serving.channel.harness import wait_until
from tests.serving.test_api_keys import record

from .builders import Engine, FakeDispatcher, error_json, http_client, rejection, replies, serving

MESSAGES: Any = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
NAMES = ("stable", "new", "large")
TOO_LONG = "This model's maximum context length is 512 tokens. However, your prompt contains 900 input tokens"


@dataclass
class Models:
    """A gateway with three models, each with an engine and a scheduler."""

    engines: dict[str, Engine] = field(default_factory=dict)
    schedulers: dict[str, FakeDispatcher] = field(default_factory=dict)
    gateway: Gateway = field(init=False)
    http: httpx.AsyncClient = field(init=False)

    async def send_request(
        self, model: str = "assistant", headers: Any = None, **body: Any
    ) -> httpx.Response:
        request_body = {"model": model, "messages": MESSAGES, "max_tokens": 4, **body}
        return await self.http.post(CHAT, json=request_body, headers=headers)

    async def respond(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/responses", json={"model": "assistant", "input": "hello", **body})

    def named(self, model: str) -> str:
        """Return the name that the first request to a model's engine has."""
        return str(json.loads(self.engines[model].bodies[0])["model"])

    def reject(self, model: str, outcome: Outcome, retry_after_s: float | None = None) -> None:
        """Let a model's scheduler reject the next request."""
        self.schedulers[model].script.append(rejection(outcome, f"{model} says no", retry_after_s))


@asynccontextmanager
async def served(*routes: RouteSettings, **settings: Any) -> AsyncIterator[Models]:
    models = Models()
    async with AsyncExitStack() as stack:
        for name in NAMES:
            models.engines[name] = engine = Engine()
            models.schedulers[name] = FakeDispatcher([await stack.enter_async_context(serving(engine))])
        complete = GatewaySettings(
            models=tuple(ServedModel(name=name, max_model_len=4096) for name in NAMES),
            routes=routes,
            **settings,
        )
        models.gateway = Gateway(complete, models.schedulers, "g")
        models.http = await stack.enter_async_context(http_client(models.gateway))
        yield models


ROUTE = RouteSettings(name="assistant", models={"stable": 1}, fallbacks=("new", "large"))


# -- shares -----------------------------------------------------------------------------------------------


def chosen(route: RouteSettings, count: int = 4_000) -> list[str]:
    return [route.order(f"session-{number}")[0] for number in range(count)]


@pytest.mark.parametrize("weights", [(9, 1), (1, 1), (0, 1), (0.25, 0.75)])
def test_models_receive_their_shares_of_the_sessions(weights: tuple[float, float]) -> None:
    picks = Counter(chosen(RouteSettings(name="a", models=dict(zip(NAMES, weights, strict=False)))))
    share = weights[0] / sum(weights)
    # Four standard deviations of 4,000 draws.
    assert picks["stable"] / 4_000 == pytest.approx(share, abs=0.032 if share else 0)


def test_a_larger_canary_keeps_its_sessions() -> None:
    small = chosen(RouteSettings(name="a", models={"stable": 95, "new": 5}))
    large = chosen(RouteSettings(name="a", models={"stable": 80, "new": 20}))
    assert [after for before, after in zip(small, large, strict=True) if before == "new"] == [
        "new"
    ] * small.count("new")


@given(st.text(), st.dictionaries(st.text(min_size=1), st.floats(0, 1e12), min_size=1))
def test_every_subject_has_a_model_with_a_weight(subject: str, models: dict[str, float]) -> None:
    if any(models.values()):
        assert models[RouteSettings(name="a", models=models).order(subject)[0]] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": {}}, "weight above 0"),
        ({"models": {"stable": 0}}, "weight above 0"),
        ({"models": {"stable": -1}}, "weight of stable must be 0 or more, got -1"),
        ({"models": {"stable": float("nan")}}, "weight of stable must be 0 or more"),
        ({"name": ""}, "name must not be empty"),
        ({"models": {"stabel": 1}}, "unknown model 'stabel'; did you mean 'stable'?"),
        ({"fallbacks": ("gpt",)}, "unknown model 'gpt'; models: stable, new, large"),
    ],
)
def test_impossible_routes_are_rejected_with_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((SettingsError, ValueError)) as caught:
        GatewaySettings(
            models=tuple(ServedModel(name=name) for name in NAMES),
            routes=(RouteSettings(**{"name": "a", "models": {"stable": 1}, **changes}),),
        )
    assert message in str(caught.value)


def test_a_route_has_one_entry() -> None:
    with pytest.raises(SettingsError, match="the name assistant twice"):
        GatewaySettings(models=tuple(ServedModel(name=name) for name in NAMES), routes=(ROUTE, ROUTE))


# -- requests ---------------------------------------------------------------------------------------------


async def test_the_engine_receives_its_own_name_and_the_client_learns_it() -> None:
    async with served(ROUTE) as models:
        answer = await models.send_request()
        assert answer.status_code == 200
        assert answer.headers["x-served-model"] == "stable"
        assert models.named("stable") == "stable"
        assert models.schedulers["stable"].submissions[0].spec.model == "stable"
        assert "x-served-model" not in (await models.send_request("new")).headers


@pytest.mark.parametrize("header", ["x-session-id", "thread-id"])
async def test_a_session_stays_with_its_model_and_others_divide(header: str) -> None:
    async with served(RouteSettings(name="assistant", models={"stable": 1, "new": 1})) as models:
        one = {(await models.send_request(headers={header: "a"})).headers["x-served-model"] for _ in range(8)}
        users = {(await models.send_request(user="maria")).headers["x-served-model"] for _ in range(8)}
        every = {(await models.send_request()).headers["x-served-model"] for _ in range(32)}
        assert (len(one), len(users), every) == (1, 1, {"stable", "new"})


async def test_a_tenant_stays_with_its_model() -> None:
    route = RouteSettings(name="assistant", models={"stable": 1, "new": 1}, sticky_by="tenant")
    async with served(route) as models:
        found: dict[str, set[str]] = {}
        for number in range(48):
            tenant = f"t{number % 12}"
            answer = await models.send_request(headers={"x-tenant": tenant})
            found.setdefault(tenant, set()).add(answer.headers["x-served-model"])
        assert all(len(each) == 1 for each in found.values())
        assert set.union(*found.values()) == {"stable", "new"}


async def test_a_route_may_have_the_name_of_a_model() -> None:
    async with served(RouteSettings(name="stable", models={"new": 1})) as models:
        assert (await models.send_request("stable")).headers["x-served-model"] == "new"
        listed = (await models.http.get("/v1/models")).json()["data"]
        assert sorted(each["id"] for each in listed) == ["large", "new", "stable"]
        shown = (await models.http.get("/v1/models/stable")).json()
        assert shown["route"] == {"models": {"new": 1}, "fallbacks": []}


async def test_forms_name_the_model_that_serves_them() -> None:
    async with served(ROUTE) as models:
        answer = await models.http.post(
            "/v1/audio/transcriptions", data={"model": "assistant"}, files={"file": ("a.wav", b"0123")}
        )
        assert answer.headers["x-served-model"] == "stable"
        sent = models.engines["stable"].bodies[0]
        assert b"assistant" not in sent
        assert b"\r\n\r\nstable\r\n" in sent
        assert b"0123" in sent


async def test_tokenize_uses_a_model_of_the_route() -> None:
    async with served(ROUTE) as models:
        models.schedulers["stable"].ports = []
        await models.http.post("/tokenize", json={"model": "assistant", "prompt": "hello"})
        assert models.named("new") == "new"


async def test_a_key_for_a_route_allows_the_route_only(tmp_path: Path) -> None:
    kept, secret = record(models=("assistant",))
    changed_keys(tmp_path / "keys.json", lambda _: [kept])
    async with served(ROUTE, keys_file=str(tmp_path / "keys.json")) as models:
        headers = {"authorization": f"Bearer {secret}"}
        assert (await models.send_request(headers=headers)).status_code == 200
        assert (await models.send_request("stable", headers=headers)).status_code == 403
        listed = (await models.http.get("/v1/models", headers=headers)).json()["data"]
        assert [each["id"] for each in listed] == ["assistant"]


async def test_a_conversation_continues_where_its_response_is_stored() -> None:
    async with served(RouteSettings(name="assistant", models={"stable": 1, "new": 1})) as models:
        first = await models.respond()
        for _ in range(12):
            answer = await models.respond(previous_response_id=first.json()["id"])
            assert answer.headers["x-served-model"] == first.headers["x-served-model"]


async def test_a_model_without_a_replica_has_no_share() -> None:
    async with served(RouteSettings(name="assistant", models={"stable": 1, "new": 9})) as models:
        models.schedulers["new"].ports = []
        seen = {
            (await models.send_request(headers={"x-session-id": str(n)})).headers["x-served-model"]
            for n in range(12)
        }
        assert seen == {"stable"}
        models.schedulers["stable"].ports = []
        models.reject("stable", Outcome.REJECTED_NO_REPLICA)
        models.reject("new", Outcome.REJECTED_NO_REPLICA)
        assert (await models.send_request()).status_code == 503


# -- fallbacks --------------------------------------------------------------------------------------------


async def test_a_rejected_request_falls_back() -> None:
    outcomes = (
        Outcome.REJECTED_QUEUE_FULL,
        Outcome.REJECTED_DEADLINE_UNMEETABLE,
        Outcome.REJECTED_NO_REPLICA,
        Outcome.REJECTED_TOO_LONG,
        Outcome.EXPIRED,
        Outcome.FAILED,
    )
    async with served(ROUTE) as models:
        for outcome in outcomes:
            for stream in (False, True):
                models.reject("stable", outcome)
                answer = await models.send_request(stream=stream)
                assert (answer.status_code, answer.headers["x-served-model"]) == (200, "new"), outcome
                assert answer.text.endswith("data: [DONE]\n\n") is stream
        assert {json.loads(body)["model"] for body in models.engines["new"].bodies} == {"new"}
        page = (await models.http.get("/metrics")).text
        for outcome in outcomes:
            labels = f'fallback="new",gateway="g",model="stable",reason="{outcome}",route="assistant"'
            assert f"ewsjf_gateway_fallbacks_total{{{labels}}} 2.0" in page
        assert set(models.gateway.telemetry.in_flight.values()) == {0}


async def test_the_wait_at_the_first_model_is_no_overhead() -> None:
    async with served(ROUTE) as models:
        stable = models.schedulers["stable"]
        stable.script.append(rejection(Outcome.REJECTED_QUEUE_FULL))
        stable.gate.clear()
        asyncio.get_running_loop().call_later(0.5, stable.gate.set)
        assert (await models.send_request()).headers["x-served-model"] == "new"
        page = (await models.http.get("/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("ewsjf_overhead_seconds_sum{")]
    assert any('model="new"' in line for line in lines)
    assert all(float(line.split()[-1]) < 0.4 for line in lines), lines


async def test_fallbacks_are_tried_in_their_order() -> None:
    async with served(ROUTE) as models:
        models.reject("stable", Outcome.REJECTED_NO_REPLICA)
        models.reject("new", Outcome.REJECTED_QUEUE_FULL)
        assert (await models.send_request()).headers["x-served-model"] == "large"


async def test_without_a_willing_model_the_client_learns_when_to_retry() -> None:
    async with served(ROUTE) as models:
        models.reject("stable", Outcome.REJECTED_QUEUE_FULL, 7.0)
        models.reject("new", Outcome.REJECTED_QUEUE_FULL, 3.0)
        models.reject("large", Outcome.REJECTED_TOO_LONG)
        answer = await models.send_request()
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
        assert "new says no" in answer.text


@pytest.mark.parametrize("outcome", [Outcome.REJECTED_RATE_LIMITED, Outcome.REJECTED_STOPPING])
async def test_limits_of_a_key_are_not_evaded(outcome: Outcome) -> None:
    async with served(ROUTE) as models:
        models.reject("stable", outcome)
        assert (await models.send_request()).status_code in {429, 503}
        assert models.schedulers["new"].submissions == []


async def test_an_engine_that_fails_twice_is_left() -> None:
    async with served(ROUTE) as models:
        models.engines["stable"].answers.extend([replies(500, error_json("out of memory", 500))] * 2)
        answer = await models.send_request()
        assert (answer.status_code, answer.headers["x-served-model"]) == (200, "new")
        assert models.schedulers["stable"].outcomes() == [Outcome.FAILED]
        assert models.schedulers["new"].outcomes() == [Outcome.COMPLETED]


async def test_an_engine_whose_context_is_too_short_is_left() -> None:
    async with served(ROUTE) as models:
        models.engines["stable"].answers.append(replies(400, error_json(TOO_LONG)))
        models.schedulers["stable"].script.extend(
            [models.schedulers["stable"].ports[0], rejection(Outcome.REJECTED_TOO_LONG)]
        )
        assert (await models.send_request()).headers["x-served-model"] == "new"


async def test_requests_wait_less_while_a_fallback_remains() -> None:
    route = RouteSettings(name="assistant", models={"stable": 1}, fallbacks=("new",), fallback_after_s=2.0)
    async with served(route) as models:
        models.reject("stable", Outcome.EXPIRED)
        await models.send_request()
        models.reject("stable", Outcome.EXPIRED)
        await models.send_request(headers={"x-queue-timeout-s": "1"})
        assert [each.queue_timeout_s for each in models.schedulers["stable"].submissions] == [2.0, 1.0]
        first, second = (each.queue_timeout_s for each in models.schedulers["new"].submissions)
        assert first is None
        assert second is not None
        assert 0 < second < 1


async def test_the_clients_own_timeout_ends_the_search() -> None:
    async with served(ROUTE) as models:
        models.schedulers["stable"].gate.clear()
        models.reject("stable", Outcome.EXPIRED)
        asking = models.send_request(headers={"x-queue-timeout-s": "0.05"})
        task = asyncio.create_task(asking)
        await asyncio.sleep(0.1)
        models.schedulers["stable"].gate.set()
        assert (await task).status_code == 504
        assert models.schedulers["new"].submissions == []


async def test_the_wait_at_the_model_before_is_a_stage_apart_from_the_gateways() -> None:
    async with served(ROUTE) as models:
        models.schedulers["stable"].gate.clear()
        models.reject("stable", Outcome.EXPIRED)
        task = asyncio.create_task(models.send_request(headers={"x-ewsjf-receipt": "1"}))
        await asyncio.sleep(0.1)
        models.schedulers["stable"].gate.set()
        stages = json.loads((await task).headers["x-ewsjf-receipt"])["stages_ms"]
        assert list(stages) == ["gateway", "earlier_models", "channel", "queue", "engine"]
        assert stages["gateway"] < 50 < stages["earlier_models"]


async def test_queue_updates_follow_the_request_to_its_fallback() -> None:
    async with served(ROUTE) as models:
        for name in ("stable", "new"):
            models.schedulers[name].gate.clear()
        models.reject("stable", Outcome.REJECTED_NO_REPLICA)
        task = asyncio.create_task(models.send_request(stream=True, headers={"x-ewsjf-queue": "comments"}))
        await wait_until(lambda: models.schedulers["stable"].watching)
        models.schedulers["stable"].gate.set()
        await wait_until(lambda: models.schedulers["new"].watching)
        models.schedulers["new"].gate.set()
        assert (await task).status_code == 200


# -- changes ----------------------------------------------------------------------------------------------


async def test_routes_change_without_a_restart() -> None:
    async with served(ROUTE) as models:
        models.gateway.change({"routes": [{"name": "assistant", "models": {"large": 1}}]})
        assert (await models.send_request()).headers["x-served-model"] == "large"
        with pytest.raises(SettingsError, match="unknown model 'gone'"):
            models.gateway.change({"routes": [{"name": "assistant", "models": {"gone": 1}}]})
        assert (await models.send_request()).headers["x-served-model"] == "large"
        models.gateway.change({"routes": []})
        assert (await models.send_request()).status_code == 404

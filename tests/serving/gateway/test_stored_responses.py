"""Stored responses through a gateway: each request reaches the replica that has the response."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from serve_app.request import ProgramHint, Submission
from serve_app.serving.api_keys import changed_keys
from serve_app.serving.channel import gateway_client
from serve_app.serving.channel.scheduler_client import ChannelRequest
from serve_app.serving.gateway import ApiKey
from tests.serving.channel.harness import AwaitedClient, scheduler_settings, wait_until
from tests.serving.test_api_keys import record

from .builders import MODEL, Engine, FakeDispatcher, emulated, gateway, http_client, serving
from .conftest import running_gateway
from .fleet import Fleet, fleet_of, gathered
from .storing import StoringEngine

CREATE = "/v1/responses"
ASKED: dict[str, Any] = {"model": MODEL, "input": "Tell me more.", "max_output_tokens": 4}


@asynccontextmanager
async def fleet_over(count: int, **settings: Any) -> AsyncIterator[Fleet]:
    """Run a fleet of engines that store responses."""
    async with fleet_of([StoringEngine() for _ in range(count)], **settings) as made:
        yield made


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with fleet_over(3) as made:
        yield made


async def test_a_conversation_stays_on_the_replica_that_stores_it(fleet: Fleet) -> None:
    firsts = await gathered(*(fleet.http.post(CREATE, json=ASKED) for _ in range(9)))
    assert len({first.headers["x-replica"] for first in firsts}) > 1
    for first in firsts:
        response_id = first.json()["id"]
        again = await fleet.http.get(f"{CREATE}/{response_id}")
        assert again.json() == first.json()
        assert again.headers["x-replica"] == first.headers["x-replica"]
        for _ in range(3):
            then = await fleet.http.post(CREATE, json={**ASKED, "previous_response_id": response_id})
            assert then.status_code == 200, then.text
            assert then.headers["x-replica"] == first.headers["x-replica"]
            response_id = then.json()["id"]
        assert then.json()["usage"]["input_tokens"] > 3 * first.json()["usage"]["input_tokens"]


async def test_the_client_of_openai_finds_everything_where_it_expects_it(fleet: Fleet) -> None:
    sdk = openai.AsyncOpenAI(base_url=f"{fleet.http.base_url}/v1", api_key="none", max_retries=0)
    stream = await sdk.responses.create(**ASKED, stream=True, background=True)
    events = [event async for event in stream]
    response_id = events[0].response.id
    later = await sdk.responses.retrieve(response_id, stream=True, starting_after=2)
    assert [event.sequence_number async for event in later] == [event.sequence_number for event in events[3:]]
    long = {**ASKED, "max_output_tokens": 900, "extra_body": {"ignore_eos": True}}
    queued = await sdk.responses.create(**long, background=True)
    assert (await sdk.responses.cancel(queued.id)).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="Cannot cancel"):
        await sdk.responses.cancel(queued.id)
    with pytest.raises(openai.NotFoundError, match="was never stored, belongs to another tenant") as missing:
        await sdk.responses.retrieve("resp_0123")
    assert (missing.value.code, missing.value.param) == ("response_not_found", "response_id")
    with pytest.raises(openai.NotFoundError, match="Send the whole conversation") as gone:
        await sdk.responses.create(**ASKED, previous_response_id="resp_0123")
    assert (gone.value.code, gone.value.param) == ("response_not_found", "previous_response_id")
    await sdk.close()


async def test_a_second_gateway_finds_responses_created_through_the_first(fleet: Fleet) -> None:
    first = (await fleet.http.post(CREATE, json=ASKED)).json()
    other = await fleet.control_plane.gateway("g2")
    await wait_until(lambda: len(other.all_replicas()) == 3)
    async with http_client(gateway(other)) as http:
        assert (await http.get(f"{CREATE}/{first['id']}")).json() == first


async def test_tenants_read_and_continue_only_their_own_responses() -> None:
    keys = (ApiKey(tenant="a", key="ka"), ApiKey(tenant="b", key="kb", may_act_for_tenants=True))
    async with fleet_over(1, keys=keys) as fleet:
        a, b = ({"authorization": f"Bearer k{tenant}"} for tenant in "ab")
        made = (await fleet.http.post(CREATE, json=ASKED, headers=a)).json()["id"]
        request_body = {**ASKED, "previous_response_id": made}
        for headers, status in ((a, 200), (b, 404), ({**b, "x-tenant": "a"}, 200), ({}, 401)):
            found = await fleet.http.get(f"{CREATE}/{made}", headers=headers)
            assert found.status_code == status
            found = await fleet.http.post(f"{CREATE}/{made}/cancel", headers=headers)
            assert found.status_code == (400 if status == 200 else status)
            found = await fleet.http.post(CREATE, json=request_body, headers=headers)
            assert found.status_code == status
        # A forged ID, with its own digest and another response's random digits, names no response.
        own = (await fleet.http.post(CREATE, json=ASKED, headers=b)).json()["id"]
        forged = own[:21] + made[21:]
        found = await fleet.http.get(f"{CREATE}/{forged}", headers=b)
        assert found.status_code == 404
        # A tenant cannot overwrite another's response by naming it.
        named = {**ASKED, "request_id": made, "input": "overwritten"}
        before = (await fleet.http.get(f"{CREATE}/{made}", headers=a)).json()
        assert (await fleet.http.post(CREATE, json=named, headers=b)).json()["id"] != made
        assert (await fleet.http.get(f"{CREATE}/{made}", headers=a)).json() == before


async def test_when_the_replica_is_gone_the_answer_states_it_and_no_other_is_queried(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_client, "_DEPARTED_RETENTION_S", 1.0)
    first = await fleet.http.post(CREATE, json=ASKED)
    lost = next(each for each in fleet.fake_replicas if each.spec.replica_id == first.headers["x-replica"])
    lost.engine_failure = "it has died"
    await wait_until(lambda: len(fleet.client.all_replicas()) == 2)
    made = first.json()["id"]
    answers = [
        await fleet.http.get(f"{CREATE}/{made}"),
        await fleet.http.post(CREATE, json={**ASKED, "previous_response_id": made}),
    ]
    for answer in answers:
        assert answer.status_code == 404
        assert "lost with its replica" in answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_replica_that_is_away_for_a_moment_is_waited_for(fleet: Fleet) -> None:
    first = await fleet.http.post(CREATE, json=ASKED)
    lost = next(each for each in fleet.fake_replicas if each.spec.replica_id == first.headers["x-replica"])
    lost.engine_failure = "it does not answer"
    await wait_until(lambda: len(fleet.client.replicas()) == 2)
    request_body = {**ASKED, "previous_response_id": first.json()["id"]}
    waiting = asyncio.create_task(fleet.http.post(CREATE, json=request_body))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    lost.engine_failure = ""
    answer = await waiting
    assert answer.status_code == 200
    assert answer.headers["x-replica"] == lost.spec.replica_id


async def test_a_replica_that_stays_away_is_not_waited_for_beyond_the_grace() -> None:
    settings = scheduler_settings(model=MODEL, no_replica_grace_s=0.5)
    async with fleet_over(2, settings=settings) as fleet:
        first = await fleet.http.post(CREATE, json=ASKED)
        lost = next(
            each for each in fleet.fake_replicas if each.spec.replica_id == first.headers["x-replica"]
        )
        lost.engine_failure = "it has died"
        await wait_until(lambda: len(fleet.client.replicas()) == 1)
        request_body = {**ASKED, "previous_response_id": first.json()["id"]}
        answer = await fleet.http.post(CREATE, json=request_body)
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("response_not_found", "previous_response_id")
        assert f"stored on replica {lost.spec.replica_id}, which is no longer available" in error["message"]


async def test_work_in_the_background_counts_until_it_ends(fleet: Fleet) -> None:
    long = {**ASKED, "max_output_tokens": 200, "ignore_eos": True, "background": True}
    queued = await fleet.http.post(CREATE, json=long)
    assert queued.json()["status"] == "queued"
    at = queued.headers["x-replica"]
    assert fleet.core.ledger[at].in_flight == 1
    assert fleet.gateway.in_flight == 1
    await wait_until(lambda: fleet.core.ledger[at].in_flight == 0, within_s=20)
    assert fleet.gateway.in_flight == 0
    found = (await fleet.http.get(f"{CREATE}/{queued.json()['id']}")).json()
    assert found["usage"]["output_tokens"] == 200


async def test_work_in_the_background_counts_when_its_client_has_left_its_stream(fleet: Fleet) -> None:
    long = {**ASKED, "max_output_tokens": 200, "ignore_eos": True, "background": True, "stream": True}
    async with fleet.http.stream("POST", CREATE, json=long) as stream:
        at = stream.headers["x-replica"]
        async for line in stream.aiter_lines():
            if found := re.search(r'"id":\s*"(resp_\w+)"', line):
                break
    assert found is not None
    await asyncio.sleep(0.3)
    assert fleet.core.ledger[at].in_flight == 1
    await wait_until(lambda: fleet.core.ledger[at].in_flight == 0, within_s=20)
    kept = (await fleet.http.get(f"{CREATE}/{found[1]}")).json()
    assert kept["usage"]["output_tokens"] == 200


async def test_responses_that_an_engine_names_are_remembered() -> None:
    engines = [Engine(), Engine()]
    async with fleet_of(engines) as fleet:
        made = await fleet.http.post(CREATE, json=ASKED)
        assert b"request_id" not in engines[0].bodies[0] if engines[0].bodies else engines[1].bodies[0]
        assert made.json()["id"] == "r"
        at = made.headers["x-replica"]
        for _ in range(4):
            found = await fleet.http.get(f"{CREATE}/r?stream=true&starting_after=3")
            assert found.headers["x-replica"] == at
            then = await fleet.http.post(CREATE, json={**ASKED, "previous_response_id": "r", "stream": True})
            assert then.headers["x-replica"] == at


@pytest.mark.parametrize("named_by_gateway", [True, False])
async def test_responses_that_continue_each_other_are_one_session(named_by_gateway: bool) -> None:
    async with AsyncExitStack() as stack:
        engine = StoringEngine() if named_by_gateway else Engine()
        submitted: list[Submission] = []

        def watched(client: AwaitedClient) -> AwaitedClient:
            submit = client.submit

            def noted(request: ChannelRequest) -> None:
                submitted.append(request.submission)
                submit(request)

            client.submit = noted  # type: ignore[method-assign]
            return client

        fleet = await stack.enter_async_context(fleet_of([engine], wrap=watched))
        for _ in range(2):
            request_body: dict[str, Any] = dict(ASKED)
            for _ in range(4):
                request_body["previous_response_id"] = (
                    await fleet.http.post(CREATE, json=request_body)
                ).json()["id"]
        sessions = [each.program.session if each.program is not None else None for each in submitted]
        first, second = sessions[:4], sessions[4:]
        assert first[0] is second[0] is None
        assert len(set(first[1:])) == len(set(second[1:])) == 1
        # The scripted engine gives all responses the same name.
        assert (first[1] != second[1]) is named_by_gateway
        named = {**request_body, "prompt_cache_key": "k"}
        assert (await fleet.http.post(CREATE, json=named)).status_code == 200
        assert submitted[-1].program == ProgramHint(session="k")


async def test_a_grant_for_another_replica_is_released_unused() -> None:
    """A scheduler of an older release might grant this."""
    engines = [Engine(), Engine()]
    async with AsyncExitStack() as stack:
        kept_at, elsewhere = [await stack.enter_async_context(serving(engine)) for engine in engines]
        dispatcher = FakeDispatcher([kept_at, elsewhere])
        http = await stack.enter_async_context(http_client(gateway(dispatcher)))
        assert (await http.post(CREATE, json=ASKED)).json()["id"] == "r"
        dispatcher.script.append(elsewhere)
        rejected = await http.post(CREATE, json={**ASKED, "previous_response_id": "r"})
        assert rejected.status_code == 503
        assert "scheduler's release does not support" in rejected.json()["error"]["message"]
        assert dispatcher.submissions[-1].bound_to == f"r{kept_at}"
        assert not engines[1].bodies
        assert not dispatcher.in_flight


async def test_an_engine_without_a_store_rejects_what_needs_one() -> None:
    async with emulated(speed_up=4.0) as engine, fleet_of([engine.app]) as fleet:
        made = (await fleet.http.post(CREATE, json=ASKED)).json()["id"]
        rejected = await fleet.http.post(CREATE, json={**ASKED, "background": True})
        assert rejected.status_code == 400
        assert "does not support the background mode" in rejected.json()["error"]["message"]
        unknown = await fleet.http.post(CREATE, json={**ASKED, "previous_response_id": made})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["message"] == f"Response with id '{made}' not found."
        assert (await fleet.http.get(f"{CREATE}/{made}")).status_code == 404
        assert fleet.core.ledger[rejected.headers["x-replica"]].in_flight == 0


async def test_deleting_is_not_offered(fleet: Fleet) -> None:
    made = (await fleet.http.post(CREATE, json=ASKED)).json()["id"]
    rejected = await fleet.http.delete(f"{CREATE}/{made}")
    assert rejected.status_code == 405
    assert (await fleet.http.get(f"{CREATE}/{made}/cancel")).status_code == 405


@pytest.mark.parametrize("name", ["compact", "input_tokens"])
async def test_other_endpoints_below_responses_are_unknown_and_not_responses(fleet: Fleet, name: str) -> None:
    for method in ("POST", "GET"):
        answer = await fleet.http.request(method, f"{CREATE}/{name}", json=ASKED)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].startswith(f"unknown path {CREATE}/{name}")


async def test_a_key_for_one_adapter_can_retrieve_its_responses(tmp_path: Path) -> None:
    found, secret = record(models=("sql",))
    changed_keys(tmp_path / "keys.json", lambda _: [found])

    class Adapted(FakeDispatcher):
        def adapters(self) -> dict[str, frozenset[str]]:
            return {"sql": frozenset(each.replica_id for each in self.all_replicas())}

    async with running_gateway(Adapted([]), keys_file=str(tmp_path / "keys.json")) as harness:
        harness.http.headers["authorization"] = f"Bearer {secret}"
        made = await harness.http.post(CREATE, json={**ASKED, "model": "sql"})
        assert made.status_code == 200, made.text
        assert (await harness.http.get(f"{CREATE}/{made.json()['id']}")).status_code == 200


async def test_a_tenant_cannot_take_over_a_response_by_reusing_its_name() -> None:
    """Also where engines name responses but accept a client's name."""
    keys = (ApiKey(tenant="a", key="ka"), ApiKey(tenant="b", key="kb"))
    async with running_gateway(engine=StoringEngine(), keys=keys) as harness:
        http = harness.http
        a, b = ({"authorization": f"Bearer k{tenant}"} for tenant in "ab")
        made = (await http.post(CREATE, json=ASKED, headers=a)).json()["id"]
        # Not stored, so the engine still has the other response under this name.
        named = {**ASKED, "request_id": made, "store": False}
        own = (await http.post(CREATE, json=named, headers=b)).json()["id"]
        assert own != made
        assert (await http.get(f"{CREATE}/{made}", headers=b)).status_code == 404
        assert (await http.get(f"{CREATE}/{made}", headers=a)).status_code == 200
        # A tenant still finds a response under a name of its choice.
        own = (await http.post(CREATE, json={**ASKED, "request_id": "mine"}, headers=b)).json()["id"]
        assert (await http.get(f"{CREATE}/{own}", headers=b)).status_code == 200


async def test_a_background_response_with_an_invalid_id_releases_its_slot() -> None:
    """The engine names responses in a way that fits no request line."""
    engine = ScriptedApp(b'{"id": "r\\u2026", "status": "queued"}')
    async with running_gateway(engine=engine) as harness:
        assert (await harness.http.post(CREATE, json={**ASKED, "background": True})).status_code == 200
        await wait_until(lambda: not harness.dispatcher.in_flight, within_s=5)
        assert harness.dispatcher.outcomes() == ["failed"]
        assert harness.gateway.in_flight == 0


class ScriptedApp:
    """App that answers every request with one JSON document."""

    def __init__(self, document: bytes) -> None:
        self.document = document

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.document})

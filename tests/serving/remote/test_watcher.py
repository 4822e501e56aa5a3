"""Watcher with its endpoints, a scheduler and a gateway, over HTTP and without Ray."""

import asyncio
import logging
import re
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from serve_app.engines.engine import Receive, Scope, Send
from serve_app.errors import EngineError
from serve_app.serving.remote import endpoint
from serve_app.serving.remote.endpoint import identified
from serve_app.serving.remote.watcher import EndpointChoices
from serve_app.serving.state import StateStore
from tests.engines.servers import free_port, serving
from tests.serving.channel.harness import wait_until
from tests.serving.gateway.builders import MODEL

from .servers import POOL, VllmLike, watched


async def test_requests_go_straight_to_the_endpoints() -> None:
    first, second = VllmLike(token_delay_s=0.05), VllmLike(token_delay_s=0.05)
    async with serving(first) as one, serving(second) as two, watched(one, two) as fleet:
        await wait_until(lambda: len(fleet.open()) == 2, "both serve")
        answers = await asyncio.gather(*(fleet.send_request() for _ in range(6)))
        assert [answer.status_code for answer in answers] == [200] * 6
        assert {answer.headers["x-replica"] for answer in answers} == set(fleet.open())
        assert len(first.bodies) + len(second.bodies) == 6


async def test_endpoints_get_their_own_key_and_nothing_of_ours() -> None:
    engine = VllmLike()
    engine.api_key = "sk-of-the-server"
    async with serving(engine) as url, watched(f"{url}/below/v1", api_key=engine.api_key) as fleet:
        await wait_until(lambda: len(fleet.open()) == 1, "it serves")
        answer = await fleet.http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": "hello"},
            headers={"x-api-key": "of-the-client"},
        )
        assert answer.status_code == 200
    head = engine.heads[-1]
    assert head[b"authorization"] == b"Bearer sk-of-the-server"
    assert engine.paths[-1] == "/below/v1/completions"
    assert not {b"x-api-key", b"x-replica-token"} & set(head)


async def test_an_endpoint_that_dies_loses_no_request_and_returns() -> None:
    engine, port = VllmLike(), free_port()
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(serving(VllmLike()))
        mortal = AsyncExitStack()
        url = await mortal.enter_async_context(serving(engine, port))
        fleet = await stack.enter_async_context(watched(other, url))
        await wait_until(lambda: len(fleet.open()) == 2, "both serve")
        await mortal.aclose()
        answers = [await fleet.send_request() for _ in range(8)]
        assert [answer.status_code for answer in answers] == [200] * 8
        await wait_until(lambda: len(fleet.open()) == 1, "its death is noticed")
        dead = next(one for one in fleet.watcher.describe() if one["url"] == url)
        assert (dead["state"], "gave no answer" in str(dead["reason"])) == ("closed", True)
        engine.models["data"][0]["max_model_len"] = 2048
        await stack.enter_async_context(serving(engine, port))
        await wait_until(lambda: len(fleet.open()) == 2, "it serves again")
        # The server restarts with another limit.
        assert (
            fleet.control_plane.live.status()["replicas"][f"short/127.0.0.1:{port}"]["max_model_len"] == 2048
        )


async def test_a_dead_endpoint_is_named_with_its_reason_until_it_returns() -> None:
    port = free_port()
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(serving(VllmLike()))
        mortal = AsyncExitStack()
        url = await mortal.enter_async_context(serving(VllmLike(), port))
        fleet = await stack.enter_async_context(watched(other, url))

        def down() -> list[dict[str, Any]]:
            (pool,) = fleet.control_plane.live.status()["endpoints"] or [{"endpoints": 0, "down": []}]
            assert pool["endpoints"] in (0, 2)
            return list(pool["down"])

        await wait_until(lambda: len(fleet.open()) == 2 and not down(), "both serve")
        began = time.time()
        await mortal.aclose()
        await wait_until(lambda: len(down()) == 1, "its death is shown")
        (dead,) = down()
        assert (dead["url"], dead["replica"]) == (url, f"{POOL}/127.0.0.1:{port}")
        assert re.fullmatch(rf"{url}/\S+ gave no answer: Connection refused", dead["reason"])
        assert began - 1 <= dead["since"] <= time.time()
        metrics = await fleet.control_plane.live.exposition()
        assert f'ewsjf_endpoints{{model="{MODEL}",pool="{POOL}",state="down"}} 1.0' in metrics
        await stack.enter_async_context(serving(VllmLike(), port))
        await wait_until(lambda: not down(), "it is shown as serving")


async def test_an_endpoint_that_sleeps_receives_no_requests_and_serves_at_once_when_it_is_awake() -> None:
    sleeper, other = VllmLike(), VllmLike()
    async with serving(sleeper) as url, serving(other) as second, watched(url, second) as fleet:

        def pool() -> dict[str, Any]:
            return dict((fleet.control_plane.live.status()["endpoints"] or [{}])[0])

        await wait_until(lambda: len(fleet.open()) == 2, "both serve")
        for _ in range(3):
            sleeper.sleeps = True
            await wait_until(lambda: pool().get("asleep") == [url], "its sleep is shown")
            assert pool()["down"] == []
            (shown,) = [each for each in fleet.watcher.describe() if each["url"] == url]
            assert (shown["state"], shown["reason"]) == (
                "asleep",
                f"{url} sleeps: wake it up with POST /wake_up",
            )
            before = len(sleeper.bodies)
            answers = await asyncio.gather(*(fleet.send_request() for _ in range(6)))
            assert [answer.status_code for answer in answers] == [200] * 6
            assert len(sleeper.bodies) == before
            metrics = await fleet.control_plane.live.exposition()
            assert f'ewsjf_endpoints{{model="{MODEL}",pool="{POOL}",state="asleep"}} 1.0' in metrics
            sleeper.sleeps, reasons = False, set[str]()

            def serves(reasons: set[str] = reasons) -> bool:
                reasons |= {str(each["reason"]) for each in fleet.watcher.describe()}
                return len(fleet.open()) == 2 and not pool()["asleep"]

            await wait_until(serves, "it is awake")
            # Sleep is no failure, after which it would be held back.
            assert not any("it answers again" in reason for reason in reasons)


async def test_an_endpoint_that_dies_in_its_sleep_is_down() -> None:
    sleeper, port = VllmLike(), free_port()
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(serving(VllmLike()))
        mortal = AsyncExitStack()
        url = await mortal.enter_async_context(serving(sleeper, port))
        fleet = await stack.enter_async_context(watched(other, url))
        await wait_until(lambda: len(fleet.open()) == 2, "both serve")
        sleeper.sleeps = True
        await wait_until(lambda: fleet.watcher.states()["asleep"] == [url], "it sleeps")
        await mortal.aclose()
        await wait_until(lambda: not fleet.watcher.states()["asleep"], "its death is noticed")
        assert [each["state"] for each in fleet.watcher.states()["down"]] == ["closed"]


async def test_an_endpoint_that_never_answered_is_named() -> None:
    unused_url = f"http://127.0.0.1:{free_port()}"
    async with serving(VllmLike()) as one, watched(one, unused_url) as fleet:
        shown = fleet.control_plane.live.endpoints.documents
        await wait_until(lambda: bool(shown()) and bool(shown()[0]["down"]), "it is shown")
        assert [each["url"] for each in shown()[0]["down"]] == [unused_url]


async def test_a_source_that_cannot_be_read_is_named_until_it_can(tmp_path: Path) -> None:
    file = tmp_path / "endpoints"
    async with serving(VllmLike()) as one, watched(one, f"file://{file}") as fleet:
        shown = fleet.control_plane.live.endpoints.documents
        await wait_until(lambda: bool(shown()) and bool(shown()[0]["unread_sources"]), "it is shown")
        reason = f"[Errno 2] No such file or directory: '{file}'"
        assert shown()[0]["unread_sources"] == [{"source": f"file://{file}", "reason": reason}]
        file.write_text("")
        await wait_until(lambda: not shown()[0]["unread_sources"], "it is read")


async def test_an_endpoint_that_is_found_by_name_and_by_address_is_watched_once() -> None:
    async with (
        serving(VllmLike()) as url,
        watched(url, f"dns+{url.replace('127.0.0.1', 'localhost')}") as fleet,
    ):
        await wait_until(lambda: len(fleet.watcher._found[1]) > 0, "the name is resolved")
        replica = f"{POOL}/{url.removeprefix('http://')}"
        assert [each["replica"] for each in fleet.watcher.describe()].count(replica) == 1


async def test_an_endpoint_with_an_unexpected_error_names_it_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = set[str]()

    async def identified_or_fails(control: Any, url: Any, settings: Any) -> Any:
        if str(url) in broken:
            raise UnicodeEncodeError("latin-1", "/x", 0, 1, "not in range")
        return await identified(control, url, settings)

    monkeypatch.setattr(endpoint, "identified", identified_or_fails)
    async with serving(VllmLike()) as one, serving(VllmLike()) as two:
        broken.add(two)
        async with watched(one, two) as fleet:
            reasons = {str(each["url"]): str(each["reason"]) for each in fleet.watcher.describe()}
            assert "not in range" in reasons[two]
            broken.clear()
            await wait_until(lambda: len(fleet.open()) == 2, "both serve")


async def test_one_that_fails_again_and_again_is_held_back() -> None:
    engine = VllmLike()
    async with serving(engine) as url, watched(url) as fleet:
        for _ in range(2):
            await wait_until(lambda: len(fleet.open()) == 1, "it serves")
            engine.metrics_status = 500
            await wait_until(lambda: not fleet.open(), "its failure is noticed")
            engine.metrics_status = 200
        await wait_until(
            lambda: "has to for" in str(fleet.watcher.describe()[0]["reason"]), "it is held back"
        )


async def test_a_file_of_endpoints_is_followed_while_it_changes(tmp_path: Path) -> None:
    listed = tmp_path / "endpoints"
    async with watched(f"file://{listed}", refresh_s=0.1) as fleet:
        one, two = await fleet.endpoint(), await fleet.endpoint()
        listed.write_text(f"# ours\n{one}  # the first\n")
        await wait_until(lambda: len(fleet.open()) == 1, "the first is found")
        listed.write_text(f"{one}\n\n{two}/v1\n")
        await wait_until(lambda: len(fleet.open()) == 2, "the second is found")
        # A mistake or a missing file removes no endpoint.
        listed.write_text(f"{one}\nno url\n")
        await asyncio.sleep(0.3)
        listed.unlink()
        await asyncio.sleep(0.3)
        assert len(fleet.open()) == 2
        listed.write_text(two)
        await wait_until(lambda: len(fleet.open()) == 1, "the first has gone")


async def test_requests_on_a_removed_endpoint_continue() -> None:
    engine = VllmLike(token_delay_s=0.2)
    async with serving(engine) as url, watched(url) as fleet:
        other = await fleet.endpoint()
        pending = asyncio.create_task(fleet.send_request(max_tokens=5, stream=True))
        await wait_until(lambda: engine.running == 1, "it runs")
        added = await fleet.http.post("/admin/endpoints", json={"url": other})
        removed = await fleet.http.request("DELETE", "/admin/endpoints", json={"url": url})
        assert (added.status_code, removed.status_code) == (200, 200), (added.text, removed.text)
        await wait_until(lambda: fleet.open() == [f"short/{other.removeprefix('http://')}"], "one is left")
        answer = await pending
        assert answer.text.rstrip().endswith("[DONE]")
        shown = (await fleet.http.get("/admin/endpoints")).json()["endpoints"]
        assert {(one["url"], one["state"]) for one in shown} == {(other, "serving"), (url, "removed")}


def kept_in(folder: Path) -> EndpointChoices:
    return EndpointChoices(StateStore(str(folder), "endpoints", "app/m/short"))


async def test_an_admins_choices_persist_across_a_restart(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(serving(VllmLike()))
        two = await stack.enter_async_context(serving(VllmLike()))
        async with watched(one, kept=kept_in(tmp_path)) as fleet:
            assert (await fleet.http.post("/admin/endpoints", json={"url": two})).json()["persisted"] is True
            await wait_until(lambda: len(fleet.open()) == 2, "both serve")
            await fleet.http.request("DELETE", "/admin/endpoints", json={"url": one, "pool": "short"})
        async with watched(one, kept=kept_in(tmp_path)) as fleet:
            await wait_until(lambda: fleet.open() == [f"short/{two.removeprefix('http://')}"], "as before")
            await fleet.http.post("/admin/endpoints", json={"url": one})
            await wait_until(lambda: len(fleet.open()) == 2, "it is given back")


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"removed": []}, "missing required field `added`"),
        ({"added": ["no url"], "removed": []}, "an endpoint's URL looks like http://host:8000, got 'no url'"),
    ],
)
async def test_invalid_stored_choices_are_named_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, document: dict[str, Any], reason: str
) -> None:
    logging.getLogger("ray.serve").propagate = True
    store = StateStore(str(tmp_path), "endpoints", "app/m/short")
    store.save(document)
    async with serving(VllmLike()) as one, serving(VllmLike()) as two:
        async with watched(one, kept=kept_in(tmp_path)) as fleet:
            await wait_until(lambda: len(fleet.open()) == 1, "it serves")
            assert (await fleet.http.post("/admin/endpoints", json={"url": two})).json()["persisted"] is True
        async with watched(one, kept=kept_in(tmp_path)) as fleet:
            await wait_until(lambda: len(fleet.open()) == 2, "both serve")
    assert f"event=state_rejected kind=endpoints name=app/m/short path={store.path}" in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"url": "no url"}, 400, "http://host:8000"),
        ({"url": "http://a:1", "pool": "other"}, 400, "pool 'other'; remote pools: tiny/short"),
        ({"uri": "http://a:1"}, 400, "the body must be like"),
    ],
)
async def test_mistakes_of_an_admin_are_reported(body: dict[str, Any], status: int, text: str) -> None:
    async with watched() as fleet:
        answer = await fleet.http.post("/admin/endpoints", json=body)
        assert (answer.status_code, text in answer.text) == (status, True), answer.text
        unknown = await fleet.http.request("DELETE", "/admin/endpoints", json={"url": "http://a:1"})
        assert "has no endpoint" in unknown.text


async def test_a_start_without_a_reachable_endpoint_gives_the_reason() -> None:
    port = free_port()
    async with watched(f"http://127.0.0.1:{port}", start=False, start_timeout_s=0.3) as fleet:
        with pytest.raises(
            EngineError, match=rf"no endpoint can be used: http://127.0.0.1:{port}/v1/models gave"
        ):
            await fleet.watcher.start()


async def test_a_start_ends_at_once_when_every_endpoint_rejects() -> None:
    engine = VllmLike()
    engine.api_key = "secret"
    async with serving(engine) as url, watched(url, start=False, start_timeout_s=60.0) as fleet:
        with pytest.raises(EngineError, match="returned 401: set api_key to the server's key"):
            await fleet.watcher.start()


async def test_an_endpoint_with_another_model_is_reported_and_receives_no_requests() -> None:
    other = VllmLike()
    other.models = {"data": [{"id": "other", "max_model_len": 100}]}
    async with (
        serving(VllmLike()) as one,
        serving(other) as two,
        watched(one, two, served_model_names=(MODEL,)) as fleet,
    ):
        await wait_until(lambda: len(fleet.open()) == 1, "one serves")
        await wait_until(
            lambda: any("serves other" in str(one["reason"]) for one in fleet.watcher.describe())
        )
        (reason,) = [str(each["reason"]) for each in fleet.watcher.describe() if each["state"] == "closed"]
        assert "serves other but not tiny" in reason


async def test_an_alias_that_an_endpoint_lacks_is_reported_with_the_route_as_its_remedy() -> None:
    names = (MODEL, "gpt-4o-mini")
    async with (
        serving(VllmLike()) as url,
        watched(url, start=False, served_model_names=names, start_timeout_s=0.5) as fleet,
    ):
        remedy = r"not gpt-4o-mini: .* a name that only clients use is a route \(gateway\.routes\)"
        with pytest.raises(EngineError, match=remedy):
            await fleet.watcher.start()


async def test_endpoints_outlive_a_scheduler() -> None:
    async with serving(VllmLike()) as url, watched(url) as fleet:
        await wait_until(lambda: len(fleet.open()) == 1, "it serves")
        await fleet.control_plane.restart()
        assert (await fleet.send_request()).status_code == 200


async def test_a_hanging_endpoint_receives_no_requests_until_it_continues() -> None:
    engine = VllmLike()
    async with serving(engine) as url, watched(url, hang_timeout_s=0.5) as fleet:
        await wait_until(lambda: len(fleet.open()) == 1, "it serves")
        engine.hangs, engine.others = True, 3
        await wait_until(lambda: not fleet.open(), "its hang is noticed")
        assert "has computed nothing for" in str(fleet.watcher.describe()[0]["reason"])
        engine.hangs = False
        await wait_until(lambda: len(fleet.open()) == 1, "it goes on")


async def test_an_endpoint_that_hung_while_idle_receives_no_more_requests() -> None:
    async def never(_scope: Scope, _parsed: dict[str, Any], _send: Send) -> None:
        await asyncio.Event().wait()

    engine = VllmLike()
    engine.hangs = engine.is_mute = True
    engine.answers += [never] * 9
    async with serving(engine) as url, watched(url, hang_timeout_s=0.5) as fleet:
        await wait_until(lambda: len(fleet.open()) == 1, "it serves")
        stuck = [asyncio.create_task(fleet.send_request(stream=True)) for _ in range(2)]
        state = fleet.control_plane.live.core.ledger[fleet.open()[0]]
        await wait_until(lambda: state.hang_detector.hangs, "its hang is noticed")
        late = {"x-queue-timeout-s": "0.5"}
        body = {"model": MODEL, "prompt": "hello", "stream": True}
        assert (await fleet.http.post("/v1/completions", json=body, headers=late)).status_code == 504
        assert len(engine.bodies) == 2
        other = await fleet.endpoint()
        await fleet.http.post("/admin/endpoints", json={"url": other})
        await wait_until(lambda: len(fleet.open()) == 2, "another serves")
        answers = await asyncio.gather(*(fleet.send_request(stream=True) for _ in range(6)))
        assert [answer.status_code for answer in answers] == [200] * 6
        assert len(engine.bodies) == 2
        engine.hangs = engine.is_mute = False
        await wait_until(lambda: not state.hang_detector.hangs, "it goes on")
        engine.answers.clear()
        await fleet.http.request("DELETE", "/admin/endpoints", json={"url": other})
        assert (await fleet.send_request(stream=True)).status_code == 200
        assert len(engine.bodies) == 3
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)


async def test_an_endpoint_whose_cache_is_full_receives_no_requests() -> None:
    engine = VllmLike()
    async with serving(engine) as url, watched(url) as fleet:
        engine.kv_usage, engine.others = 0.99, 5
        await wait_until(
            lambda: "0.99" in str(fleet.control_plane.live.status()["replicas"]), "the load is read"
        )
        rejected = await fleet.http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": "hello"},
            headers={"x-queue-timeout-s": "0.5"},
        )
        assert rejected.status_code == 504, rejected.text
        engine.kv_usage = 0.0
        assert (await fleet.send_request()).status_code == 200
        assert len(engine.bodies) == 1


@pytest.mark.parametrize(("load", "value"), [("kv_usage", 0.75), ("others", 3), ("queued", 1)])
async def test_an_endpoint_is_read_less_often_while_it_is_not_full(
    monkeypatch: pytest.MonkeyPatch, load: str, value: float
) -> None:
    monkeypatch.setattr(endpoint, "_CALM_INTERVALS", 1_000.0)
    engine = VllmLike()
    setattr(engine, load, value)
    async with serving(engine) as url, watched(url, max_num_seqs=3) as fleet:
        await wait_until(lambda: len(fleet.open()) == 1, "it serves")
        before = engine.scrapes
        await wait_until(lambda: engine.scrapes > before + 5, "it is read again and again")
        engine.kv_usage, engine.others, engine.queued = 0.625, 0, 0
        await wait_until(
            lambda: "0.625" in str(fleet.control_plane.live.status()["replicas"]), "the change is read"
        )
        before = engine.scrapes
        await asyncio.sleep(0.5)
        assert engine.scrapes == before


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_only_admins_may_read_and_change(method: str) -> None:
    async with watched() as fleet:
        answer = await fleet.http.request(
            method,
            "/admin/endpoints",
            json={"url": "http://a:1"},
            headers={"authorization": "Bearer unknown"},
        )
        assert answer.status_code == 401
        assert fleet.watcher.describe() == []


async def test_a_configured_limit_is_no_limitation(caplog: pytest.LogCaptureFixture) -> None:
    engine = VllmLike()
    engine.models = {"data": [{"id": MODEL, "owned_by": "me"}]}
    engine.metrics_status = 404
    limits: dict[str, Any] = {"max_model_len": 8_192, "kv_tokens": 100_000, "max_num_seqs": 32}
    async with serving(engine) as url, watched(url, **limits) as fleet:
        await wait_until(lambda: len(fleet.open()) == 1, "it serves")
        described = fleet.watcher.describe()[0]
    assert {name: described[name] for name in limits} == limits
    logged = [
        record.getMessage() for record in caplog.records if "endpoint_limitation" in record.getMessage()
    ]
    # Its load, which no setting replaces.
    assert len(logged) == len(described["limitations"]) == 4  # type: ignore[arg-type]
    text = f"{described['limitations']} {logged}"
    assert not [name for name in limits if name in text]


async def test_a_provider_without_metrics_is_checked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[float] = []

    class Provider(VllmLike):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] == "/v1/models":
                listed.append(time.monotonic())
            await super().__call__(scope, receive, send)

    provider = Provider()
    provider.metrics_status = 404
    monkeypatch.setattr(endpoint, "_LIVENESS_S", 30.0)
    async with serving(provider) as url, watched(url, max_model_len=4096) as fleet:
        await wait_until(lambda: len(fleet.open()) == 1, "it serves")
        checks = len(listed)
        # The watcher reports several times per second, without a request to the provider.
        await asyncio.sleep(1.0)
        assert len(listed) <= checks + 1
        assert fleet.open()
        assert (await fleet.send_request()).status_code == 200

"""The remote engine against real servers: scripted ones, and the emulated engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.engines.emulated.engine import EmulatedEngine, EmulatedEngineSettings
from serve_app.engines.engine import EngineLimits, Receive, Scope, Send
from serve_app.engines.remote.engine import RemoteEngine, RemoteEngineSettings
from serve_app.errors import EngineError
from tests.engines.servers import free_port, serving, tcp_server, until

RECORDED = Path(__file__).parents[1] / "recorded"


class VllmLike:
    """Answers the control requests of a vLLM server with what the test sets."""

    def __init__(self) -> None:
        self.models: Any = {"data": [{"id": "m", "max_model_len": 512}]}
        self.metrics = (RECORDED / "vllm-0.32.0-idle.txt").read_text()
        self.health_status = 200
        self.api_key: str | None = None
        self.scrapes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.api_key and (b"authorization", f"Bearer {self.api_key}".encode()) not in scope["headers"]:
            status, text = 401, '{"error":"Unauthorized"}'
        elif scope["path"] == "/metrics":
            self.scrapes += 1
            status, text = 200, self.metrics
        elif scope["path"] == "/health":
            status, text = self.health_status, ""
        else:
            status, text = 200, json.dumps(self.models)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": text.encode()})


@pytest.fixture
async def server() -> AsyncIterator[tuple[VllmLike, str]]:
    app = VllmLike()
    async with serving(app) as base_url:
        yield app, base_url


def settings(base_url: str, **others: Any) -> RemoteEngineSettings:
    return RemoteEngineSettings(
        **{"base_url": base_url, "max_num_seqs": 16, "start_timeout_s": 5.0, **others}
    )


async def started(base_url: str, **others: Any) -> tuple[RemoteEngine, EngineLimits]:
    engine = RemoteEngine(settings(base_url, **others))
    return engine, await engine.start()


async def runs(engine: RemoteEngine, requests: int) -> bool:
    return (await engine.load()).running == requests


async def hangs(engine: RemoteEngine) -> bool:
    try:
        await engine.load()
    except EngineError as error:
        return "hangs: it has requests and has computed nothing" in str(error)
    return False


async def test_limits_are_what_the_server_states_and_the_settings_add(server: tuple[VllmLike, str]) -> None:
    engine, limits = await started(server[1])
    await engine.stop()
    # The mean time per output token of all that the recorded server had generated.
    assert replace(limits, tpot_s=None) == EngineLimits(
        max_model_len=512, kv_tokens=4_095 * 128, max_num_seqs=16
    )
    assert limits.tpot_s == pytest.approx(0.00602, rel=0.01)


async def test_settings_override_what_the_server_states(server: tuple[VllmLike, str]) -> None:
    engine, limits = await started(server[1], max_model_len=256, kv_tokens=1_000, max_num_seqs=4)
    await engine.stop()
    assert limits == EngineLimits(max_model_len=256, kv_tokens=1_000, max_num_seqs=4, tpot_s=limits.tpot_s)


async def test_limits_that_are_not_stated_are_named(server: tuple[VllmLike, str]) -> None:
    app, base_url = server
    app.models = {"data": [{"id": "m"}]}
    with pytest.raises(
        EngineError, match="does not state its max_model_len and max_num_seqs: give max_model"
    ):
        await started(base_url, max_num_seqs=None)


async def test_a_model_that_is_not_served_is_named(server: tuple[VllmLike, str]) -> None:
    with pytest.raises(EngineError, match="serves m but not llama: start it with --served-model-name llama"):
        await started(server[1], served_model_names=("llama",))


async def test_the_smallest_context_among_the_names_counts(server: tuple[VllmLike, str]) -> None:
    app, base_url = server
    sizes = {"a": 512, "b": 256, "c": 128}
    app.models = {"data": [{"id": name, "max_model_len": size} for name, size in sizes.items()]}
    engine, limits = await started(base_url, served_model_names=("a", "b"))
    await engine.stop()
    assert limits.max_model_len == 256


@pytest.mark.parametrize("models", [{"data": 7}, {"data": [{"name": "m"}]}, {"models": []}, "m"])
async def test_a_list_of_models_that_is_none_is_refused(server: tuple[VllmLike, str], models: Any) -> None:
    app, base_url = server
    app.models = models
    with pytest.raises(EngineError, match="is no list of models"):
        await started(base_url)


async def test_a_server_without_metrics_of_vllm_is_refused(server: tuple[VllmLike, str]) -> None:
    app, base_url = server
    app.metrics = "python_info 1.0"
    with pytest.raises(EngineError, match="is it a vLLM server"):
        await started(base_url)


async def test_a_wrong_key_has_an_error_of_its_own(server: tuple[VllmLike, str]) -> None:
    app, base_url = server
    app.api_key = "secret"
    with pytest.raises(EngineError, match="answered 401: give the server's key as api_key"):
        await started(base_url, api_key="wrong")
    engine, _ = await started(base_url, api_key="secret")
    await engine.check_health()
    await engine.stop()


async def test_the_key_may_come_from_the_environment(
    server: tuple[VllmLike, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, base_url = server
    app.api_key = "secret"
    with pytest.raises(EngineError, match="REMOTE_KEY is not set"):
        await started(base_url, api_key_env="REMOTE_KEY")
    monkeypatch.setenv("REMOTE_KEY", "secret")
    engine, _ = await started(base_url, api_key_env="REMOTE_KEY")
    await engine.stop()


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(settings("http://host:8000", api_key="secret"))


async def test_a_server_that_starts_later_is_waited_for() -> None:
    port = free_port()
    engine = RemoteEngine(settings(f"http://127.0.0.1:{port}", start_timeout_s=20.0))
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0.7)
    async with serving(VllmLike(), port):
        assert (await starting).max_model_len == 512
        await engine.stop()


async def test_a_server_that_never_listens_ends_the_start() -> None:
    with pytest.raises(EngineError, match="gave no answer"):
        await started(f"http://127.0.0.1:{free_port()}", start_timeout_s=0.6)


async def test_an_address_may_end_in_v1_as_in_the_openai_sdk(server: tuple[VllmLike, str]) -> None:
    engine, _ = await started(f"{server[1]}/v1/")
    await engine.check_health()
    await engine.stop()


async def test_the_load_follows_the_metrics(server: tuple[VllmLike, str]) -> None:
    app, base_url = server
    engine, _ = await started(base_url, scrape_interval_s=0.05)
    idle = await engine.load()
    assert (idle.waiting, idle.running, idle.tpot_s) == (0, 0, None)
    app.metrics = (RECORDED / "vllm-0.32.0-busy.txt").read_text()
    await until(lambda: runs(engine, 16))
    busy = await engine.load()
    assert (busy.waiting, busy.running) == (4, 16)
    # Both were recorded in one run of a server whose tokens came some 10 to 50 ms apart.
    assert busy.tpot_s is not None
    assert 0.005 < busy.tpot_s < 0.1
    await engine.stop()


async def test_metrics_are_read_no_more_often_than_asked(server: tuple[VllmLike, str]) -> None:
    app, base_url = server
    engine, _ = await started(base_url)
    await asyncio.sleep(1.0)
    await engine.stop()
    assert app.scrapes <= 6


async def test_a_load_that_is_too_old_is_not_given_out() -> None:
    app = VllmLike()
    async with serving(app) as base_url:
        engine, _ = await started(base_url, scrape_interval_s=0.05, stale_after_s=0.3)
        await engine.load()
    await asyncio.sleep(0.5)
    with pytest.raises(EngineError, match=r"s old \(limit 0\.3 s\), last failure: .*/metrics gave no answer"):
        await engine.load()
    with pytest.raises(EngineError, match="gave no answer"):
        await engine.check_health()
    await engine.stop()


async def test_metrics_come_back_with_the_server() -> None:
    port = free_port()
    async with serving(VllmLike(), port) as base_url:
        engine, _ = await started(base_url, scrape_interval_s=0.05, stale_after_s=0.2)
    await asyncio.sleep(0.4)
    with pytest.raises(EngineError):
        await engine.load()
    async with serving(VllmLike(), port):
        await until(lambda: runs(engine, 0))
        await engine.check_health()
        await engine.stop()


async def test_a_server_that_reports_itself_unhealthy_is_unhealthy(server: tuple[VllmLike, str]) -> None:
    app, base_url = server
    engine, _ = await started(base_url)
    await engine.check_health()
    app.health_status = 503
    with pytest.raises(EngineError, match="/health answered 503"):
        await engine.check_health()
    app.health_status = 404  # a server without that page: that it answers must do
    await engine.check_health()
    await engine.stop()


async def test_a_server_that_hangs_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.engines.remote.engine._CONTROL_TIMEOUT_S", 0.2)

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1_000):
            pass
        writer.close()

    async with tcp_server(hang) as base_url:
        with pytest.raises(EngineError, match="gave no answer"):
            await started(base_url, start_timeout_s=0.1)


async def test_before_the_start_and_after_the_stop_nothing_is_served(server: tuple[VllmLike, str]) -> None:
    engine = RemoteEngine(settings(server[1]))
    with pytest.raises(EngineError, match=r"call start\(\) first"):
        _ = engine.app
    with pytest.raises(EngineError, match="none was read yet"):
        await engine.load()
    with pytest.raises(EngineError, match=r"call start\(\) first"):
        await engine.check_health()
    await engine.stop()
    await engine.start()
    await engine.stop()
    await engine.stop()
    with pytest.raises(EngineError, match=r"call start\(\) first"):
        _ = engine.app


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"base_url": "host:8000"}, "base_url must look like http://host:8000, got 'host:8000'"),
        ({"base_url": "ftp://host"}, "base_url must look like"),
        ({"base_url": "http://host/v1?key=1"}, "base_url must look like"),
        ({"api_key": "a", "api_key_env": "B"}, "give api_key or api_key_env, not both"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"connect_timeout_s": 0}, "connect_timeout_s must be positive, got 0"),
        ({"stale_after_s": 0.1}, "stale_after_s must exceed scrape_interval_s, got 0.1 and 0.2"),
    ],
)
def test_wrong_settings_are_refused_with_their_value(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        settings(**{"base_url": "http://host:8000", **wrong})


async def test_an_emulated_server_behind_it_answers_and_shows_its_load() -> None:
    emulated = EmulatedEngine(EmulatedEngineSettings(served_model_names=("m",)))
    own = await emulated.start()
    async with serving(emulated.app) as base_url:
        engine, limits = await started(base_url, max_num_seqs=own.max_num_seqs, served_model_names=("m",))
        assert limits.max_model_len == own.max_model_len
        async with serving(engine.app) as url, httpx.AsyncClient(timeout=60) as client:
            await _generate(client, url, engine)
        await engine.stop()
    await emulated.stop()


async def _generate(client: httpx.AsyncClient, url: str, engine: RemoteEngine) -> None:
    body = {"model": "m", "prompt": "Hello", "max_tokens": 400, "stream": True, "ignore_eos": True}
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data: {")
        await until(lambda: runs(engine, 1))
    # The client has left in mid-answer.
    await until(lambda: runs(engine, 0))


async def test_a_server_that_hangs_with_requests_takes_no_more_until_it_goes_on(
    server: tuple[VllmLike, str],
) -> None:
    app, base_url = server
    app.metrics = (RECORDED / "vllm-0.32.0-busy.txt").read_text()
    engine, _ = await started(base_url, scrape_interval_s=0.02, stall_timeout_s=0.2)
    await until(lambda: hangs(engine))
    # Its health says nothing of it; a new replica would only wait for the same server.
    await engine.check_health()
    app.metrics = (RECORDED / "vllm-0.32.0-idle.txt").read_text()
    await until(lambda: runs(engine, 0))
    await engine.stop()


async def test_a_server_that_has_hung_since_it_was_idle_shows_in_what_it_leaves_unanswered() -> None:
    class Hanging(VllmLike):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["method"] != "POST":
                await super().__call__(scope, receive, send)
                return
            # As vLLM: the status of a stream comes at once.
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while (await receive())["type"] != "http.disconnect":
                pass

    async with serving(Hanging()) as base_url:
        engine, _ = await started(base_url, scrape_interval_s=0.02, stall_timeout_s=0.2)
        async with serving(engine.app) as url, httpx.AsyncClient(base_url=url) as http:
            asked = asyncio.create_task(http.post("/v1/completions", json={}))
            await until(lambda: hangs(engine))
            asked.cancel()
            # Nobody waits any more, so there is no telling.
            await until(lambda: runs(engine, 0))
        await engine.stop()

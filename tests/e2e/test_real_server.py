"""Manually started vLLM server: answers, backpressure by its reports, engine priorities."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.real_vllm import (
    ENGINE_START_S,
    LONG,
    MODEL,
    check_capital_of_france,
    needs_model,
    sdk,
    shipped,
    vllm_server,
)
from tests.e2e.real_vllm import send_request as ask_for_text
from tests.e2e.served import Served, serve
from tests.vllm_server import VllmServer

SEQUENCES, TARGET = 4, 3
FLOOD, TOKENS = 48, 40
# The backlog that the urgent request overtakes: long compared with its arrival.
BACKLOG, LONG_TOKENS = 16, 80
# A real engine on a shared CPU may exceed the TPOT gate, and would then get no requests.
NO_GATE = {"tpot_gate_s": None}

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(900), needs_model]


def model(name: str, url: str, **scheduler: Any) -> dict[str, Any]:
    """Return a model on the server, which serves it under this name."""
    return {
        "name": name,
        "pools": [
            {
                "name": "all",
                "engine": {"remote": {"endpoints": [url], "advanced": {"max_num_seqs": SEQUENCES}}},
                "resources": {"num_cpus": 0.1},
            }
        ],
        "scheduler": {"policy": "fcfs", **scheduler},
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    options: dict[str, Any] = {"max_num_seqs": SEQUENCES, "scheduling_policy": "priority"}
    with vllm_server(log, (MODEL, "bounded", "prioritised"), **options) as started:
        yield started


@pytest.fixture(scope="module")
def app(server: VllmServer) -> Iterator[Served]:
    args = {
        "models": [
            model("bounded", server.url, backpressure={"target_waiting": TARGET, **NO_GATE}),
            model("prioritised", server.url, backpressure=NO_GATE, engine_priority={"enabled": True}),
        ],
        "gateways": {"num_cpus": 0.1},
    }
    with serve(args, start_timeout_s=ENGINE_START_S) as served:
        yield served


def test_a_real_server_started_by_hand_serves_behind_a_remote_pool(server: VllmServer) -> None:
    args = shipped("remote")
    args["models"][0]["pools"][0]["engine"]["remote"]["endpoints"] = [server.url]
    with serve(args) as app, sdk(app) as client:
        check_capital_of_france(client)
        assert ask_for_text(client, LONG)[1].usage.prompt_tokens > 2_048


async def test_the_queue_of_a_real_engine_stays_at_its_target(app: Served, server: VllmServer) -> None:
    """The flood waits in the scheduler, where it can still be ordered, and the engine stays busy."""
    async with clients(app) as http:
        flood = asyncio.gather(*(send_request(http, "bounded") for _ in range(FLOOD)))
        seen = [sample async for sample in while_running(flood, lambda: samples(http, server, "bounded"))]
        await flood
    waiting_in_engine, running, waiting_outside = zip(*seen, strict=True)
    assert max(waiting_in_engine) <= TARGET
    assert max(running) == SEQUENCES
    # The number depends on the arrival rate, on a machine that the engine loads.
    assert max(waiting_outside) > SEQUENCES + TARGET
    # Once the first ones run, and while requests wait in the scheduler, the batch is full unless a sequence
    # has just left.
    filled = running.index(SEQUENCES)
    busy = [batch for _, batch, outside in seen[filled:] if outside > SEQUENCES]
    assert sum(busy) > 0.85 * SEQUENCES * len(busy)


async def test_an_engine_with_priorities_takes_the_urgent_one_first(app: Served, server: VllmServer) -> None:
    """A long engine queue does no harm there: an urgent request is scheduled next."""
    ended: list[str] = []

    async def noted(name: str, **options: Any) -> None:
        await send_request(http, "prioritised", **options)
        ended.append(name)

    async with clients(app) as http:
        flood = asyncio.gather(*(noted("flood", max_tokens=LONG_TOKENS) for _ in range(BACKLOG)))
        await until(lambda: waiting(server), more_than=TARGET)
        before = len(ended)
        await noted("urgent", priority=-1, max_tokens=2)
        # Running sequences continue; hardly any queued one is scheduled before.
        assert ended.index("urgent") <= before + 2 * SEQUENCES
        flood.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await flood


async def test_targets_are_met_missed_and_refused_as_the_answers_of_a_real_engine_show(app: Served) -> None:
    generous = {"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "60000"}
    impossible = {"x-slo-ttft-ms": "1", "x-slo-tpot-ms": "0.001"}

    async def send(name: str, **headers: str) -> httpx.Response:
        body = {"model": "bounded", "prompt": "Once upon a time", "max_tokens": 8, "stream": True}
        return await http.post("/v1/completions", json=body, headers={"x-request-id": name, **headers})

    async def receipt(name: str) -> dict[str, Any]:
        answer = await http.get(f"/debug/requests/{name}", headers=app.application.admin_headers())
        found: dict[str, Any] = answer.json()
        return found

    def counted(target: str) -> dict[str, float]:
        return {
            result: app.metric("ewsjf_latency_targets_total", model="bounded", target=target, result=result)
            for result in ("met", "missed", "refused")
        }

    async with clients(app) as http:
        for number in range(5):
            assert (await send(f"in-time-{number}", **generous)).status_code == 200
        # It refuses nothing before it knows twenty outcomes.
        for number in range(20):
            assert (await send(f"late-{number}", **impossible)).status_code == 200
        refused = await send("refused", **{"x-slo-ttft-ms": "1", "x-slo": "refuse"})
        assert refused.status_code == 429
        message = refused.json()["error"]["message"]
        assert "the first token is expected after" in message
        assert "even on an idle replica: raise the target" in message
        assert "retry-after" not in refused.headers
        assert counted("ttft") == {"met": 5, "missed": 20, "refused": 1}
        assert counted("tpot") == {"met": 5, "missed": 20, "refused": 0}
        in_time, late = await receipt("in-time-4"), await receipt("late-19")
        assert (in_time["latency_target"]["ttft_met"], late["latency_target"]["ttft_met"]) == (True, False)
        assert late["latency_target"]["expected_ttft_ms"] > 1
        assert late["latency_target"]["chance_of_miss"] > 0.5
        assert 0 < in_time["longest_gap"]["ms"] < sum(each["ms"] for each in in_time["stages"])


@contextlib.asynccontextmanager
async def clients(app: Served) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=FLOOD + 10)
    async with httpx.AsyncClient(base_url=app.url, timeout=300, limits=limits) as http:
        yield http


async def send_request(http: httpx.AsyncClient, name: str, **options: Any) -> None:
    """Stream one answer to its end."""
    body = {"model": name, "prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True}
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True, **options}) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"


async def samples(http: httpx.AsyncClient, server: VllmServer, name: str) -> tuple[float, float, float]:
    """Return the engine's queued and running requests, and those queued in the scheduler."""
    theirs, ours = await asyncio.gather(http.get(f"{server.url}/metrics"), http.get("/metrics"))
    return (
        gauge(theirs.text, "vllm:num_requests_waiting"),
        gauge(theirs.text, "vllm:num_requests_running"),
        gauge(ours.text, "ewsjf_requests_waiting", name),
    )


async def waiting(server: VllmServer) -> float:
    """Return the number of requests queued in the engine."""
    async with httpx.AsyncClient() as http:
        return gauge((await http.get(f"{server.url}/metrics")).text, "vllm:num_requests_waiting")


def gauge(metrics: str, name: str, of_model: str | None = None) -> float:
    """Return the sum of a gauge's samples, optionally of one model."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == name and (of_model is None or sample.labels.get("model") == of_model)
    )


async def until(figure: Callable[[], Awaitable[float]], *, more_than: float) -> None:
    """Wait until the figure exceeds a value."""
    async with asyncio.timeout(60):
        # The figure belongs to another process: nothing here could set an event when it changes.
        while await figure() <= more_than:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def while_running(
    work: "asyncio.Future[Any]", sample: Callable[[], Awaitable[tuple[float, float, float]]]
) -> AsyncIterator[tuple[float, float, float]]:
    """Yield samples, ten per second, until the work is done."""
    while not work.done():
        yield await sample()
        await asyncio.sleep(0.1)

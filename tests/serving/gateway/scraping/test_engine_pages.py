"""`/metrics/engines`: Prometheus targets, and each engine's page through the gateway."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from serve_app.engines.engine import Receive, Scope, Send
from serve_app.serving.gateway import ServedModel
from serve_app.serving.gateway.metrics_page import MetricsKey
from tests.serving.gateway.builders import TOKEN, FakeDispatcher, gateway, http_client, serving

PATH = "/metrics/engines"
PAGE = b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 3.0\n'
KIND = "text/plain; version=0.0.4; charset=utf-8"


class Scraped:
    """Engine with a metrics page and nothing else."""

    def __init__(self) -> None:
        self.heads: list[Mapping[bytes, bytes]] = []
        self.status = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert (scope["method"], scope["path"]) == ("GET", "/metrics")
        self.heads.append(dict(scope["headers"]))
        headers = [(b"content-type", KIND.encode()), (b"set-cookie", b"a=b")]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": PAGE})


@asynccontextmanager
async def gateway_over(ports: list[int], **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    # A model has one scheduler, which is registered under all of its names.
    dispatcher = FakeDispatcher(ports)
    models = (ServedModel(name="tiny"), ServedModel(name="alias"))
    async with http_client(gateway(dispatcher, models=models, **settings)) as http:
        yield http


async def test_each_replica_is_a_target_that_is_scraped_through_the_gateway() -> None:
    engine = Scraped()
    async with serving(engine) as one, gateway_over([one, 1]) as http:
        groups = (await http.get(PATH, headers={"host": "llm.example:8000"})).json()
        assert [group["targets"] for group in groups] == [["llm.example:8000"]] * 2
        assert groups[0]["labels"] == {
            "model": "tiny",
            "pool": "short",
            "replica": f"r{one}",
            "__metrics_path__": PATH,
            "__param_replica": f"r{one}",
        }
        page = await http.get(PATH, params={"replica": groups[0]["labels"]["__param_replica"]})
    assert (page.status_code, page.headers["content-type"], page.content) == (200, KIND, PAGE)
    assert "set-cookie" not in page.headers
    assert engine.heads[0][b"x-replica-token"] == TOKEN.encode()


async def test_scrapes_at_the_same_time_cost_an_engine_one() -> None:
    engine = Scraped()
    async with serving(engine) as port, gateway_over([port]) as http:
        # No cached page exists yet: the scrapes must share one read of the engine.
        pages = await asyncio.gather(*(http.get(PATH, params={"replica": f"r{port}"}) for _ in range(30)))
        await asyncio.sleep(1.2)
        await http.get(PATH, params={"replica": f"r{port}"})
    assert {page.content for page in pages} == {PAGE}
    # The thirty scrapes may take longer than the cache lives.
    assert 2 <= len(engine.heads) <= 10


@pytest.mark.parametrize(("replica", "status"), [("gone", 404), ("r1", 502)])
async def test_a_replica_that_cannot_be_scraped_is_no_empty_page(replica: str, status: int) -> None:
    async with gateway_over([1]) as http:
        answer = await http.get(PATH, params={"replica": replica})
    assert answer.status_code == status
    assert replica in answer.json()["error"]["message"]


async def test_an_engine_that_rejects_is_reported_as_such() -> None:
    engine = Scraped()
    engine.status = 503
    async with serving(engine) as port, gateway_over([port]) as http:
        answers = [await http.get(PATH, params={"replica": f"r{port}"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [502, 502]
    assert "answered 503 to a scrape" in answers[0].json()["error"]["message"]


async def test_the_key_of_the_scraper_opens_it() -> None:
    async with gateway_over([1], metrics_key=MetricsKey(key="scraper")) as http:
        statuses = [
            (await http.get(PATH, headers={"authorization": f"Bearer {key}"})).status_code
            for key in ("other", "scraper")
        ]
    assert statuses == [403, 200]

"""One scrape of any gateway covers all gateways."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.serving.gateway import Gateway, GatewaySettings, ServedModel
from tests.serving.channel.harness import FAST, ControlPlane, RawPeer, hello, scheduler_settings, wait_until
from tests.serving.gateway.builders import Engine, chat, http_client, serving
from tests.serving.gateway.fleet import _place

MODEL = "tiny"
NAMES = ("g1", "g2", "g3")


@dataclass
class Gateways:
    """Three gateways of one scheduler, each with its own address."""

    control_plane: ControlPlane
    http: dict[str, httpx.AsyncClient]

    async def requests(self, scraped_gateway: str) -> dict[str, float]:
        """Scrape one gateway; return the concluded requests of each."""
        page = (await self.http[scraped_gateway].get("/metrics")).text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == "ewsjf_gateway_requests_total":
                    gateway = sample.labels["gateway"]
                    found[gateway] = found.get(gateway, 0) + sample.value
        return found


@pytest.fixture
async def fleet() -> AsyncIterator[Gateways]:
    control_plane = ControlPlane(scheduler_settings(model=MODEL), FAST)
    async with AsyncExitStack() as stack:
        await control_plane.begin()
        stack.push_async_callback(control_plane.close)
        engine = Engine()
        port = await stack.enter_async_context(serving(engine))
        await control_plane.replica("s1", prepare=lambda double: _place(double, engine, port))
        http = {}
        for name in NAMES:
            settings = GatewaySettings(models=(ServedModel(name=MODEL),))
            app = Gateway(settings, {MODEL: await control_plane.gateway(name)}, name)
            http[name] = await stack.enter_async_context(http_client(app))
        yield Gateways(control_plane, http)


async def wait_for_counts(fleet: Gateways, scraped_gateway: str, counts: dict[str, float]) -> None:
    """Wait until a scrape of one gateway shows these counts: pages are cached briefly."""
    async with asyncio.timeout(20):
        while await fleet.requests(scraped_gateway) != counts:  # noqa: ASYNC110 - asking is what is tested
            await asyncio.sleep(0.1)


async def test_each_gateway_shows_the_counts_of_all(fleet: Gateways) -> None:
    for number, name in enumerate(NAMES, start=1):
        for _ in range(number):
            answer = await fleet.http[name].post("/v1/chat/completions", json=chat())
            assert answer.status_code == 200
    for scraped_gateway in NAMES:
        await wait_for_counts(fleet, scraped_gateway, {"g1": 1, "g2": 2, "g3": 3})


async def test_counts_never_fall_while_scrapes_reach_one_gateway_after_the_other(
    fleet: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A cached page may be older than one that another gateway has shown. Scrapes are further apart than that.
    monkeypatch.setattr("serve_app.serving.cached_page._SHARE", math.inf)
    before = dict.fromkeys(NAMES, 0.0)
    for turn in range(12):
        name = NAMES[turn % 3]
        await fleet.http[name].post("/v1/chat/completions", json=chat())
        seen = await fleet.requests(NAMES[(turn + 1) % 3])
        assert all(seen.get(each, 0.0) >= before[each] for each in before if each in seen)
        before |= seen
    async with asyncio.timeout(20):
        # A page that arrives too late is missing.
        while sum(before.values()) < 12:
            before |= await fleet.requests("g1")
            await asyncio.sleep(0.1)


async def test_a_gateway_that_does_not_answer_is_missing_from_a_scrape_and_holds_none_up(
    fleet: Gateways,
) -> None:
    for name in NAMES:
        await fleet.http[name].post("/v1/chat/completions", json=chat())
    endpoint = fleet.control_plane.endpoint()
    silent = await RawPeer.at(endpoint)
    silent.send(hello(endpoint, peer_id="silent"))
    await wait_until(lambda: fleet.control_plane.live.status()["gateways"] == 4)
    await wait_for_counts(fleet, "g1", {"g1": 1, "g2": 1, "g3": 1})
    silent.leave()

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from serve_app.errors import SettingsError
from serve_app.serving.gateway import Gateway, GatewaySettings, ServedModel
from serve_app.serving.gateway.keys import ApiKey
from serve_app.serving.gateway.metrics_page import MetricsKey
from serve_app.serving.scheduler.gauges import Figures
from serve_app.serving.scheduler.metrics import SchedulerMetrics
from tests.serving.channel.harness import FAST, ControlPlane, scheduler_settings
from tests.serving.gateway.builders import FakeDispatcher, gateway, http_client

SCRAPER = MetricsKey(key="scraper")
CLIENT, ADMIN = ApiKey(tenant="acme", key="client"), ApiKey(tenant="ops", key="admin", admin=True)


async def answers(*sent: str | None, **settings: Any) -> AsyncIterator[tuple[str | None, httpx.Response]]:
    """Yield the response of a gateway with these settings to each key; None sends no key."""
    dispatcher = FakeDispatcher([1])
    dispatcher.page = "# TYPE ewsjf_waiting gauge\newsjf_waiting 3\n"
    async with http_client(gateway(dispatcher, **settings)) as http:
        for key in sent:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            yield key, await http.get("/metrics", headers=headers)


async def test_a_flood_of_scrapes_is_answered_from_few_pages_which_the_schedulers_loop_does_not_draw_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []
    draw_up = SchedulerMetrics.exposition

    def counted(metrics: SchedulerMetrics, figures: Sequence[Figures]) -> str:
        threads.append(threading.get_ident())
        return draw_up(metrics, figures)

    monkeypatch.setattr(SchedulerMetrics, "exposition", counted)
    # A flood on a busy machine delays heartbeats and pages.
    monkeypatch.setattr("serve_app.serving.channel.gateway_client._SCRAPE_TIMEOUT_S", 30.0)
    patient = replace(FAST, dead_after_s=30.0, stuck_after_s=60.0)
    control_plane = ControlPlane(scheduler_settings(), patient)
    await control_plane.begin()
    client = await control_plane.gateway()
    app = gateway(client, models=(ServedModel(name="m"),))
    async with http_client(app, limits=httpx.Limits(max_connections=50)) as http:
        pages = await asyncio.gather(*(http.get("/metrics") for _ in range(120)))
    await control_plane.close()
    assert all('ewsjf_gateways_connected{model="m"} 1.0' in page.text for page in pages)
    assert len(threads) < 30
    assert threading.get_ident() not in threads


async def test_only_one_of_the_connected_schedulers_is_asked_for_the_other_gateways() -> None:
    models = {name: FakeDispatcher([1]) for name in ("lost", "a", "b")}
    models["lost"].is_connected = False
    served = tuple(ServedModel(name=name) for name in models)
    async with http_client(Gateway(GatewaySettings(models=served), models, "gw", {})) as http:
        await http.get("/metrics")
    assert {name: each.scrapes for name, each in models.items()} == {"lost": [], "a": [True], "b": [False]}


@pytest.mark.parametrize(
    ("settings", "may_read"),
    [
        ({}, {None, "client", "admin", "scraper", "wrong"}),
        ({"keys": (CLIENT, ADMIN)}, {"admin"}),
        ({"keys": (CLIENT, ADMIN), "metrics_key": SCRAPER}, {"admin", "scraper"}),
        ({"metrics_key": SCRAPER}, {"scraper"}),
    ],
    ids=["no keys", "keys", "keys and a scraper's", "a scraper's alone"],
)
async def test_the_metrics_are_readable_only_with_an_allowed_key(
    settings: dict[str, Any], may_read: set[str | None]
) -> None:
    everyone = (None, "client", "admin", "scraper", "wrong")
    async for key, answer in answers(*everyone, **settings):
        assert (answer.status_code == 200) == (key in may_read), key
        assert ("ewsjf_waiting" in answer.text) == (key in may_read), key
        if key not in may_read:
            assert answer.json()["error"]["message"], key


async def test_the_scrapers_key_opens_nothing_else() -> None:
    app = gateway(FakeDispatcher([1]), keys=(CLIENT,), metrics_key=SCRAPER)
    async with http_client(app) as http:
        for path in ("/v1/models", "/debug/queue", "/debug/status", "/debug/tuner"):
            answer = await http.get(path, headers={"authorization": "Bearer scraper"})
            assert answer.status_code in (401, 403), path


def test_an_empty_key_stops_the_start() -> None:
    with pytest.raises(SettingsError, match="metrics_key is empty: put it into environment variable KEY"):
        MetricsKey(env="KEY").secret({})

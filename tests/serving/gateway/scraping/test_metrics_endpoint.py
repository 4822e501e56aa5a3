import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.errors import SettingsError
from serve_app.serving.gateway import Gateway, GatewaySettings, ServedModel
from serve_app.serving.gateway.keys import ApiKey
from serve_app.serving.gateway.metrics_page import MetricsKey
from serve_app.serving.scheduler.gauges import Figures
from serve_app.serving.scheduler.metrics import SchedulerMetrics
from tests.serving.channel.harness import FAST, Simulation, scheduler_settings
from tests.serving.gateway.builders import FakeDispatcher, gateway, serving

SCRAPER = MetricsKey(key="scraper")
CLIENT, ADMIN = ApiKey(tenant="acme", key="client"), ApiKey(tenant="ops", key="admin", admin=True)


async def answers(*sent: str | None, **settings: Any) -> AsyncIterator[tuple[str | None, httpx.Response]]:
    """Yield the response of a gateway with these settings to each key; None sends no key."""
    dispatcher = FakeDispatcher([1])
    dispatcher.page = "# TYPE ewsjf_waiting gauge\newsjf_waiting 3\n"
    app = gateway(dispatcher, **settings)
    async with serving(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
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
    # A flood on a busy machine delays heartbeats.
    patient = replace(FAST, dead_after_s=30.0, stuck_after_s=60.0)
    world = Simulation(scheduler_settings(), patient)
    await world.begin()
    client = await world.gateway()
    settings = GatewaySettings(models=(ServedModel(name="m"),))
    async with serving(Gateway(settings, {"m": client}, "g1")) as port:
        limits = httpx.Limits(max_connections=50)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=60) as http:
            pages = await asyncio.gather(*(http.get("/metrics") for _ in range(200)))
    await world.close()
    assert all('ewsjf_gateways_connected{model="m"} 1.0' in page.text for page in pages)
    assert len(threads) < 50
    assert threading.get_ident() not in threads


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
    async with serving(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        for path in ("/v1/models", "/debug/queue", "/debug/status", "/debug/tuner"):
            answer = await http.get(path, headers={"authorization": "Bearer scraper"})
            assert answer.status_code in (401, 403), path


def test_a_secret_comes_from_one_place(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from a file\n", encoding="utf-8")
    assert MetricsKey(file=str(file)).secret() == "from a file"
    assert MetricsKey(env="KEY").secret({"KEY": "from the environment"}) == "from the environment"
    with pytest.raises(SettingsError, match="exactly one of key, env, file; got key and env"):
        MetricsKey(key="a", env="B")
    with pytest.raises(SettingsError, match="is empty: put it into environment variable KEY"):
        MetricsKey(env="KEY").secret({})
    with pytest.raises(SettingsError, match="cannot be read"):
        MetricsKey(file=str(tmp_path / "nothing")).secret()

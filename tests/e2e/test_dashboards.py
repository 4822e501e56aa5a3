"""Every query of every dashboard and alert, on a real Prometheus that scrapes the application."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from observability.files import OBSERVABILITY
from tests.e2e.served import Served, serve, start_tuner, wait_for
from tests.observability.prometheus import Prometheus, prometheus, rules

# Queries that may be empty, by a part of the query, with the reason.
MAY_BE_EMPTY = {
    "ewsjf_spills_total": "no pool may be full for long enough",
    "ewsjf_misroutes_total": "no estimate may be wrong",
    "ewsjf_key_": "there are no keys",
    "ewsjf_tuned_value": "the tuner tries nothing here",
    "ewsjf_twin_error_ratio": "the tuner checks nothing here",
    "ewsjf_endpoints": "no pool is remote",
    "ewsjf_scaling_decisions_total": "no pool is scaled",
    "ewsjf_queue_wait_prediction_error_seconds": "nothing has to have been predicted",
    "ewsjf_partition_": "queues may have been learned before",
}


@pytest.fixture
def watcher(app: Served, tmp_path: Path) -> Iterator[Prometheus]:
    with prometheus(app.url, tmp_path) as found:
        yield found


async def overload(
    url: str, seconds: float = 12.0, key: str = "", *, clients: int = 280, **changes: Any
) -> None:
    """Overload the engines, with several tenants, classes and latency targets."""
    stop = asyncio.get_running_loop().time() + seconds
    own = {"authorization": f"Bearer {key}"} if key else {}

    async def send(number: int) -> None:
        words = "word " * (20 if number % 4 else 900)
        # One connection pool per client: a shared one is slower than the engines.
        async with httpx.AsyncClient(base_url=url, timeout=120, headers=own, verify=False) as http:
            while asyncio.get_running_loop().time() < stop:
                body = {
                    "model": "demo",
                    "messages": [{"role": "user", "content": f"{number} {words}"}],
                    "max_tokens": 400,
                    "stream": True,
                    "user": f"tenant{number % 5}",
                    **changes,
                }
                priority = ("interactive", "default", "batch")[number % 3]
                headers = {"x-priority": priority, "x-ewsjf-queue": "comments"}
                if number % 2:
                    headers |= {"x-slo-ttft-ms": "2000", "x-slo-tpot-ms": "100"}
                async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
                    await answer.aread()

    wrong = await asyncio.to_thread(
        httpx.post, f"{url}/v1/chat/completions", json={}, headers=own, timeout=120
    )
    assert wrong.status_code == 400
    await asyncio.gather(*(send(number) for number in range(clients)))


def queries() -> dict[str, str]:
    """Return every expression by its place."""
    found = {}
    for path in sorted((OBSERVABILITY / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                place = f"{path.stem}: {panel['title']} {target['refId']}"
                found[place] = re.sub(r'"\$(model|tenant)"', '".*"', target["expr"]).replace(
                    "$interval", "20s"
                )
    return found


def test_every_query_of_every_dashboard_shows_something(app: Served, watcher: Prometheus) -> None:
    start_tuner(app)
    # It reports nothing for some twenty seconds.
    asyncio.run(overload(app.url, seconds=24.0))
    assert watcher.targets() == {"ewsjf": 1, "ewsjf-engines": 3}
    # The queue is empty by now, and some ratios of rates have no value.
    empty = {
        place: expression
        for place, expression in queries().items()
        if not any(part in expression for part in MAY_BE_EMPTY)
        and not watcher.value(f"max_over_time(({expression})[60s:1s])")
    }
    assert not empty


def test_every_alert_can_be_evaluated_and_none_fires_without_its_fault(watcher: Prometheus) -> None:
    wait_for(lambda: watcher.targets() == {"ewsjf": 1, "ewsjf-engines": 3}, 20, watcher.targets)
    for rule in rules():
        watcher.value(rule["expr"])
    assert watcher.firing() == set()


SCRAPER, CLIENT = "sk-of-the-scraper", "sk-of-a-client"
# All that the other application lacks, except for remote pools, and a tuned value, which takes an hour.
_NEVER = ("ewsjf_tuned_value", "ewsjf_endpoints")
RARE = {
    "models": [
        {
            "name": "demo",
            "pools": [
                {
                    "name": "short",
                    "engine": {"emulated": {"profile": "laptop", "max_model_len": 4096, "max_num_seqs": 4}},
                    "resources": {"num_cpus": 0.1},
                    "autoscaling": {"max_replicas": 2, "advanced": {"downscale_delay_s": 2.0}},
                },
                {
                    "name": "long",
                    "engine": {"emulated": {"profile": "laptop", "max_model_len": 8192}},
                    "resources": {"num_cpus": 0.1},
                },
            ],
            "scheduler": {"routing": {"b_short_tokens": 1_000}},
            "tuner": {
                "mode": True,
                "profile": "laptop",
                "advanced": {"learn_from": 40, "min_requests": 1_000_000},
            },
        }
    ],
    "gateway": {
        "keys": [{"tenant": "app", "key": CLIENT}],
        "advanced": {"metrics_key": {"key": SCRAPER}},
    },
    "gateways": {"replicas": 2, "num_cpus": 0.1},
}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_rare_series_are_shown_once_they_occur(tmp_path: Path) -> None:
    with serve(RARE) as app, prometheus(app.url, tmp_path, key=SCRAPER) as watcher:
        app.wait_until_ready()
        asyncio.run(overload(app.url, 15.0, CLIENT, clients=100))
        # Answers end long before their limit: they belonged in the short pool.
        asyncio.run(overload(app.url, 5.0, CLIENT, clients=20, max_tokens=2_000))
        rare = {
            place: expression
            for place, expression in queries().items()
            if any(part in expression for part in MAY_BE_EMPTY)
            and not any(part in expression for part in _NEVER)
        }
        assert len(rare) >= 10

        def empty() -> list[str]:
            return [
                place
                for place, expression in rare.items()
                if not watcher.value(f"last_over_time(({expression})[90s:1s])")
            ]

        wait_for(lambda: not empty(), 60, empty)

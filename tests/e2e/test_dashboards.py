"""Every query of every dashboard and alert, by a real Prometheus that scrapes the running application."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from observability.files import OBSERVABILITY
from tests.e2e.served import Served
from tests.observability.prometheus import Prometheus, prometheus, rules, until

# What shows nothing in an application without the thing, by a part of the query.
MAY_BE_EMPTY = {
    "ewsjf_spills_total": "no pool may be full for long enough",
    "ewsjf_misroutes_total": "no estimate may be wrong",
    "ewsjf_key_": "there are no keys",
    "ewsjf_tuned_value": "the tuner tries nothing here",
    "ewsjf_twin_error_ratio": "the tuner checks nothing here",
    "ewsjf_scaling_decisions_total": "no pool is scaled",
    "ewsjf_queue_wait_prediction_error_seconds": "nothing has to have been predicted",
    "ewsjf_partition_": "queues may have been learned before",
}


@pytest.fixture
def watcher(app: Served, tmp_path: Path) -> Iterator[Prometheus]:
    with prometheus(app.url, tmp_path) as found:
        yield found


async def overload(url: str, seconds: float = 12.0) -> None:
    """More than the engines take, of several tenants and classes, until all has been seen."""
    stop = asyncio.get_running_loop().time() + seconds
    limits = httpx.Limits(max_connections=300)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:

        async def send(number: int) -> None:
            words = "word " * (20 if number % 4 else 900)
            while asyncio.get_running_loop().time() < stop:
                body = {
                    "model": "demo",
                    "messages": [{"role": "user", "content": f"{number} {words}"}],
                    "max_tokens": 400,
                    "stream": True,
                    "user": f"tenant{number % 5}",
                }
                headers = {"x-priority": ("interactive", "default", "batch")[number % 3]}
                async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
                    await answer.aread()

        assert (await http.post("/v1/chat/completions", json={})).status_code == 400
        await asyncio.gather(*(send(number) for number in range(280)))


def queries() -> dict[str, str]:
    """Every expression by its place."""
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
    asyncio.run(overload(app.url))
    assert watcher.targets() == {"ewsjf": 1, "ewsjf-engines": 3}
    # What waited a moment ago counts: the queue may be empty by now.
    empty = {
        place: expression
        for place, expression in queries().items()
        if not any(part in expression for part in MAY_BE_EMPTY)
        and not watcher.value(f"last_over_time(({expression})[20s:1s])")
    }
    assert not empty


def test_every_alert_can_be_asked_and_none_fires_without_its_fault(watcher: Prometheus) -> None:
    until(lambda: watcher.targets() == {"ewsjf": 1, "ewsjf-engines": 3}, 20, watcher.targets)
    for rule in rules():
        watcher.value(rule["expr"])
    assert watcher.firing() == set()

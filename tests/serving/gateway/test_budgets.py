"""Budgets of keys over all models, as a client meets them."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, NoReturn, Self

import httpx
import openai
import pytest

from serve_app.core.admission.key_limits import TokenPrices
from serve_app.serving.api_keys import create_key, read_keys
from serve_app.serving.gateway import ServedModel
from serve_app.serving.gateway import keys as budgets
from tests.engines.servers import until
from tests.serving.channel.harness import wait_until

from .builders import Answers, Engine
from .conftest import running_gateway

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


class Ledgers:
    """Usage counted by two schedulers: requests, prompt, cached and generated tokens by model."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, list[int]]] = {"a": {}, "b": {}}
        self.reads = 0

    def scheduler(self, name: str) -> Answers:
        async def spent(keys: list[str]) -> dict[str, Any]:
            self.reads += 1
            counts = self.counts[name]
            return {key: dict.fromkeys(("day", "month"), counts) for key in keys} if counts else {}

        return Answers(spent=spent)


@asynccontextmanager
async def gateway(
    path: Path, queries: dict[str, Answers], **permissions: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Engine]]:
    _, secret = create_key(path, tenant="app", **permissions)
    price = TokenPrices(prompt=1_000_000.0, generated=2_000_000.0, cached=0.0)
    models = tuple(ServedModel(name=name, price=price) for name in ("a", "b"))
    async with running_gateway(models=models, keys_file=str(path), queries=queries) as harness:
        harness.http.headers["authorization"] = f"Bearer {secret}"
        yield harness.http, harness.engine


async def send_request(http: httpx.AsyncClient, model: str = "a") -> httpx.Response:
    return await http.post("/v1/chat/completions", json={"model": model, **CHAT})


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"tokens_per_day": 70}, "70 tokens per day and has used 70"),
        ({"tokens_per_month": 69}, "69 tokens per month and has used 70"),
        ({"cost_per_day": 80.0}, "80 per day and has used 80"),
        ({"cost_per_month": 79.5}, "79.5 per month and has used 80"),
    ],
)
async def test_a_spent_budget_is_a_429_with_its_reset(
    tmp_path: Path, limit: dict[str, float], message: str
) -> None:
    ledgers = Ledgers()
    # 60 prompt tokens of which 20 were cached, and 10 + 10 generated tokens, cost 40 + 20 + 20.
    ledgers.counts = {"a": {"a": [1, 50, 20, 10]}, "b": {"b": [1, 0, 0, 10]}}
    queries = {name: ledgers.scheduler(name) for name in ledgers.counts}
    if "cost" in next(iter(limit)):
        ledgers.counts["b"]["b"] = [1, 10, 0, 10]
    async with gateway(tmp_path / "k", queries, **limit) as (http, engine):
        answer = await send_request(http)
        assert answer.status_code == 429
        assert message in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "insufficient_quota"
        now = datetime.now(UTC)
        reset = now + timedelta(seconds=int(answer.headers["retry-after"]) + 1)
        assert (reset.hour, reset.minute) == (0, 0)
        assert reset.day == 1 or "day" in next(iter(limit))
        assert answer.headers["x-should-retry"] == "false"
        assert engine.bodies == []


async def test_the_log_names_the_key_and_the_tenant_of_a_rejection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    ledgers = Ledgers()
    ledgers.counts["a"] = {"a": [1, 50, 0, 10]}
    async with gateway(tmp_path / "k", {"a": ledgers.scheduler("a")}, tokens_per_day=1) as (http, _):
        assert (await send_request(http)).status_code == 429
    (kept,) = read_keys(tmp_path / "k")
    assert "outcome=rejected_rate_limited status=429 model=- endpoint=/v1/chat/completions" in caplog.text
    assert f"tenant=app key={kept.id} " in caplog.text


async def test_the_sdk_reports_it_without_retries(tmp_path: Path) -> None:
    ledgers = Ledgers()
    ledgers.counts["a"] = {"a": [1, 50, 0, 10]}
    async with gateway(tmp_path / "k", {"a": ledgers.scheduler("a")}, tokens_per_day=1) as (http, _):
        key = http.headers["authorization"].removeprefix("Bearer ")
        async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key=key, max_retries=3) as sdk:
            with pytest.raises(openai.RateLimitError, match="has a budget of 1 tokens per day"):
                await sdk.chat.completions.create(model="a", messages=CHAT["messages"])  # type: ignore[call-overload]
    assert ledgers.reads == 1


async def test_a_budget_that_becomes_spent_stops_the_key_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "_INTERVAL_S", 0.05)
    ledgers = Ledgers()
    queries = {name: ledgers.scheduler(name) for name in ("a", "b")}
    async with gateway(tmp_path / "k", queries, tokens_per_day=100) as (http, _):
        assert (await send_request(http)).status_code == 200
        ledgers.counts["b"] = {"b": [1, 90, 0, 10]}

        async def is_stopped() -> bool:
            return (await send_request(http, "b")).status_code == 429

        await until(is_stopped)
        # Another model costs the same budget.
        assert (await send_request(http, "a")).status_code == 429


async def test_idle_keys_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "_INTERVAL_S", 0.02)
    monkeypatch.setattr(budgets, "_IDLE_S", 0.1)
    ledgers = Ledgers()
    async with gateway(tmp_path / "k", {"a": ledgers.scheduler("a")}, tokens_per_day=100) as (http, _):
        assert (await send_request(http)).status_code == 200
        await wait_until(lambda: ledgers.reads > 2)
        await asyncio.sleep(0.3)
        before = ledgers.reads
        await asyncio.sleep(0.2)
        assert ledgers.reads == before
        assert (await send_request(http)).status_code == 200
        await wait_until(lambda: ledgers.reads > before + 1)


async def test_a_silent_scheduler_counts_with_its_last_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "_INTERVAL_S", 0.02)

    async def unreachable(_: list[str]) -> NoReturn:
        raise ConnectionError("gone")

    ledgers = Ledgers()
    ledgers.counts["a"] = {"a": [1, 50, 0, 10]}
    scheduler = ledgers.scheduler("a")
    queries = {"a": scheduler, "b": Answers(spent=unreachable)}
    async with gateway(tmp_path / "k", queries, tokens_per_day=60) as (http, _):
        assert (await send_request(http)).status_code == 429
        scheduler.answers["spent"] = unreachable
        await asyncio.sleep(0.1)
        assert (await send_request(http)).status_code == 429


async def test_all_requests_of_a_key_that_was_idle_wait_for_its_fresh_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "_INTERVAL_S", 0.02)
    monkeypatch.setattr(budgets, "_IDLE_S", 0.05)
    ledgers = Ledgers()
    ledgers.counts["a"] = {"a": [1, 50, 0, 10]}
    scheduler = ledgers.scheduler("a")
    async with gateway(tmp_path / "k", {"a": scheduler}, tokens_per_day=60) as (http, _):
        assert (await send_request(http)).status_code == 429
        await asyncio.sleep(0.3)

        async def slow(keys: list[str]) -> dict[str, Any]:
            await asyncio.sleep(0.2)
            return {}

        scheduler.answers["spent"] = slow
        answers = await asyncio.gather(*(send_request(http) for _ in range(5)))
    assert [answer.status_code for answer in answers] == [200] * 5


class Clock(datetime):
    """Clock that stands still at `moment`."""

    moment: datetime

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return cls.fromtimestamp(cls.moment.timestamp(), tz)


async def test_counts_of_a_scheduler_that_is_silent_since_yesterday_count_for_the_month_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreachable(_: list[str]) -> NoReturn:
        raise ConnectionError("gone")

    monkeypatch.setattr(budgets, "datetime", Clock)
    monkeypatch.setattr(Clock, "moment", datetime(2026, 11, 29, 12, tzinfo=UTC), raising=False)
    ledgers = Ledgers()
    ledgers.counts["a"] = {"a": [1, 50, 0, 10]}
    scheduler = ledgers.scheduler("a")
    async with gateway(tmp_path / "k", {"a": scheduler}, tokens_per_day=60, tokens_per_month=70) as (http, _):
        assert (await send_request(http)).status_code == 429
        scheduler.answers["spent"] = unreachable
        monkeypatch.setattr(Clock, "moment", datetime(2026, 11, 30, 0, 0, 1, tzinfo=UTC))
        assert (await send_request(http)).status_code == 200
    async with gateway(tmp_path / "m", {"a": ledgers.scheduler("a")}, tokens_per_month=60) as (http, _):
        assert (await send_request(http)).status_code == 429
        monkeypatch.setattr(Clock, "moment", datetime(2026, 11, 30, 23, 59, 59, tzinfo=UTC))
        assert (await send_request(http)).status_code == 429


async def test_a_reset_in_less_than_a_second_is_rounded_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "datetime", Clock)
    monkeypatch.setattr(
        Clock, "moment", datetime(2026, 11, 29, 23, 59, 59, 700_000, tzinfo=UTC), raising=False
    )
    ledgers = Ledgers()
    ledgers.counts["a"] = {"a": [1, 50, 0, 10]}
    async with gateway(tmp_path / "k", {"a": ledgers.scheduler("a")}, tokens_per_day=60) as (http, _):
        answer = await send_request(http)
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("1", "300")


async def test_a_key_without_a_budget_costs_no_query(tmp_path: Path) -> None:
    ledgers = Ledgers()
    async with gateway(tmp_path / "k", {"a": ledgers.scheduler("a")}, tokens_per_minute=100) as (http, _):
        assert (await send_request(http)).status_code == 200
    assert ledgers.reads == 0

"""Budgets of keys over all models, as a client meets them."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any, Self

import httpx
import openai
import pytest

from serve_app.core.admission.key_limits import TokenPrices
from serve_app.serving.api_keys import create_key, read_keys
from serve_app.serving.gateway import ServedModel
from serve_app.serving.gateway import keys as budgets
from tests.engines.servers import until
from tests.serving.channel.harness import wait_until

from .builders import Answers
from .conftest import GatewayHarness, running_gateway

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
# 75 tokens, of which 20 are cached; 30 uncached and 25 generated ones cost 80.
SPENT = {"a": {"a": [1, 50, 20, 10]}, "b": {"b": [1, 0, 0, 15]}}


class Ledgers:
    """Usage counted by two schedulers: requests, prompt, cached and generated tokens by model.

    Attributes:
        silent: schedulers that do not respond.
        delay_s: time of a response.
        reads: number of queries, answered or not.
    """

    def __init__(self, **counts: dict[str, list[int]]) -> None:
        self.counts: dict[str, dict[str, list[int]]] = {"a": {}, "b": {}, **counts}
        self.silent: set[str] = set()
        self.delay_s = 0.0
        self.reads = 0

    def scheduler(self, name: str) -> Answers:
        async def spent(keys: list[str]) -> dict[str, Any]:
            self.reads += 1
            await asyncio.sleep(self.delay_s)
            if name in self.silent:
                raise ConnectionError("gone")
            counts = self.counts[name]
            return {key: dict.fromkeys(("day", "month"), counts) for key in keys} if counts else {}

        return Answers(spent=spent)


@asynccontextmanager
async def gateway(path: Path, ledgers: Ledgers, **permissions: Any) -> AsyncIterator[GatewayHarness]:
    _, secret = create_key(path, tenant="app", **permissions)
    price = TokenPrices(prompt=1_000_000.0, generated=2_000_000.0, cached=0.0)
    models = tuple(ServedModel(name=name, price=price) for name in ("a", "b"))
    queries = {name: ledgers.scheduler(name) for name in ("a", "b")}
    async with running_gateway(models=models, keys_file=str(path), queries=queries) as harness:
        harness.http.headers["authorization"] = f"Bearer {secret}"
        yield harness


async def send_request(harness: GatewayHarness, model: str = "a") -> httpx.Response:
    return await harness.http.post("/v1/chat/completions", json={"model": model, **CHAT})


class Clock(datetime):
    """Clock that stands still at `moment`."""

    moment: datetime

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return cls.fromtimestamp(cls.moment.timestamp(), tz)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[Clock]:
    """Let the clock of budgets stand still at a noon."""
    monkeypatch.setattr(budgets, "datetime", Clock)
    Clock.moment = datetime(2026, 11, 29, 12, tzinfo=UTC)
    return Clock


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the counts of keys often."""
    monkeypatch.setattr(budgets, "_INTERVAL_S", 0.02)


@pytest.mark.parametrize(
    ("limits", "message", "now", "reset"),
    [
        ({"tokens_per_day": 75}, "75 tokens per day and has used 75", "2026-11-29 12:00", "2026-11-30 00:00"),
        ({"cost_per_day": 80.0}, "80 per day and has used 80", "2026-11-30 23:59:59.7", "2026-12-01 00:00"),
        (
            {"tokens_per_month": 74, "tokens_per_day": 76},
            "74 tokens per month and has used 75",
            "2026-11-29 12:00",
            "2026-12-01 00:00",
        ),
        (
            {"cost_per_month": 79.5, "cost_per_day": 81.0},
            "79.5 per month and has used 80",
            "2026-12-31 23:59",
            "2027-01-01 00:00",
        ),
    ],
)
async def test_a_spent_budget_is_a_429_with_its_reset(
    tmp_path: Path,
    clock: type[Clock],
    caplog: pytest.LogCaptureFixture,
    limits: dict[str, float],
    message: str,
    now: str,
    reset: str,
) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    clock.moment = datetime.fromisoformat(f"{now}Z")
    reset_s = (datetime.fromisoformat(f"{reset}Z") - clock.moment).total_seconds()
    async with gateway(tmp_path / "k", Ledgers(**SPENT), **limits) as harness:
        answer = await send_request(harness)
    assert answer.status_code == 429
    assert f"{message}: it resets at {reset} UTC" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "insufficient_quota"
    assert answer.headers["retry-after"] == str(math.ceil(reset_s))
    assert answer.headers["retry-after-ms"] == str(round(reset_s * 1_000))
    assert answer.headers["x-should-retry"] == "false"
    assert harness.engine.bodies == []
    (key,) = read_keys(tmp_path / "k")
    assert "outcome=rejected_rate_limited status=429 model=- endpoint=/v1/chat/completions" in caplog.text
    assert f"tenant=app key={key.id} " in caplog.text


async def test_the_sdk_reports_it_without_retries(tmp_path: Path) -> None:
    ledgers = Ledgers(**SPENT)
    async with gateway(tmp_path / "k", ledgers, tokens_per_day=1) as harness:
        key = harness.http.headers["authorization"].removeprefix("Bearer ")
        sdk = harness.sdk.with_options(api_key=key, max_retries=3)
        with pytest.raises(openai.RateLimitError, match="has a budget of 1 tokens per day"):
            await sdk.chat.completions.create(model="a", messages=CHAT["messages"])  # type: ignore[call-overload]
    # One read of each scheduler.
    assert ledgers.reads == 2


@pytest.mark.usefixtures("fast")
async def test_a_budget_that_becomes_spent_stops_the_key_within_seconds(tmp_path: Path) -> None:
    ledgers = Ledgers()
    async with gateway(tmp_path / "k", ledgers, tokens_per_day=100) as harness:
        assert (await send_request(harness)).status_code == 200
        ledgers.counts["b"] = {"b": [1, 90, 0, 10]}

        async def is_stopped() -> bool:
            return (await send_request(harness, "b")).status_code == 429

        await until(is_stopped)
        # Another model costs the same budget.
        assert (await send_request(harness, "a")).status_code == 429


@pytest.mark.usefixtures("fast")
async def test_idle_keys_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "_IDLE_S", 0.1)
    ledgers = Ledgers()
    async with gateway(tmp_path / "k", ledgers, tokens_per_day=100) as harness:
        assert (await send_request(harness)).status_code == 200
        await wait_until(lambda: ledgers.reads > 2)
        await asyncio.sleep(0.3)
        before = ledgers.reads
        await asyncio.sleep(0.2)
        assert ledgers.reads == before
        assert (await send_request(harness)).status_code == 200
        await wait_until(lambda: ledgers.reads > before + 2)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("limit", "later", "status"),
    [
        ("tokens_per_day", "2026-11-29 23:59:59", 429),
        ("tokens_per_day", "2026-11-30 00:00", 200),
        ("tokens_per_month", "2026-11-30 23:59:59", 429),
        ("tokens_per_month", "2026-12-01 00:00", 200),
    ],
)
async def test_a_silent_scheduler_counts_with_its_last_answer_until_the_period_of_that_answer_ends(
    tmp_path: Path, clock: type[Clock], limit: str, later: str, status: int
) -> None:
    ledgers = Ledgers(**SPENT)
    ledgers.silent = {"b"}
    async with gateway(tmp_path / "k", ledgers, **{limit: 60}) as harness:
        assert (await send_request(harness)).status_code == 429
        ledgers.silent = {"a", "b"}
        clock.moment = datetime.fromisoformat(f"{later}Z")
        reads = ledgers.reads
        await wait_until(lambda: ledgers.reads > reads + 2)
        assert (await send_request(harness)).status_code == status


@pytest.mark.usefixtures("fast")
async def test_all_requests_of_a_key_that_was_idle_wait_for_its_fresh_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "_IDLE_S", 0.1)
    ledgers = Ledgers(**SPENT)
    async with gateway(tmp_path / "k", ledgers, tokens_per_day=60) as harness:
        assert (await send_request(harness)).status_code == 429
        await asyncio.sleep(0.3)
        ledgers.counts, ledgers.delay_s = {"a": {}, "b": {}}, 0.2
        answers = await asyncio.gather(*(send_request(harness) for _ in range(5)))
    assert [answer.status_code for answer in answers] == [200] * 5


async def test_a_key_without_a_budget_costs_no_query(tmp_path: Path) -> None:
    ledgers = Ledgers()
    async with gateway(tmp_path / "k", ledgers, tokens_per_minute=100) as harness:
        assert (await send_request(harness)).status_code == 200
    assert ledgers.reads == 0

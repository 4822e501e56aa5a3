"""A scheduled share that rises in steps after an observation, and is undone if first tokens get slower."""

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.core.events import ActiveShareChanged, FirstToken
from serve_app.serving.scheduler import tuning_endpoint
from serve_app.serving.scheduler.tuning_endpoint import SchedulingMode


class FakeScheduler:
    """Scheduler of which only the share counts."""

    end_reason = ""

    def __init__(self) -> None:
        self.core: Any = SimpleNamespace(pass_through=SimpleNamespace(active_share=0.0))

    def feed(self, event: Any) -> None:
        assert isinstance(event, ActiveShareChanged)
        self.core.pass_through.active_share = event.active_share


class Traffic:
    """First tokens at ten per second, of requests of two lengths; scheduled ones take `slowdown` as long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        self.slowdown: Callable[[], float] = lambda: 1.0
        self.rng = random.Random(5)
        monkeypatch.setattr(tuning_endpoint, "time", lambda: self.now)
        self.scheduler = FakeScheduler()
        self.mode = SchedulingMode(self.scheduler)

    async def flow(self, seconds: float, *, all_bypass: bool = False) -> list[float]:
        """Let time pass, and return the shares that were reached."""
        on_first_token, shares = self.mode.handlers()[FirstToken], [self.mode.active_share]
        for _ in range(round(10 * seconds)):
            self.now += 0.1
            bypassed = all_bypass or self.rng.random() >= self.mode.active_share
            tokens = self.rng.choice((100, 4_000))
            took_s = 0.4 * self.rng.lognormvariate(0.0, 0.5) * (1 if tokens == 100 else 4)
            if not bypassed:
                took_s *= self.slowdown()
            entry = SimpleNamespace(
                now=self.now,
                scheduled=SimpleNamespace(
                    running=SimpleNamespace(started_at=self.now, bypassed=bypassed),
                    request=SimpleNamespace(arrived_at=self.now - took_s),
                    estimate=SimpleNamespace(expected_prompt_tokens=tokens),
                ),
            )
            on_first_token(entry)
            await asyncio.sleep(0)
            if self.mode.active_share != shares[-1]:
                shares.append(self.mode.active_share)
        return shares


async def test_without_an_observation_the_share_changes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Traffic(monkeypatch)
    traffic.mode.change(1.0)
    assert traffic.mode.active_share == 1.0


async def test_after_an_observation_it_rises_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Traffic(monkeypatch)
    await traffic.flow(60.0)
    traffic.mode.change(1.0)
    document = traffic.mode.describe()
    assert (document["active_share"], document["target_share"]) == (0.1, 1.0)
    assert await traffic.flow(200.0) == [0.1, 0.25, 0.5, 1.0]


async def test_a_step_that_makes_first_tokens_slower_is_undone_and_tried_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traffic = Traffic(monkeypatch)
    await traffic.flow(60.0)
    # Scheduling harms once it has half of the requests.
    traffic.slowdown = lambda: 3.0 if traffic.mode.active_share >= 0.5 else 1.0
    traffic.mode.change(1.0)
    shares = await traffic.flow(600.0)
    assert shares[:4] == [0.1, 0.25, 0.5, 0.25]
    assert 1.0 not in shares
    assert 0.5 in shares[4:]
    traffic.slowdown = lambda: 1.0
    await traffic.flow(1_500.0)
    assert traffic.mode.active_share == 1.0


async def test_the_last_step_is_undone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Traffic(monkeypatch)
    await traffic.flow(60.0)
    traffic.slowdown = lambda: 2.0 if traffic.mode.active_share == 1.0 else 1.0
    traffic.mode.change(1.0)
    assert (await traffic.flow(200.0))[:5] == [0.1, 0.25, 0.5, 1.0, 0.5]


async def test_observation_comes_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Traffic(monkeypatch)
    await traffic.flow(60.0)
    traffic.mode.change(1.0)
    traffic.mode.change(0.0)
    assert traffic.mode.active_share == traffic.mode.target_share == 0.0
    assert await traffic.flow(60.0) == [0.0]


async def test_a_share_can_be_set_again_while_bypassed_requests_still_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traffic = Traffic(monkeypatch)
    traffic.mode.change(1.0)
    await traffic.flow(5.0, all_bypass=True)
    traffic.mode.change(1.0)
    assert traffic.mode.active_share == traffic.mode.target_share == 1.0

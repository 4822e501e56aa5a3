import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio
from ray.serve.handle import DeploymentHandle

from serve_app.errors import Conclusion
from serve_app.request import PromptShape
from serve_app.serving import tuner as actor
from serve_app.serving.scheduler.actor import SchedulerActor
from serve_app.serving.scheduler.live_scheduler import LiveScheduler
from serve_app.serving.scheduler.tuning_endpoint import PartitionUpdate
from serve_app.serving.tuner import ParameterTuner, TunerActor
from serve_app.tuning.rollout import Observation, Retune
from serve_app.tuning.settings import TunerSettings
from tests.serving.channel.harness import (
    FAST,
    PATIENCE_S,
    AwaitedClient,
    ControlPlane,
    Grant,
    scheduler_settings,
    submission,
    wait_until,
)

QUICK = TunerSettings(learn_from=40)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "_PULL_INTERVAL_S", 0.01)
    monkeypatch.setattr(actor, "_TRIAL_INTERVAL_S", 0.01)


class SchedulerHandle:
    """A scheduler's handle without Ray: a remote call runs the actor's method on the current scheduler.

    Attributes:
        is_cut: whether the scheduler cannot be reached.
        loses_an_update: whether the answer to the next update is lost.
        updates: the updates so far.
    """

    def __init__(self, simulation: ControlPlane) -> None:
        self._simulation = simulation
        self.is_cut = self.loses_an_update = False
        self.updates: list[PartitionUpdate] = []

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=partial(self._call, method))

    def _call(self, method: str, *args: Any, **options: Any) -> Awaitable[Any]:
        if self.is_cut:
            raise ConnectionError("the scheduler is away")
        call: Awaitable[Any] = getattr(SchedulerActor, method)(self, *args, **options)
        return self._updated(call, *args) if method == "apply_partition" else call

    async def _updated(self, call: Awaitable[Any], update: PartitionUpdate) -> None:
        self.updates.append(update)
        await call
        if self.loses_an_update:
            self.loses_an_update = False
            raise ConnectionError("lost")

    async def _current(self) -> LiveScheduler:
        return self._simulation.live


def tuner_of(scheduler: SchedulerHandle, settings: TunerSettings = QUICK) -> TunerActor:
    return TunerActor("m", settings, cast("DeploymentHandle[Any]", scheduler))


@pytest_asyncio.fixture
async def simulation() -> AsyncIterator[ControlPlane]:
    simulation = ControlPlane(scheduler_settings(policy="ewsjf"), FAST)
    await simulation.begin()
    yield simulation
    await simulation.close()


@pytest_asyncio.fixture
async def scheduler(simulation: ControlPlane) -> SchedulerHandle:
    return SchedulerHandle(simulation)


@pytest_asyncio.fixture
async def tuner(scheduler: SchedulerHandle) -> AsyncIterator[TunerActor]:
    tuner = tuner_of(scheduler)
    yield tuner
    tuner.stop()


async def send_request(
    simulation: ControlPlane, client: AwaitedClient, count: int = 40
) -> list[asyncio.Task[Grant | Conclusion]]:
    """Submit requests that wait, because there is no replica: four of five have 10 tokens, the rest 500."""
    there = len(simulation.live.core)
    tasks = []
    for number in range(there, there + count):
        shape = PromptShape(text_bytes=0, prompt_tokens=500 if number % 5 == 0 else 10)
        wanted = submission(f"r{number}", shape=shape)
        tasks.append(asyncio.get_running_loop().create_task(client.acquire(wanted)))
    await wait_until(lambda: len(simulation.live.core) == there + count)
    return tasks


def queue_names(simulation: ControlPlane) -> set[str]:
    return simulation.live.core.queue.queue_names()


async def learned(simulation: ControlPlane) -> None:
    """Wait for the queues of the requests of `send_request`."""
    await wait_until(lambda: queue_names(simulation) == {"10-10", "500-500"})


@pytest.mark.parametrize("is_trying", [False, True])
async def test_the_interval_is_shorter_during_a_trial_only(
    simulation: ControlPlane, scheduler: SchedulerHandle, monkeypatch: pytest.MonkeyPatch, is_trying: bool
) -> None:
    monkeypatch.setattr(actor, "_PULL_INTERVAL_S" if is_trying else "_TRIAL_INTERVAL_S", 1_000.0)
    monkeypatch.setattr(ParameterTuner, "is_trying", is_trying)
    tuner = tuner_of(scheduler)
    await send_request(simulation, await simulation.gateway())
    await learned(simulation)
    tuner.stop()


async def test_queues_are_learned_and_waiting_requests_are_queued_again(
    simulation: ControlPlane, tuner: TunerActor, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await simulation.gateway()
    with caplog.at_level(logging.INFO, "ray.serve"):
        await send_request(simulation, gateway, 39)
        assert queue_names(simulation) == {"1-31", "256-511"}
        await send_request(simulation, gateway, 1)
        await learned(simulation)
    assert len(simulation.live.core.queue) == 40
    assert "event=partition_changed model=m incarnation=1 reason=learned queues=2 shortest=10" in caplog.text
    page = await simulation.live.exposition()
    assert 'ewsjf_length_queues{model="m"} 2.0' in page
    assert 'ewsjf_partition_changes_total{model="m",reason="learned"} 1.0' in page
    assert 'ewsjf_partition_age_seconds{model="m"} ' in page
    assert simulation.live.status()["queues"]["learned"] == 2


async def test_a_new_scheduler_gets_the_current_queues(simulation: ControlPlane, tuner: TunerActor) -> None:
    await send_request(simulation, await simulation.gateway())
    await learned(simulation)
    await simulation.restart()
    await learned(simulation)
    assert len(simulation.live.core.queue) == 40
    page = await simulation.live.exposition()
    assert 'ewsjf_partition_changes_total{model="m",reason="restored"} 1.0' in page
    assert 'reason="learned"' not in page


async def test_a_dead_tuner_changes_nothing_for_requests(simulation: ControlPlane, tuner: TunerActor) -> None:
    tasks = await send_request(simulation, await simulation.gateway())
    await learned(simulation)
    tuner.stop()
    await simulation.replica("s1")
    await wait_until(lambda: any(task.done() for task in tasks))
    granted = [task.result() for task in tasks if task.done()]
    assert {grant.dispatch.length_queue for grant in granted if isinstance(grant, Grant)} == {"10-10"}
    assert queue_names(simulation) == {"10-10", "500-500"}


async def test_tuned_values_a_freeze_and_the_tuners_state_reach_the_scheduler(
    simulation: ControlPlane, scheduler: SchedulerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    observations: list[Observation] = []

    def update(parameters: ParameterTuner, observed: Observation) -> list[Retune]:
        observations.append(observed)
        parameters.freeze_due = "an incident"
        return [Retune(values={"backpressure.target_waiting": 7})] if len(observations) == 1 else []

    monkeypatch.setattr(ParameterTuner, "update", update)
    monkeypatch.setattr(ParameterTuner, "document", lambda _: {"decisions": 3})
    tuner = tuner_of(scheduler, TunerSettings())
    await wait_until(lambda: len(observations) > 1)
    tuner.stop()
    assert simulation.live.core.settings.backpressure.target_waiting == 7
    assert simulation.live.status()["tuner"]["decisions"] == 3
    # The settings are part of an observation with outcomes.
    observed = observations[-1]
    assert (observed.frozen, observed.settings) == ("an incident", simulation.live.core.settings)


async def test_an_unreachable_scheduler_is_logged_once_and_used_again(
    simulation: ControlPlane, scheduler: SchedulerHandle, tuner: TunerActor, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler.is_cut = True
    with caplog.at_level(logging.WARNING, "ray.serve"):
        await asyncio.sleep(0.1)
    assert caplog.text.count("event=tuner_scheduler_unreachable model=m") == 1
    await tuner.check_health()
    scheduler.is_cut = False
    await send_request(simulation, await simulation.gateway())
    await learned(simulation)


async def test_an_update_that_got_lost_is_sent_again(
    simulation: ControlPlane, scheduler: SchedulerHandle, tuner: TunerActor
) -> None:
    scheduler.loses_an_update = True
    await send_request(simulation, await simulation.gateway())
    await wait_until(lambda: len(scheduler.updates) == 2)
    await asyncio.sleep(0.05)
    lost, again = scheduler.updates
    assert (lost.partition, lost.reason) == (again.partition, again.reason)
    assert lost.reason == "learned"


async def test_a_tuner_that_cannot_continue_is_unhealthy(
    tuner: TunerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check_repeatedly() -> None:
        while True:
            await asyncio.sleep(0.01)
            await tuner.check_health()

    async def observed(*_: object, outcomes: bool) -> Observation:
        return Observation(incarnation=1, lengths=["long"])  # type: ignore[list-item]

    monkeypatch.setattr(SchedulerActor, "observed", observed)
    with pytest.raises(TypeError):
        await asyncio.wait_for(check_repeatedly(), PATIENCE_S)

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from serve_app.core.scaling import ScaledPool, ScalingSettings
from serve_app.errors import ChannelError, Outcome, SettingsError
from serve_app.request import PriorityClass, Usage
from serve_app.serving.scheduler import live_scaling
from serve_app.serving.scheduler.actor import (
    ClusterServices,
    Incarnations,
    SchedulerActor,
    SchedulerActorSettings,
)
from serve_app.serving.scheduler.live_scaling import ScalingState
from serve_app.serving.scheduler.live_scheduler import LiveScheduler
from serve_app.serving.state import StateStore
from tests import builders
from tests.serving.channel.harness import (
    FAST,
    AwaitedClient,
    Grant,
    scheduler_settings,
    submission,
    wait_until,
)


class Claims:
    """Claim store in memory."""

    def __init__(self) -> None:
        self.made: set[str] = set()

    def make(self, key: str) -> bool:
        fresh = key not in self.made
        self.made.add(key)
        return fresh

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.made if key.startswith(prefix)]


async def costs_of(actor: SchedulerActor) -> dict[str, Any]:
    """Return the costs as admins receive them."""
    found: dict[str, Any] = json.loads(await shell_of(actor).answer("costs", b"{}"))
    return found


class Cluster:
    """Cluster in which actors of one scope start and die."""

    def __init__(self) -> None:
        self.claims = Claims()
        self.deaths = 0
        self.actors: list[SchedulerActor] = []

    def actor(self, state_uri: str | None = None) -> SchedulerActor:
        settings = SchedulerActorSettings(
            scheduler=scheduler_settings(),
            channel=FAST,
            scope="app/m",
            state_uri=state_uri,
            scaling=ScalingSettings(pools={"short": ScaledPool()}),
            tuner_after=2,
        )
        surroundings = ClusterServices(claims=self.claims, host=lambda: "127.0.0.1", die=self._die)
        self.actors.append(SchedulerActor(settings, surroundings))
        return self.actors[-1]

    async def started(self, state_uri: str | None = None) -> SchedulerActor:
        actor = self.actor(state_uri)
        await actor.check_health()
        return actor

    def _die(self) -> None:
        self.deaths += 1


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    for actor in cluster.actors:
        actor.shutdown()


async def test_each_actor_claims_a_higher_incarnation_and_has_a_secret_of_its_own(cluster: Cluster) -> None:
    first = await cluster.actor().endpoint("gateway")
    second = await cluster.actor().endpoint("gateway")
    assert (first.incarnation, second.incarnation) == (1, 2)
    assert first.secret != second.secret


async def test_an_older_actor_stops_when_a_newer_one_has_claimed(cluster: Cluster) -> None:
    older = await cluster.started()
    newer = await cluster.started()
    await wait_until(lambda: cluster.deaths == 1)
    with pytest.raises(ChannelError, match="superseded by 2"):
        await older.check_health()
    with pytest.raises(ChannelError, match="superseded by 2"):
        await older.endpoint("gateway")
    await newer.check_health()


async def test_the_tuner_starts_after_enough_requests_and_is_never_stopped(cluster: Cluster) -> None:
    actor = await cluster.started()
    tuner = shell_of(actor).tuner
    assert actor.scaling_statistics() == {"least_replicas:/tuner": 0.0}
    assert tuner.status()["state"] == "starts after 2 more requests"
    gateway = AwaitedClient("g1", partial(actor.endpoint, "gateway"), FAST)
    gateway.start()
    await wait_until(lambda: gateway.is_connected)
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(gateway.acquire(submission(name))) for name in ("r1", "r2")]
    await wait_until(lambda: actor.scaling_statistics() == {"least_replicas:/tuner": 1.0})
    await actor.reconfigure({"max_waiting": 5})
    assert actor.scaling_statistics() == {"least_replicas:/tuner": 1.0}
    await gateway.close()
    await asyncio.gather(*tasks)


async def test_a_tuner_that_runs_already_is_not_stopped_by_a_new_scheduler(cluster: Cluster) -> None:
    actor = await cluster.started()
    await actor.observed()
    assert actor.scaling_statistics() == {"least_replicas:/tuner": 1.0}
    assert shell_of(actor).tuner.status()["state"] == "no values are tuned"


async def test_other_settings_begin_a_new_incarnation_that_gets_all_requests(
    cluster: Cluster,
) -> None:
    actor = cluster.actor()
    gateway = AwaitedClient("g1", partial(actor.endpoint, "gateway"), FAST)
    gateway.start()
    await wait_until(lambda: gateway.is_connected)
    task = asyncio.get_running_loop().create_task(gateway.acquire(submission("r1")))
    await wait_until(lambda: len(shell_of(actor).core) == 1)
    await actor.reconfigure({"max_waiting": 5})
    assert (await actor.endpoint("gateway")).incarnation == 2
    await wait_until(lambda: len(shell_of(actor).core) == 1)
    assert shell_of(actor).status()["waiting"] == {"default": 1}
    assert not task.done()
    assert cluster.deaths == 0
    await gateway.close()
    answer = await task
    assert not isinstance(answer, Grant)
    assert answer.outcome is Outcome.REJECTED_NO_REPLICA


async def test_bounds_of_scaling_change_without_a_new_incarnation(cluster: Cluster) -> None:
    actor = await cluster.started()
    await actor.reconfigure({"scaling": {"gpu_budget": 3.0}})
    assert actor.scaling.status()["gpu_budget"] == 3.0
    # Settings that are left out keep their deployed values.
    await actor.reconfigure({"max_waiting": 5})
    assert actor.scaling.status()["gpu_budget"] is None
    assert (await actor.endpoint("gateway")).incarnation == 2


async def test_the_same_settings_change_nothing(cluster: Cluster) -> None:
    actor = cluster.actor()
    await actor.reconfigure({"max_waiting": scheduler_settings().max_waiting})
    assert (await actor.endpoint("gateway")).incarnation == 1


async def test_a_setting_that_cannot_change_is_rejected_by_name(cluster: Cluster) -> None:
    actor = cluster.actor()
    with pytest.raises(
        SettingsError, match=r"'model', .* changeable: .*max_waiting, no_replica_grace_s, .*policy"
    ):
        await actor.reconfigure({"model": "other"})
    with pytest.raises(SettingsError, match=r"names other pools than the .* of this scheduler"):
        await actor.reconfigure({"routing": {"pools": ["a", "b", "c"]}})
    with pytest.raises(ValueError, match=r"max_waiting.* must be at least 1, got 0"):
        await actor.reconfigure({"max_waiting": 0})
    assert (await actor.endpoint("gateway")).incarnation == 1
    await actor.check_health()


def observe_answers(actor: SchedulerActor, output_tokens: int) -> int:
    """Let the core observe sixty answers; return its output limit for a request without one."""
    core = shell_of(actor).core
    for _ in range(60):
        core.estimator.observe(UNLIMITED, Usage(prompt_tokens=40, output_tokens=output_tokens))
    core.prefill_costs.observe("short", 1_000, 7.5)
    return core.estimator.estimate(UNLIMITED).max_output_tokens


def shell_of(actor: SchedulerActor) -> LiveScheduler:
    assert actor._live is not None
    return actor._live


UNLIMITED = builders.request(max_output_tokens=None)


async def test_an_actor_that_restarts_has_the_last_ones_learned_state(
    cluster: Cluster, tmp_path: Path
) -> None:
    first = await cluster.started(str(tmp_path))
    learned = observe_answers(first, output_tokens=77)
    cost_s = shell_of(first).core.prefill_costs.shared.seconds(500)
    await first.close()
    second = await cluster.started(str(tmp_path))
    core = shell_of(second).core
    assert core.estimator.estimate(UNLIMITED).max_output_tokens == learned != 1_024
    assert core.prefill_costs.shared.seconds(500) == cost_s
    assert 'ewsjf_state_failures_total{model="m",operation="load"} 0.0' in await shell_of(second).exposition()


async def test_an_actor_without_a_store_starts_fresh(cluster: Cluster, tmp_path: Path) -> None:
    first = await cluster.started()
    learned = observe_answers(first, output_tokens=77)
    await first.close()
    second = await cluster.started(str(tmp_path))
    assert shell_of(second).core.estimator.estimate(UNLIMITED).max_output_tokens != learned


async def test_other_settings_preserve_learned_state_even_without_a_store(cluster: Cluster) -> None:
    actor = await cluster.started()
    learned = observe_answers(actor, output_tokens=77)
    await actor.reconfigure({"max_waiting": 5})
    assert shell_of(actor).core.estimator.estimate(UNLIMITED).max_output_tokens == learned


async def test_the_page_of_a_later_scheduler_has_the_metrics_of_its_process(
    cluster: Cluster, tmp_path: Path
) -> None:
    actor = await cluster.started(str(tmp_path))
    await actor.reconfigure({"max_waiting": 5})
    page = await shell_of(actor).exposition()
    for name in ("ewsjf_state_failures", "ewsjf_key_requests", "ewsjf_scaling_failures"):
        assert page.count(f"# TYPE {name}_total ") == 1


async def test_an_invalid_state_is_set_aside_and_the_actor_starts_fresh(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = StateStore(str(tmp_path), "scheduler", "app/m")
    store.save({"estimator": {"version": 99}, "prefill_costs": {}})
    actor = await cluster.started(str(tmp_path))
    await wait_until(lambda: Path(f"{store.path}.rejected").exists())
    assert "Invalid enum value 99 - at `$.estimator.version`" in caplog.text
    assert (
        'ewsjf_state_failures_total{model="m",operation="restore"} 1.0' in await shell_of(actor).exposition()
    )
    await actor.close()
    assert store.load() is not None, "what it learned itself takes the place"


async def test_a_restarted_actor_has_the_start_times_of_engines(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_scaling, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(live_scaling, "_SETTLING_S", 0.0)
    first = await cluster.started(str(tmp_path))
    first.scaling.restore(ScalingState({"short": 240.0}))
    await first.close()
    second = await cluster.started(str(tmp_path))
    await wait_until(lambda: bool(second.scaling.status()["pools"]))
    pools = second.scaling.status()["pools"]
    assert {name: pool["start_s"] for name, pool in pools.items()} == {"short": 240.0}


async def test_a_restarted_actor_continues_cost_attribution(cluster: Cluster, tmp_path: Path) -> None:
    first = await cluster.started(str(tmp_path))
    request = builders.request("r1", tenant="payer", priority=PriorityClass.BATCH)
    shell_of(first).core.in_flight.engine_time.used.add("short", request, 12.5)
    began = (await costs_of(first))["since"]
    await first.close()
    second = await cluster.started(str(tmp_path))
    found = await costs_of(second)
    assert found["since"] == began
    assert [(row["tenant"], row["engine_seconds"]) for row in found["rows"]] == [("payer", 12.5)]
    # Prometheus would count the initial value of a new counter as new use.
    assert "payer" not in await shell_of(second).exposition()
    # Other settings create another scheduler in the same process.
    await second.reconfigure({"policy": "fcfs"})
    assert [row["engine_seconds"] for row in (await costs_of(second))["rows"]] == [12.5]


async def test_a_state_of_a_release_without_start_times_and_costs_is_used_and_a_wrong_one_is_not(
    cluster: Cluster, tmp_path: Path
) -> None:
    first = await cluster.started(str(tmp_path))
    learned = observe_answers(first, output_tokens=77)
    await first.close()
    store = StateStore(str(tmp_path), "scheduler", "app/m")
    document = dict(store.load() or {})
    del document["scaling"]
    del document["costs"]
    store.save(document)
    second = await cluster.started(str(tmp_path))
    assert shell_of(second).core.estimator.estimate(UNLIMITED).max_output_tokens == learned
    assert (await costs_of(second))["rows"] == []
    await second.close()
    store.save({**document, "scaling": {"start_s": {"short": -1}}})
    third = await cluster.started(str(tmp_path))
    await wait_until(lambda: Path(f"{store.path}.rejected").exists())
    assert shell_of(third).core.estimator.estimate(UNLIMITED).max_output_tokens != learned


@pytest.mark.parametrize(
    "damaged",
    [{"scaling": {"start_s": {"short": 10**400}}}, {"costs": {"since": 10**400, "used": [], "imposed": []}}],
    ids=["start time", "costs"],
)
async def test_an_actor_starts_despite_a_stored_number_that_is_too_large_for_a_float(
    cluster: Cluster, tmp_path: Path, damaged: dict[str, Any]
) -> None:
    first = await cluster.started(str(tmp_path))
    learned = observe_answers(first, output_tokens=77)
    await first.close()
    store = StateStore(str(tmp_path), "scheduler", "app/m")
    store.save({**(store.load() or {}), **damaged})
    second = await cluster.started(str(tmp_path))
    await wait_until(lambda: Path(f"{store.path}.rejected").exists())
    assert shell_of(second).core.estimator.estimate(UNLIMITED).max_output_tokens != learned


async def test_a_store_out_of_reach_costs_no_availability(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    actor = await cluster.started(str(tmp_path / "file" / "below"))
    assert (await actor.endpoint("gateway")).incarnation == 1
    await actor.close()


async def test_a_scheduler_that_was_superseded_overwrites_nothing(cluster: Cluster, tmp_path: Path) -> None:
    older = await cluster.started(str(tmp_path))
    observe_answers(older, output_tokens=5)
    newer = cluster.actor(str(tmp_path))
    await wait_until(lambda: cluster.deaths == 1)
    learned = observe_answers(newer, output_tokens=300)
    await newer.close()
    await older.close()
    third = await cluster.started(str(tmp_path))
    assert shell_of(third).core.estimator.estimate(UNLIMITED).max_output_tokens == learned


async def test_an_actor_that_cannot_start_is_unhealthy(cluster: Cluster) -> None:
    def unreachable() -> str:
        raise OSError("no address")

    settings = SchedulerActorSettings(scheduler=scheduler_settings(), channel=FAST, scope="app/m")
    actor = SchedulerActor(
        settings, ClusterServices(claims=cluster.claims, host=unreachable, die=lambda: None)
    )
    cluster.actors.append(actor)
    with pytest.raises(OSError, match="no address"):
        await actor.check_health()


def test_claims_rise_and_are_given_once_even_when_two_race() -> None:
    claims = Claims()
    here, there = Incarnations(claims, "app/m"), Incarnations(claims, "app/m")
    assert [here.claim(), there.claim(), here.claim()] == [1, 2, 3]
    assert Incarnations(claims, "app/other").claim() == 1
    # The other process claims the number between read and claim.
    look = here.newest
    here_newest = look()
    there.claim()
    object.__setattr__(here, "store", Raced(claims, here_newest))
    assert here.claim() == 5


class Raced(Claims):
    """Claim store with a stale list."""

    def __init__(self, claims: Claims, newest: int) -> None:
        super().__init__()
        self.made = claims.made
        self._newest = newest

    def keys(self, prefix: str) -> list[str]:
        return [f"{prefix}{self._newest}"]

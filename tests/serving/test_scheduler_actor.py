import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from serve_app.errors import ChannelError, Outcome, SettingsError
from serve_app.serving.channel.gateway_client import GatewayClient
from serve_app.serving.dispatching import Grant
from serve_app.serving.incarnation import Incarnations
from serve_app.serving.scheduler_actor import SchedulerActor, SchedulerActorSettings, Surroundings
from tests.serving.channel.harness import FAST, scheduler_settings, submission, until


class Claims:
    """A store of claims in memory."""

    def __init__(self) -> None:
        self.made: set[str] = set()

    def make(self, key: str) -> bool:
        fresh = key not in self.made
        self.made.add(key)
        return fresh

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.made if key.startswith(prefix)]


class Cluster:
    """Where actors of one scope live and die."""

    def __init__(self) -> None:
        self.claims = Claims()
        self.deaths = 0
        self.actors: list[SchedulerActor] = []

    def actor(self) -> SchedulerActor:
        settings = SchedulerActorSettings(scheduler=scheduler_settings(), channel=FAST, scope="app/m")
        surroundings = Surroundings(claims=self.claims, host=lambda: "127.0.0.1", die=self._die)
        self.actors.append(SchedulerActor(settings, surroundings))
        return self.actors[-1]

    def _die(self) -> None:
        self.deaths += 1


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    for actor in cluster.actors:
        actor.shutdown()


async def test_each_actor_claims_a_higher_incarnation_and_has_a_secret_of_its_own(cluster: Cluster) -> None:
    first = await cluster.actor().endpoint()
    second = await cluster.actor().endpoint()
    assert (first.incarnation, second.incarnation) == (1, 2)
    assert first.secret != second.secret


async def test_an_older_actor_stops_when_a_newer_one_has_claimed(cluster: Cluster) -> None:
    older = cluster.actor()
    await older.check_health()
    newer = cluster.actor()
    await newer.check_health()
    await until(lambda: cluster.deaths == 1)
    with pytest.raises(ChannelError, match="superseded by 2"):
        await older.check_health()
    with pytest.raises(ChannelError, match="superseded by 2"):
        await older.endpoint()
    await newer.check_health()


async def test_other_settings_begin_a_new_incarnation_that_gets_all_requests(
    cluster: Cluster,
) -> None:
    actor = cluster.actor()
    gateway = GatewayClient("g1", actor.endpoint, FAST)
    gateway.start()
    await until(lambda: gateway.is_connected)
    task = asyncio.get_running_loop().create_task(gateway.acquire(submission("r1")))
    await until(lambda: actor._shell is not None and len(actor._shell.core) == 1)
    await actor.reconfigure({"max_waiting": 5})
    assert (await actor.endpoint()).incarnation == 2
    await until(lambda: actor._shell is not None and len(actor._shell.core) == 1)
    assert (await actor.status())["waiting"] == {"default": 1}
    assert not task.done()
    assert cluster.deaths == 0
    await gateway.close()
    answer = await task
    assert not isinstance(answer, Grant)
    assert answer.outcome is Outcome.REJECTED_NO_REPLICA


async def test_the_same_settings_change_nothing(cluster: Cluster) -> None:
    actor = cluster.actor()
    await actor.reconfigure({"max_waiting": scheduler_settings().max_waiting})
    assert (await actor.endpoint()).incarnation == 1


async def test_a_setting_that_cannot_change_is_refused_by_name(cluster: Cluster) -> None:
    actor = cluster.actor()
    with pytest.raises(SettingsError, match=r"'model'; what may change while it runs: policy, max_waiting"):
        await actor.reconfigure({"model": "other"})
    with pytest.raises(ValueError, match="max_waiting must be at least 1, got 0"):
        await actor.reconfigure({"max_waiting": 0})
    assert (await actor.endpoint()).incarnation == 1
    await actor.check_health()


async def test_an_actor_that_cannot_start_is_unhealthy(cluster: Cluster) -> None:
    def unreachable() -> str:
        raise OSError("no address")

    settings = SchedulerActorSettings(scheduler=scheduler_settings(), channel=FAST, scope="app/m")
    actor = SchedulerActor(settings, Surroundings(claims=cluster.claims, host=unreachable, die=lambda: None))
    cluster.actors.append(actor)
    with pytest.raises(OSError, match="no address"):
        await actor.check_health()


def test_claims_rise_and_are_given_once_even_when_two_race() -> None:
    claims = Claims()
    here, there = Incarnations(claims, "app/m"), Incarnations(claims, "app/m")
    assert [here.claim(), there.claim(), here.claim()] == [1, 2, 3]
    assert Incarnations(claims, "app/other").claim() == 1
    # The other takes the number between the look and the claim.
    look = here.newest
    here_newest = look()
    there.claim()
    object.__setattr__(here, "store", Raced(claims, here_newest))
    assert here.claim() == 5


class Raced(Claims):
    """A store whose list is a moment old."""

    def __init__(self, claims: Claims, newest: int) -> None:
        super().__init__()
        self.made = claims.made
        self._newest = newest

    def keys(self, prefix: str) -> list[str]:
        return [f"{prefix}{self._newest}"]

"""Learned state with a hanging bucket: a real S3 client, and a stopped server."""

import asyncio
import time
from collections.abc import Iterator

import pytest
from prometheus_client import generate_latest

from serve_app.serving.remote.watcher import EndpointChoices
from serve_app.serving.scheduler.actor import ClusterServices, SchedulerActor, SchedulerActorSettings
from serve_app.serving.state import LOAD_TIMEOUT_S, StateStore
from serve_app.serving.tuner import ParameterTuner
from serve_app.tuning.settings import ParameterTuningSettings
from tests.serving.channel.harness import FAST, scheduler_settings, wait_until
from tests.serving.scheduler.test_actor import Claims
from tests.serving.state.bucket import Bucket, reached_by_this_process

# The limit, plus a busy machine's delay for a thread and a timer.
SOON_S = LOAD_TIMEOUT_S + 5.0
FOUND, ADDED, OTHER = "http://found:8000", "http://added:8000", "http://other:8000"


@pytest.fixture
def uri(bucket: Bucket) -> Iterator[str]:
    with reached_by_this_process(bucket) as uri:
        yield uri


def scheduler(uri: str) -> SchedulerActor:
    settings = SchedulerActorSettings(
        scheduler=scheduler_settings(), channel=FAST, scope="app/m", state_uri=uri, state_interval_s=0.05
    )
    return SchedulerActor(
        settings, ClusterServices(claims=Claims(), host=lambda: "127.0.0.1", die=lambda: None)
    )


async def choices(uri: str) -> EndpointChoices:
    found = EndpointChoices(StateStore(uri, "endpoints", "app/m/short"))
    await found.load()
    return found


async def test_a_scheduler_starts_without_a_bucket_that_hangs_and_saves_once_it_answers(
    uri: str, bucket: Bucket
) -> None:
    with bucket.hanging():
        began = time.monotonic()
        actor = scheduler(uri)
        await actor.endpoint("gateway")
        assert time.monotonic() - began < SOON_S
        await actor.check_health()
    await wait_until(lambda: "ewsjf_state_saved_timestamp_seconds" in metrics_of(actor))
    await wait_until(lambda: StateStore(uri, "scheduler", "app/m").load() is not None)
    await actor.close()


def metrics_of(actor: SchedulerActor) -> str:
    return generate_latest(actor._registry).decode()


async def test_the_loop_of_a_scheduler_continues_while_its_bucket_hangs(uri: str, bucket: Bucket) -> None:
    actor = scheduler(uri)
    await actor.endpoint("gateway")
    await wait_until(lambda: StateStore(uri, "scheduler", "app/m").load() is not None)
    with bucket.hanging():
        longest_s = 0.0
        until_s = time.monotonic() + 2.0
        while (began := time.monotonic()) < until_s:
            await asyncio.sleep(0.005)
            longest_s = max(longest_s, time.monotonic() - began)
        # A blocked loop would wait for as long as the S3 client does.
        assert longest_s < LOAD_TIMEOUT_S / 2
        began = time.monotonic()
        await actor.close()
        assert time.monotonic() - began < SOON_S


async def test_a_tuner_starts_without_a_bucket_that_hangs(uri: str, bucket: Bucket) -> None:
    tuner = ParameterTuner("m", ParameterTuningSettings(), StateStore(uri, "tuner", "m"))
    with bucket.hanging():
        began = time.monotonic()
        await tuner.load()
        assert time.monotonic() - began < SOON_S


async def test_a_watcher_starts_without_a_bucket_that_hangs_and_catches_up(
    uri: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.serving.remote.watcher._RETRY_S", 0.1)
    before = await choices(uri)
    before.add(ADDED, found=False)
    before.remove(FOUND, found=True)
    before.remove(OTHER, found=True)
    assert await before.save()
    with bucket.hanging():
        began = time.monotonic()
        now = await choices(uri)
        assert time.monotonic() - began < SOON_S
        now.add(OTHER, found=True)
        assert not await now.save(), "nothing is written over what could not be read"
    await wait_until(lambda: now.added == {ADDED})
    assert now.removed == {FOUND}, "the later choice wins"

    async def kept() -> set[str]:
        return (await choices(uri)).removed

    async with asyncio.timeout(20):
        while await kept() != {FOUND}:  # noqa: ASYNC110 - the other one saves in its own time
            await asyncio.sleep(0.05)
    now.close()

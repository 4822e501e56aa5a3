import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from serve_app.core import Scheduler
from serve_app.core.commands import Command
from serve_app.core.decision_log import LoggedRun, read_runs, replay
from serve_app.core.events import Arrived, DispatchFailure, Event, Finished, PartitionChanged
from serve_app.core.policies.length_queues import LengthInterval, Partition
from serve_app.errors import ChannelError, Outcome
from serve_app.request import PriorityClass, Usage
from serve_app.serving.channel.messages import Role
from serve_app.serving.metric_cells import HistogramCell
from serve_app.serving.scheduler.findings import status_findings
from serve_app.serving.scheduler.journal import DecisionLogSettings, Entry, RequestHistory
from serve_app.serving.scheduler.receipts import QueueWatch
from serve_app.serving.scheduler.tuning_endpoint import PartitionUpdate
from serve_app.tuning.rollout import NO_OUTCOMES
from tests.serving.channel.harness import (
    FAST,
    ControlPlane,
    FakeReplica,
    Grant,
    granted,
    rejected,
    scheduler_settings,
    submission,
    wait_until,
)

USAGE = Usage(prompt_tokens=10, output_tokens=5)


@pytest_asyncio.fixture
async def control_plane() -> AsyncIterator[ControlPlane]:
    control_plane = ControlPlane(scheduler_settings(), FAST)
    yield control_plane
    await control_plane.close()


def break_core(control_plane: ControlPlane, on: type[Event], request_id: str) -> None:
    """Make the current core raise on one event of one request."""
    handle = control_plane.live.core.handle

    def faulty(event: Event, now: float) -> list[Command]:
        name = event.request.request_id if isinstance(event, Arrived) else getattr(event, "request_id", None)
        if isinstance(event, on) and name == request_id:
            raise ZeroDivisionError("a fault")
        return handle(event, now)

    control_plane.live.core.handle = faulty  # type: ignore[method-assign]


async def test_a_fault_of_the_core_fails_the_request_it_stumbled_over_and_saves_the_others(
    control_plane: ControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    live = await control_plane.begin()
    gateway = await control_plane.gateway()
    others = [asyncio.get_running_loop().create_task(gateway.acquire(submission(f"r{n}"))) for n in range(5)]
    await wait_until(lambda: len(live.core) == 5)
    break_core(control_plane, Arrived, "poison")
    with caplog.at_level(logging.ERROR, "ray.serve"):
        rejection = await rejected(gateway, "poison")
    assert rejection.outcome is Outcome.FAILED
    assert "event=core_failed" in caplog.text
    assert "Traceback" in caplog.text
    assert control_plane.ends == ["the core failed on Arrived: ZeroDivisionError('a fault')"]
    with pytest.raises(ChannelError, match="the core failed"):
        live.endpoint(Role.GATEWAY)
    assert "ewsjf_scheduler_errors_total" in await live.exposition()
    await control_plane.begin()
    await control_plane.replica("s1")
    for task in others:
        answer = await asyncio.wait_for(task, 10)
        assert isinstance(answer, Grant)
        gateway.end(answer.dispatch.request_id, Outcome.COMPLETED, USAGE)
    await wait_until(lambda: len(control_plane.live.core) == 0)


async def test_a_fault_of_an_observer_affects_no_request_and_becomes_a_finding(
    control_plane: ControlPlane, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(history: RequestHistory, entry: Entry, *_command: object) -> None:
        raise ZeroDivisionError("a fault")

    for handler in ("_begin", "_dispatched", "_end"):
        monkeypatch.setattr(RequestHistory, handler, faulty)
    live = await control_plane.begin()
    gateway = await control_plane.gateway()
    with caplog.at_level(logging.ERROR, "ray.serve"):
        await control_plane.replica("s1")
        for name in ("r1", "r2"):
            await granted(gateway, name)
            gateway.end(name, Outcome.COMPLETED, USAGE)
        await wait_until(lambda: len(live.core) == 0)
    assert control_plane.ends == []
    assert caplog.text.count("event=observer_failed observer=RequestHistory") == 1
    assert "ZeroDivisionError: a fault" in caplog.text
    # The observers after it receive each entry.
    page = await live.exposition()
    assert 'ewsjf_requests_concluded_total{class="default",model="m",outcome="completed"} 2.0' in page
    assert 'ewsjf_observer_errors_total{model="m",observer="RequestHistory"}' in page
    found = [finding.what for finding in status_findings(live.status())]
    assert any("RequestHistory failed on" in what for what in found)


async def test_a_fault_while_a_request_is_watched_affects_no_request(
    control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(watch: QueueWatch, request_id: str) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(QueueWatch, "watch", faulty)
    live = await control_plane.begin()
    gateway = await control_plane.gateway()
    waiting = asyncio.get_running_loop().create_task(gateway.acquire(submission("r1")))
    await wait_until(lambda: len(live.core) == 1)
    gateway.outlooks("r1")
    await wait_until(lambda: live.status()["observer_errors"] == {"QueueWatch": 1})
    await control_plane.replica("s1")
    assert isinstance(await asyncio.wait_for(waiting, 10), Grant)


async def test_a_fault_over_a_running_request_leaves_it_running(control_plane: ControlPlane) -> None:
    await control_plane.begin()
    gateway = await control_plane.gateway()
    await control_plane.replica("s1")
    await granted(gateway, "r1")
    await granted(gateway, "r2")
    break_core(control_plane, Finished, "r1")
    gateway.end("r1", Outcome.COMPLETED, USAGE)
    await wait_until(lambda: bool(control_plane.ends))
    await control_plane.begin()
    await wait_until(lambda: len(control_plane.live.core) == 1)
    entry = control_plane.live.core.find("r2")
    assert entry is not None
    assert entry.replica_id == "s1"


async def test_time_alone_expires_a_request(control_plane: ControlPlane) -> None:
    await control_plane.begin()
    gateway = await control_plane.gateway()
    await control_plane.replica("s1")
    running = [await granted(gateway, f"r{n}") for n in range(3)]
    rejection = await rejected(gateway, "late", queue_timeout_s=0.2)
    assert rejection.outcome is Outcome.EXPIRED
    assert len(control_plane.live.core) == len(running)


async def test_a_class_has_its_own_time_in_the_queue(control_plane: ControlPlane) -> None:
    live = await control_plane.begin()
    gateway = await control_plane.gateway()
    task = asyncio.get_running_loop().create_task(gateway.acquire(submission("r1")))
    await wait_until(lambda: len(live.core) == 1)
    entry = live.core.find("r1")
    assert entry is not None
    wanted = control_plane.settings.queue_timeout_s.default
    assert entry.request.expires_at - entry.request.arrived_at == pytest.approx(wanted)
    task.cancel()


async def test_a_store_that_does_not_answer_ends_nothing(control_plane: ControlPlane) -> None:
    looks = 0

    async def look() -> int:
        nonlocal looks
        looks += 1
        raise ConnectionError("the store is away")

    live = await control_plane.begin(newest_incarnation=look)
    await wait_until(lambda: looks > 0)
    assert not live.end_reason
    assert control_plane.ends == []


async def test_the_status_shows_waiting_requests_and_replica_reports(control_plane: ControlPlane) -> None:
    await control_plane.begin()
    gateway = await control_plane.gateway()
    _, double = await control_plane.replica("s1", seats=8)
    await granted(gateway, "r1")
    status = control_plane.live.status()
    assert (status["model"], status["incarnation"], status["ended"], status["gateways"]) == ("m", 1, "", 1)
    assert status["replicas"]["s1"]["in_flight"] == 1
    assert status["replicas"]["s1"]["max_num_seqs"] == 8
    assert status["replicas"]["s1"]["report"]["waiting"] == 0
    assert status["replicas"]["s1"]["state"] == "ready"
    double.broken = True
    await wait_until(lambda: control_plane.live.status()["replicas"]["s1"]["state"] == "stale")


async def test_gauges_show_waiting_requests_and_stale_replicas(control_plane: ControlPlane) -> None:
    live = await control_plane.begin()
    gateway = await control_plane.gateway()

    def drain(double: FakeReplica) -> None:
        double.report = replace(double.report, draining=True)

    _, replica = await control_plane.replica("s1", prepare=drain)
    task = asyncio.create_task(gateway.acquire(submission("r1", priority=PriorityClass.BATCH)))
    await wait_until(lambda: len(live.core) == 1)
    replica.broken = True
    await wait_until(lambda: live.status()["replicas"]["s1"]["stale"])
    text = await live.exposition()
    for line in (
        'ewsjf_requests_waiting{class="batch",model="m"} 1.0',
        'ewsjf_requests_waiting{class="interactive",model="m"} 0.0',
        'ewsjf_replicas_stale{model="m"} 1.0',
        'ewsjf_gateways_connected{model="m"} 1.0',
    ):
        assert line in text, line
    task.cancel()


async def test_learned_queues_are_applied_and_recorded(control_plane: ControlPlane, tmp_path: Path) -> None:
    control_plane.settings = scheduler_settings(policy="ewsjf")
    live = await control_plane.begin(decision_log=DecisionLogSettings(path=str(tmp_path / "decisions.jsonl")))
    gateway = await control_plane.gateway()
    await control_plane.replica("s1")
    before = await granted(gateway, "r1")
    first = live.tuner.observed()
    assert (first.incarnation, first.lengths, first.outcomes) == (1, [10], NO_OUTCOMES)
    assert live.tuner.observed().lengths == []
    partition = Partition((LengthInterval(min_tokens=9, max_tokens=90, mean_tokens=30.0, count=5),))
    live.tuner.apply_partition(
        PartitionUpdate(partition=partition, reason="first", lengths=5, distance=0.0, age_s=0.0)
    )
    after = await granted(gateway, "r2")
    assert before.dispatch.length_queue != after.dispatch.length_queue == "9-90"
    live.stop("the end")
    with pytest.raises(ChannelError, match="is not running: the end"):
        live.tuner.apply_partition(
            PartitionUpdate(partition=partition, reason="drift", lengths=5, distance=0.0, age_s=0.0)
        )
    decisions = logged(tmp_path / "decisions.jsonl").decisions
    assert PartitionChanged(partition) in [decision.event for _, decision in decisions]


def logged(path: Path) -> LoggedRun:
    (run,) = read_runs(path.read_text().splitlines())
    return run


async def test_a_recorded_run_replays_to_the_same_commands(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    """The live scheduler's core against a core fed from its log, at the log's times."""
    log = DecisionLogSettings(path=str(tmp_path / "decisions-{incarnation}.jsonl"))
    await control_plane.begin(decision_log=log)
    gateway = await control_plane.gateway()
    await control_plane.replica("s1", seats=4)
    await control_plane.replica("s2", seats=4)

    async def handle(n: int) -> None:
        answer = await gateway.acquire(submission(f"r{n}", queue_timeout_s=0.3 if n % 7 == 0 else None))
        if isinstance(answer, Grant) and n % 5 == 0:
            answer = await gateway.requeue(f"r{n}", DispatchFailure.BUSY, "full")
        if isinstance(answer, Grant):
            await asyncio.sleep(0.005)
            gateway.begin(f"r{n}")
            gateway.end(f"r{n}", Outcome.COMPLETED, USAGE)

    await asyncio.wait_for(asyncio.gather(*(handle(n) for n in range(60))), 30)
    await wait_until(lambda: len(control_plane.live.core) == 0)
    control_plane.live.stop()
    run = logged(tmp_path / "decisions-1.jsonl")
    assert len(run.decisions) > 100
    assert replay(run) is None
    core = Scheduler(run.header.settings, now=run.header.now)
    for _, decision in run.decisions:
        core.handle(decision.event, decision.now)
    assert repr(core) == repr(control_plane.live.core)


async def test_a_fault_of_the_timing_of_decisions_ends_nothing(
    control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*_: object) -> None:
        raise ZeroDivisionError("a fault")

    live = await control_plane.begin()
    monkeypatch.setattr(HistogramCell, "observe", faulty)
    gateway = await control_plane.gateway()
    await control_plane.replica("s1")
    await granted(gateway, "r1")
    gateway.end("r1", Outcome.COMPLETED, USAGE)
    await wait_until(lambda: len(live.core) == 0)
    assert control_plane.ends == []
    assert live.end_reason == ""

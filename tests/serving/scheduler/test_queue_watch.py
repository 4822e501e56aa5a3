"""Queue updates of waiting requests, over the control channel."""

import asyncio

import pytest

from serve_app.core.events import DispatchFailure
from serve_app.core.routing.replica import ReplicaReport
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from serve_app.serving.channel.messages import Exposition, Outlooks, Scrape, SnapshotEnd, Submit, Watch
from serve_app.serving.channel.scheduler_client import RequestOutlook
from tests.serving.channel.harness import (
    PATIENCE_S,
    AwaitedClient,
    ControlPlane,
    Grant,
    RawPeer,
    hello,
    submission,
    wait_until,
)

USAGE = Usage(prompt_tokens=10, output_tokens=5)
Updates = dict[str, list[RequestOutlook | None]]


def subscribe(
    gateway: AwaitedClient, request_id: str, updates: Updates, **changes: object
) -> asyncio.Task[object]:
    """Submit a request that waits and subscribes to queue updates."""
    task: asyncio.Task[object] = asyncio.create_task(gateway.acquire(submission(request_id, **changes)))  # type: ignore[arg-type]

    def listen() -> None:
        updates[request_id] = gateway.outlooks(request_id)

    asyncio.get_running_loop().call_soon(listen)
    return task


def positions(updates: Updates, request_id: str) -> list[int]:
    return [outlook.position for outlook in updates.get(request_id, []) if outlook is not None]


async def end(gateway: AwaitedClient, task: asyncio.Task[object]) -> None:
    answer = await asyncio.wait_for(task, PATIENCE_S)
    assert isinstance(answer, Grant)
    gateway.end(answer.dispatch.request_id, Outcome.COMPLETED, USAGE)


async def test_positions_are_sent_and_fall_while_others_are_served(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    updates: Updates = {}
    waiting = [subscribe(gateway, f"r{number}", updates) for number in range(6)]
    await wait_until(lambda: len(updates) == 6 and all(updates.values()))
    assert [positions(updates, f"r{number}") for number in range(6)] == [[number + 1] for number in range(6)]
    assert all(outlook is not None and outlook.expected_s is None for (outlook,) in updates.values())
    for task in waiting[:3]:
        task.cancel()
    await wait_until(lambda: positions(updates, "r5")[-1] == 3)
    await control_plane.replica(seats=64)
    for task in waiting[3:]:
        await end(gateway, task)
    before = {name: list(outlooks) for name, outlooks in updates.items()}
    await asyncio.sleep(0.4)
    assert updates == before


async def test_only_subscribed_requests_of_the_gateway_itself_get_updates(
    control_plane: ControlPlane,
) -> None:
    endpoint = control_plane.endpoint()
    ours, other = await RawPeer.at(endpoint), await RawPeer.at(endpoint)
    ours.send(hello(endpoint, peer_id="g1"), SnapshotEnd(), Submit(submission("r1"), 0.0))
    await wait_until(lambda: len(control_plane.live.core) == 1)
    other.send(hello(endpoint, peer_id="g2"), SnapshotEnd(), Submit(submission("r2"), 0.0))
    # A subscription to a request of another gateway has no effect.
    other.send(Watch("r1"), Watch("r2"))
    await other.receive(Outlooks)
    await asyncio.sleep(0.3)
    for peer, expected in ((ours, set()), (other, {"r2"})):
        peer.send(Scrape(1))
        await peer.receive(Exposition)
        updates = [message for message in peer.received if isinstance(message, Outlooks)]
        assert {entry.request_id for update in updates for entry in update.entries} == expected


async def test_a_dead_scheduler_is_reported_and_the_next_one_continues(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    updates: Updates = {}
    waiting = [subscribe(gateway, f"r{number}", updates) for number in range(3)]
    await wait_until(lambda: positions(updates, "r2") == [3])
    control_plane.kill()
    await wait_until(lambda: updates["r2"][-1] is None)
    await control_plane.begin()
    await wait_until(lambda: positions(updates, "r2") == [3, 3])
    assert updates["r2"].count(None) == 1
    await control_plane.replica(seats=64)
    for task in waiting:
        await end(gateway, task)


async def test_a_subscription_without_a_scheduler_reports_that(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    updates: Updates = {}
    control_plane.kill()
    await wait_until(lambda: not gateway.is_connected)
    task = subscribe(gateway, "r1", updates)
    await wait_until(lambda: updates.get("r1") == [None])
    await control_plane.begin()
    await wait_until(lambda: positions(updates, "r1") == [1])
    task.cancel()


async def test_a_put_back_request_gets_updates_again(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    updates: Updates = {}
    replica, _ = await control_plane.replica("s1")
    answer = await asyncio.wait_for(gateway.acquire(submission("r1")), PATIENCE_S)
    assert isinstance(answer, Grant)
    # The request was granted before its subscription arrived.
    updates["r1"] = gateway.outlooks("r1")
    await asyncio.sleep(0.1)
    assert updates["r1"] == []
    await replica.close()
    await wait_until(lambda: not gateway.replicas())
    again = asyncio.create_task(gateway.requeue("r1", DispatchFailure.UNREACHABLE, "it is gone"))
    await wait_until(lambda: positions(updates, "r1") == [1])
    again.cancel()


async def test_the_start_is_sent_and_its_error_is_counted(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    updates: Updates = {}
    busy = ReplicaReport(received=0, waiting=9, running=8, kv_usage_ratio=1.0)
    _, double = await control_plane.replica(prepare=lambda made: setattr(made, "report", busy))
    drain = control_plane.live.core.admission.predictor.drain
    drain.backlog_s = 10.0
    drain._tokens.add(200.0, 10.0)
    task = subscribe(gateway, "r1", updates, priority=PriorityClass.INTERACTIVE)
    await wait_until(lambda: bool(updates.get("r1")))
    outlook = updates["r1"][0]
    assert outlook is not None
    assert outlook.earliest_s is not None
    assert outlook.expected_s is not None
    assert outlook.latest_s is not None
    assert 0 < outlook.earliest_s < outlook.expected_s < outlook.latest_s
    double.report = ReplicaReport(received=0, waiting=0, running=0, kv_usage_ratio=0.0)
    await end(gateway, task)
    await wait_until(lambda: len(control_plane.live.core) == 0)
    text = await control_plane.live.exposition()
    for estimate in ("first", "last"):
        labels = f'class="interactive",estimate="{estimate}",model="m"'
        whole = f'class="interactive",estimate="{estimate}",le="+Inf",model="m"'
        # Errors may be negative, so the histogram has no sum.
        assert f"ewsjf_queue_estimate_error_seconds_bucket{{{whole}}} 1.0" in text
        counts = [
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith(f"ewsjf_queue_estimates_total{{{labels},verdict=")
        ]
        assert sorted(counts) == [0.0, 0.0, 1.0]


async def test_a_fault_in_the_outlook_costs_no_request(
    control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def faulty(*_: object) -> object:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("serve_app.core.outlook.watched.expected_order", faulty)
    gateway = await control_plane.gateway()
    updates: Updates = {}
    task = subscribe(gateway, "r1", updates)
    await wait_until(lambda: "event=queue_outlook_failed" in caplog.text)
    await control_plane.replica()
    await end(gateway, task)
    assert updates["r1"] == []
    assert control_plane.ends == []

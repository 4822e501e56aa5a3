"""Revocation of grants: from the scheduler's command to the gateway's put-back."""

import asyncio
from typing import Any

from serve_app.core.commands import Revoke
from serve_app.core.events import DispatchFailed, DispatchFailure
from serve_app.request import PriorityClass
from serve_app.serving.channel.messages import (
    PutBack,
    Revoked,
    Submit,
)
from tests.serving.channel.harness import AwaitedClient, ControlPlane, Grant, submission, wait_until
from tests.serving.channel.test_gateway_sessions import FakeLiveScheduler, running, waits

BATCH: dict[str, Any] = {"priority": PriorityClass.BATCH, "revocable": True}


async def started(gateway: AwaitedClient, calls: list[str]) -> Grant:
    """Submit a revocable request, and return its grant."""
    answer = await gateway.acquire(submission("r1", **BATCH), on_revoke=lambda: calls.append("r1"))
    assert isinstance(answer, Grant)
    return answer


async def test_a_revocation_reaches_the_gateway_and_its_put_back_the_core(
    control_plane: ControlPlane,
) -> None:
    gateway, calls = await control_plane.gateway(), list[str]()
    await control_plane.replica("s1")
    grant = await started(gateway, calls)
    events = control_plane.events(DispatchFailed)
    control_plane.revoke("r1", grant.dispatch.replica_id)
    await wait_until(lambda: calls == ["r1"])
    again = asyncio.create_task(gateway.requeue("r1", DispatchFailure.REVOKED, "needed", 7))
    await wait_until(lambda: bool(events))
    assert events[0] == DispatchFailed("r1", "s1", DispatchFailure.REVOKED, "needed", None, 7)
    assert isinstance(await again, Grant)


async def test_a_revocation_of_an_earlier_grant_is_ignored(control_plane: ControlPlane) -> None:
    gateway, calls = await control_plane.gateway(), list[str]()
    await control_plane.replica("s1")
    await started(gateway, calls)
    gateway.on_message(Revoked("r1", 2))
    gateway.on_message(Revoked("r2", 1))
    await gateway.requeue("r1", DispatchFailure.BUSY)
    gateway.on_message(Revoked("r1", 1))
    assert calls == []
    gateway.on_message(Revoked("r1", 2))
    assert calls == ["r1"]


async def test_a_request_that_waits_is_not_revoked(control_plane: ControlPlane) -> None:
    gateway, calls = await control_plane.gateway(), list[str]()
    await control_plane.replica("s1", seats=1)
    await started(gateway, calls)
    blocking = await gateway.acquire(submission("r2"))
    waits = asyncio.create_task(gateway.requeue("r1", DispatchFailure.BUSY))
    await asyncio.sleep(0)
    gateway.on_message(Revoked("r1", 1))
    assert calls == []
    assert isinstance(blocking, Grant)
    waits.cancel()


async def test_the_gateway_does_not_expire_a_request_that_was_served_in_part(
    control_plane: ControlPlane,
) -> None:
    gateway = await control_plane.gateway()
    await control_plane.replica("s1")
    failures = {
        "r1": (DispatchFailure.REVOKED, 0),
        "r2": (DispatchFailure.LOST, 7),
        "r3": (DispatchFailure.BUSY, 0),
    }
    for name in failures:
        assert isinstance(await gateway.acquire(submission(name, **BATCH, queue_timeout_s=1.0)), Grant)
    await asyncio.sleep(1.1)
    gateway.on_disconnected()
    waiting = [
        asyncio.create_task(gateway.requeue(name, failure, "", tokens))
        for name, (failure, tokens) in failures.items()
    ]
    await asyncio.sleep(0)
    gateway.on_heartbeat()
    await asyncio.sleep(0)
    assert [each.done() for each in waiting] == [False, False, True]
    for each in waiting:
        each.cancel()


async def test_a_request_that_cannot_be_revoked_is_left_alone(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    await control_plane.replica("s1")
    await gateway.acquire(submission("r1"))
    gateway.on_message(Revoked("r1", 1))
    assert gateway.is_connected


async def test_only_the_grant_on_the_replica_is_revoked() -> None:
    host = FakeLiveScheduler()
    link = host.connect(waits())
    for replica_id in ("s1", "s2"):
        host.sessions.revoke(Revoke(request_id="r1", gateway_id="g1", replica_id=replica_id))
    assert link.of(Revoked) == [Revoked("r1", 1)]


async def test_a_lost_put_back_of_a_revoked_request_is_repeated_with_its_tokens() -> None:
    host, replica_id = running()
    put_back = PutBack("r1", replica_id, DispatchFailure.REVOKED, "needed", 1, 7)
    host.connect(waits(grants=1, put_back=put_back))
    (event,) = host.events
    assert isinstance(event, DispatchFailed)
    assert (event.failure, event.generated_tokens) == (DispatchFailure.REVOKED, 7)


async def test_a_new_scheduler_does_not_serve_a_revoked_request_first() -> None:
    host = FakeLiveScheduler()
    put_back = PutBack("r1", "s1", DispatchFailure.REVOKED, "needed", 2, 7)
    host.connect(Submit(submission("r1", **BATCH), 12.0, 2, put_back))
    entry = host.core.find("r1")
    assert entry is not None
    assert (entry.attempts.returned, entry.attempts.put_backs) == (False, 0)
    assert entry.expires_at > host.now() + 12.0
    assert entry.request.grants == 3

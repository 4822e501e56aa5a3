"""Revocation of grants: from the scheduler's command to the gateway's put-back."""

import asyncio
from typing import Any

from serve_app.core.events import DispatchFailed, DispatchFailure
from serve_app.request import PriorityClass
from tests.serving.channel.harness import AwaitedClient, ControlPlane, Grant, submission, wait_until

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

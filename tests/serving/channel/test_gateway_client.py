import asyncio

import msgspec
import pytest

from serve_app.core.commands import Dispatch
from serve_app.core.events import DispatchFailure, Finished, FirstToken, Message
from serve_app.errors import Conclusion, Outcome
from serve_app.request import PriorityClass
from serve_app.serving.channel import gateway_client
from serve_app.serving.channel.messages import Granted, ReplicaEntry, ReplicaTable, Revoked, Welcome
from serve_app.serving.channel.scheduler_client import ReplicaAddress
from tests.serving.channel.harness import (
    FAST,
    AwaitedClient,
    AwaitedRequest,
    ControlPlane,
    FakeReplica,
    Grant,
    RecordingLink,
    granted,
    rejected,
    submission,
    wait_until,
)


async def disconnected_gateway(control_plane: ControlPlane) -> AwaitedClient:
    gateway = await control_plane.gateway()
    control_plane.kill()
    await wait_until(lambda: not gateway.is_connected)
    return gateway


async def test_a_request_that_waits_its_time_out_while_the_scheduler_is_away_expires_at_the_gateway(
    control_plane: ControlPlane,
) -> None:
    gateway = await control_plane.gateway()
    task = asyncio.create_task(gateway.acquire(submission("r1", queue_timeout_s=0.5)))
    await wait_until(lambda: len(control_plane.live.core) == 1)
    control_plane.kill()
    rejection = await asyncio.wait_for(task, 10)
    assert not isinstance(rejection, Grant)
    assert rejection.outcome is Outcome.EXPIRED
    assert "the scheduler is disconnected" in rejection.message
    assert "waiting 0, running 0" in repr(gateway)


async def test_a_request_that_arrives_without_a_scheduler_is_served_by_the_next(
    control_plane: ControlPlane,
) -> None:
    gateway = await disconnected_gateway(control_plane)
    task = asyncio.create_task(gateway.acquire(submission("r1")))
    await control_plane.begin()
    await control_plane.replica("s1")
    assert isinstance(await asyncio.wait_for(task, 10), Grant)


async def test_a_request_that_does_not_wait_is_rejected_while_the_scheduler_is_away(
    control_plane: ControlPlane,
) -> None:
    gateway = await disconnected_gateway(control_plane)
    rejection = await rejected(gateway, "r1", no_wait=True)
    assert rejection.outcome is Outcome.REJECTED_NO_REPLICA
    assert rejection.retry_after_s is not None


async def test_requests_beyond_the_limit_are_rejected_while_the_scheduler_is_away(
    control_plane: ControlPlane,
) -> None:
    gateway = await disconnected_gateway(control_plane)
    limit = control_plane.channel.max_queued_disconnected
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(gateway.acquire(submission(f"r{n}"))) for n in range(limit)]
    await asyncio.sleep(0)
    assert (await rejected(gateway, "one more")).outcome is Outcome.REJECTED_QUEUE_FULL
    for task in tasks:
        task.cancel()


async def test_a_lower_incarnation_is_rejected_for_ever(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    await control_plane.restart()
    await wait_until(lambda: gateway.incarnation == 2 and gateway.is_connected)
    control_plane.kill()
    control_plane.incarnation = 0
    await control_plane.begin()
    await wait_until(lambda: not gateway.is_connected)
    await asyncio.sleep(0.5)
    assert not gateway.is_connected
    assert gateway.incarnation == 2


async def test_a_rejection_has_the_schedulers_message(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    await control_plane.replica("s1")
    rejection = await rejected(gateway, "r1", model="other")
    assert rejection.outcome is Outcome.REJECTED_UNKNOWN_MODEL
    assert "'other' is not served here" in rejection.message


async def test_a_request_that_fails_on_too_many_replicas_is_rejected_after_its_put_back(
    control_plane: ControlPlane,
) -> None:
    gateway = await control_plane.gateway()
    await control_plane.replica("s1")
    await control_plane.replica("s2")
    await control_plane.replica("s3")
    answer = await gateway.acquire(submission("r1"))
    for _ in range(control_plane.settings.max_attempts):
        assert isinstance(answer, Grant)
        answer = await asyncio.wait_for(gateway.requeue("r1", DispatchFailure.LOST, "it broke"), 10)
    assert not isinstance(answer, Grant)
    assert answer.outcome is Outcome.FAILED
    assert "it broke" in answer.message
    assert len(control_plane.live.core) == 0


async def test_the_table_has_open_replicas_and_is_empty_without_a_scheduler(
    control_plane: ControlPlane,
) -> None:
    gateway = await control_plane.gateway()
    client, double = await control_plane.replica("s1")
    await wait_until(lambda: [address.replica_id for address in gateway.replicas()] == ["s1"])
    assert gateway.replicas()[0].token == "token-s1"
    double.report = type(double.report)(received=0, waiting=0, running=0, kv_usage_ratio=0.0, draining=True)
    client.report_now()
    await wait_until(lambda: gateway.replicas() == ())
    control_plane.kill()
    await wait_until(lambda: not gateway.is_connected)
    assert gateway.replicas() == ()


async def test_departed_replicas_are_pruned_without_a_lookup(
    control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_client, "_DEPARTED_RETENTION_S", 0.0)
    gateway = await control_plane.gateway()
    for number in range(5):
        client, _ = await control_plane.replica(f"s{number}")
        await wait_until(lambda: len(gateway.replicas()) == 1)
        await client.close()
        await wait_until(lambda: gateway.replicas() == ())
    # A lookup prunes, too, so none may be left for it.
    monkeypatch.setattr(gateway_client, "_DEPARTED_RETENTION_S", 1e9)
    assert len(gateway.all_replicas()) <= 1


async def test_the_exposition_arrives_over_the_channel_and_is_empty_without_an_answer(
    control_plane: ControlPlane,
) -> None:
    gateway = await control_plane.gateway()
    await control_plane.replica("s1")
    await granted(gateway, "r1", priority=PriorityClass.INTERACTIVE)
    text = await gateway.exposition(with_gateways=True)
    assert 'ewsjf_dispatches_total{model="m",pool="short"} 1.0' in text
    assert 'ewsjf_requests_in_flight{model="m",pool="short",replica="s1"} 1.0' in text
    assert 'ewsjf_gateways_connected{model="m"} 1.0' in text
    assert 'ewsjf_scheduler_incarnation{model="m"} 1.0' in text
    other = await control_plane.gateway("g2")

    async def metrics() -> str:
        return "of_another_gateway 1\n"

    other.register_metrics(metrics)
    assert "of_another_gateway" in await gateway.exposition(with_gateways=True)
    assert "of_another_gateway" not in await gateway.exposition(with_gateways=False)
    control_plane.kill()
    assert await gateway.exposition(with_gateways=True) == ""


DISPATCH = Dispatch(
    request_id="r1",
    gateway_id="g1",
    replica_id="s1",
    pool="short",
    length_queue="0-256",
    estimated_tokens=10,
    queue_wait_s=0.0,
)


async def test_only_finish_messages_without_acknowledgement_are_sent_again(
    control_plane: ControlPlane,
) -> None:
    (gateway, link), next_link = connected(control_plane), RecordingLink()
    for name in ("r1", "r2"):
        request = asyncio.create_task(gateway.acquire(submission(name)))
        await asyncio.sleep(0)
        gateway.on_message(Granted(1, msgspec.structs.replace(DISPATCH, request_id=name)))
        await request
        gateway.end(name, Outcome.COMPLETED)
        if name == "r1":
            link.acknowledged = len(link.messages)
    gateway.on_heartbeat()
    gateway.on_disconnected()
    gateway.on_connected(next_link, Welcome(1, {}))  # type: ignore[arg-type]
    assert [message.request_id for message in next_link.of(Finished)] == ["r2"]


class Recorded(AwaitedRequest):
    """Request that counts its grants, and withdraws another one when it is rejected."""

    def __init__(self, name: str, client: AwaitedClient, other: "Recorded | None" = None) -> None:
        super().__init__(submission(name, no_wait=True), "", self.count_revocation)
        self.grants_received = self.revocations = 0
        self.rejections: list[Conclusion] = []
        self._client = client
        self._other = other

    def on_grant(self, dispatch: Dispatch, address: ReplicaAddress) -> None:
        self.grants_received += 1

    def count_revocation(self) -> None:
        self.revocations += 1

    def on_rejection(self, rejection: Conclusion) -> None:
        self.rejections.append(rejection)
        if self._other is not None:
            self._client.cancel(self._other)


def connected(control_plane: ControlPlane) -> tuple[AwaitedClient, RecordingLink]:
    """Return a client with a recorded connection and a table of one replica."""
    gateway, link = AwaitedClient("g1", control_plane.locate, FAST), RecordingLink()
    gateway.on_connected(link, Welcome(1, {}))  # type: ignore[arg-type]
    gateway.on_message(ReplicaTable([ReplicaEntry(FakeReplica("s1", "short", 8).address, True, ())]))
    return gateway, link


async def test_a_rejection_that_withdraws_another_request_reaches_all_that_remain(
    control_plane: ControlPlane,
) -> None:
    gateway, _ = connected(control_plane)
    withdrawn, last = Recorded("r2", gateway), Recorded("r3", gateway)
    for request in (Recorded("r1", gateway, other=withdrawn), withdrawn, last):
        gateway.submit(request)
    gateway.on_disconnected()
    assert withdrawn.rejections == []
    assert len(last.rejections) == 1
    assert "waiting 0, running 0" in repr(gateway)


async def test_messages_about_another_grant_than_the_current_one_are_ignored(
    control_plane: ControlPlane,
) -> None:
    gateway, _ = connected(control_plane)
    request = Recorded("r1", gateway)
    gateway.submit(request)

    def receive(*messages: Message) -> tuple[int, int]:
        for message in messages:
            gateway.on_message(message)
        return request.grants_received, request.revocations

    assert receive(Revoked("r1", 0)) == (0, 0), "it waits"
    assert receive(Granted(1, DISPATCH), Granted(1, DISPATCH), Granted(2, DISPATCH)) == (1, 0), "it runs"
    assert receive(Revoked("r1", 2), Revoked("r2", 1)) == (1, 0)
    gateway.put_back(request, DispatchFailure.LOST)
    assert receive(Granted(1, DISPATCH), Revoked("r1", 1)) == (1, 0)
    assert receive(Granted(2, DISPATCH), Revoked("r1", 1)) == (2, 0)
    assert receive(Revoked("r1", 2)) == (2, 1)


async def test_a_request_that_may_not_wait_is_not_put_back_without_a_scheduler(
    control_plane: ControlPlane,
) -> None:
    gateway, _ = connected(control_plane)
    request = Recorded("r1", gateway)
    gateway.submit(request)
    gateway.on_message(Granted(1, DISPATCH))
    gateway.on_disconnected()
    assert request.rejections == [], "it runs"
    gateway.put_back(request, DispatchFailure.LOST)
    assert [each.outcome for each in request.rejections] == [Outcome.REJECTED_NO_REPLICA]


async def test_a_request_whose_id_was_in_use_cannot_end_the_one_that_has_it(
    control_plane: ControlPlane,
) -> None:
    gateway, link = connected(control_plane)
    holder, second = Recorded("r1", gateway), Recorded("r1", gateway)
    gateway.submit(holder)
    gateway.on_message(Granted(1, DISPATCH))
    with pytest.raises(ValueError, match="already pending"):
        gateway.submit(second)
    gateway.first_token(second)
    gateway.finish(second, Outcome.COMPLETED)
    assert link.of(FirstToken) == link.of(Finished) == []
    gateway.finish(holder, Outcome.COMPLETED)
    assert len(link.of(Finished)) == 1


async def test_a_request_id_of_another_gateway_is_rejected_and_stays_the_others(
    control_plane: ControlPlane,
) -> None:
    first, second = await control_plane.gateway("g1"), await control_plane.gateway("g2")
    await control_plane.replica("s1")
    await granted(first, "r1")
    rejection = await rejected(second, "r1")
    assert rejection.outcome is Outcome.REJECTED_INVALID
    assert "in use by gateway g1" in rejection.message
    assert len(control_plane.live.core) == 1


async def test_a_gateway_that_closes_rejects_waiting_and_new_requests(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    task = asyncio.create_task(gateway.acquire(submission("r1")))
    await wait_until(lambda: len(control_plane.live.core) == 1)
    await gateway.close()
    rejection = await task
    assert not isinstance(rejection, Grant)
    assert rejection.outcome is Outcome.REJECTED_NO_REPLICA
    assert (await rejected(gateway, "r2")).message == "this gateway is shutting down"

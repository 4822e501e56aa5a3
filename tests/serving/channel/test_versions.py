"""Parts of two releases at once: each way round, a peer or a scheduler of version 5 is one of the two.

The older side speaks by its own record of the protocol (`version_5`), whose readers refuse what it did not
know.
"""

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import msgspec
import pytest

from serve_app.errors import Conclusion, Outcome
from serve_app.request import Usage
from serve_app.scheduling.events import DispatchFailure
from serve_app.serving.channel.framing import HEADER_BYTES, decode_from_peer, decode_from_scheduler
from serve_app.serving.channel.gateway_client import GatewayClient
from serve_app.serving.channel.messages import (
    VERSION,
    Finish,
    Outlooks,
    PutBack,
    Refused,
    Role,
    Running,
    SchedulerEndpoint,
    Submit,
    Watch,
)
from serve_app.serving.channel.replica_client import ReplicaClient
from serve_app.serving.channel.scheduler_client import Grant, RequestOutlook, RequestTimes
from serve_app.serving.channel.versions import as_before
from tests.serving.channel import version_5
from tests.serving.channel.harness import (
    FAST,
    PATIENCE_S,
    ReplicaDouble,
    Simulation,
    submission,
    until,
)

M = TypeVar("M")

USAGE = Usage(prompt_tokens=10, output_tokens=3)


class Conversation:
    """One end of a connection that speaks version 5, and says `Heartbeat` as it did."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decode: Callable[[bytes], list[Any]]
    ) -> None:
        self._reader, self._writer, self._decode = reader, writer, decode
        self._read = 0
        self.heard: list[Any] = []
        self.ended = False
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]

    def say(self, *messages: version_5.Message) -> None:
        body = msgspec.msgpack.encode(messages)
        self._writer.write(len(body).to_bytes(HEADER_BYTES, "big") + body)

    async def hear(self, kind: type[M], number: int = 1) -> M:
        """The first message of a kind, or a later one."""
        await until(lambda: len(self._of(kind)) >= number or self.ended, f"a {kind.__name__} comes")
        return self._of(kind)[number - 1]

    def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._writer.transport.abort()

    def _of(self, kind: type[M]) -> list[M]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def _listen(self) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head = await self._reader.readexactly(HEADER_BYTES)
                    messages = self._decode(await self._reader.readexactly(int.from_bytes(head, "big")))
                    self._read += len(messages)
                    self.heard += messages
        finally:
            self.ended = True

    async def _beat(self) -> None:
        while True:
            self.say(version_5.Heartbeat(self._read))
            await asyncio.sleep(FAST.heartbeat_s)


async def peer(world: Simulation, role: version_5.Role, peer_id: str) -> Conversation:
    """A peer of version 5 that has found the scheduler."""
    endpoint = world.endpoint(None)
    conversation = Conversation(
        *await asyncio.open_connection(endpoint.host, endpoint.port), version_5.decode_from_scheduler
    )
    conversation.say(version_5.Hello(5, role, peer_id, endpoint.secret, 0))
    return conversation


def wants(request_id: str) -> version_5.Submission:
    shape = version_5.PromptShape(text_bytes=40, prompt_tokens=10)
    spec = version_5.RequestSpec(model="m", shape=shape, max_output_tokens=10)
    return version_5.Submission(request_id=request_id, spec=spec)


async def test_a_gateway_of_the_version_before_is_served(world: Simulation) -> None:
    await world.replica("s1")
    gateway = await peer(world, version_5.Role.GATEWAY, "old")
    gateway.say(version_5.Submit(wants("r1"), 0.5, 0.2), version_5.SnapshotEnd())
    assert (await gateway.hear(version_5.Welcome)).incarnation == 1
    dispatch = (await gateway.hear(version_5.Granted)).dispatch
    assert (dispatch.request_id, dispatch.replica_id) == ("r1", "s1")
    table = await gateway.hear(version_5.ReplicaTable)
    assert [entry.address.replica_id for entry in table.entries] == ["s1"]
    gateway.say(version_5.PutBack("r1", "s1", version_5.DispatchFailure.BUSY, "no room", 1))
    assert (await gateway.hear(version_5.Granted, 2)).grant == 2
    gateway.say(version_5.First("r1"))
    usage = version_5.Usage(prompt_tokens=10, output_tokens=3)
    gateway.say(version_5.Finish("r1", version_5.Outcome.COMPLETED, usage), version_5.Scrape(1))
    await until(lambda: len(world.live.core) == 0)
    assert 'outcome="completed"} 1.0' in (await gateway.hear(version_5.Exposition)).text
    gateway.leave()


async def test_what_waits_in_an_old_gateway_outlives_the_upgrade_of_the_scheduler(world: Simulation) -> None:
    before = await peer(world, version_5.Role.GATEWAY, "old")
    before.say(version_5.SnapshotEnd(), version_5.Submit(wants("r1"), 0.0, 0.0))
    await until(lambda: len(world.live.core) == 1)
    await world.restart()
    await world.replica("s1")
    after = await peer(world, version_5.Role.GATEWAY, "old")
    after.say(version_5.Submit(wants("r1"), 1.0, 1.0), version_5.SnapshotEnd())
    assert (await after.hear(version_5.Granted)).dispatch.request_id == "r1"
    for conversation in (before, after):
        conversation.leave()


async def test_a_replica_of_the_version_before_gets_requests(world: Simulation) -> None:
    gateway = await world.gateway()
    asked = [asyncio.create_task(gateway.acquire(submission(f"r{n}"))) for n in range(40)]
    await until(lambda: len(world.live.core) == 40)
    replica = await peer(world, version_5.Role.REPLICA, "s1")
    spec = version_5.ReplicaSpec(
        replica_id="s1", pool="short", max_model_len=1000, kv_tokens=1_000_000, max_num_seqs=8
    )
    address = version_5.ReplicaAddress(
        replica_id="s1", pool="short", host="10.0.0.1", port=8000, token="token-s1"
    )
    saturated = version_5.ReplicaReport(received=0, waiting=99, running=8, kv_usage_ratio=0.9)
    replica.say(version_5.Register(spec, address), version_5.Report(saturated))
    first, _ = await asyncio.wait(asked, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    grant = first.pop().result()
    assert isinstance(grant, Grant)
    assert grant.address.token == "token-s1"
    replica.say(version_5.EngineFailed("it is dead"))
    await until(lambda: world.live.status()["replicas"] == {})
    for task in asked:
        task.cancel()
    replica.leave()


class OldScheduler:
    """A scheduler of version 5: demands its own version, and grants each request to the one replica."""

    def __init__(self) -> None:
        self.peers: list[Conversation] = []
        self.rejected = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._meet, "127.0.0.1", 0)

    async def locate(self) -> SchedulerEndpoint:
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        return endpoint_of_version_5("127.0.0.1", port, "secret", 1)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for conversation in self.peers:
            conversation.leave()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        conversation = Conversation(reader, writer, version_5.decode_from_peer)
        hello = await conversation.hear(version_5.Hello)
        if hello.version != version_5.VERSION or hello.secret != "secret":
            self.rejected += 1
            conversation.say(version_5.Rejected("this scheduler speaks version 5"))
            writer.close()
            return
        self.peers.append(conversation)
        timeouts = dict.fromkeys(version_5.PriorityClass, 60.0)
        conversation.say(version_5.Welcome(1, timeouts))
        if hello.role is version_5.Role.GATEWAY:
            address = version_5.ReplicaAddress(
                replica_id="s1", pool="short", host="10.0.0.1", port=8000, token="t"
            )
            conversation.say(version_5.ReplicaTable([version_5.ReplicaEntry(address, open=True)]))

    def grant(self, request_id: str, number: int) -> None:
        dispatch = version_5.Dispatch(
            request_id=request_id,
            gateway_id="g1",
            replica_id="s1",
            pool="short",
            length_queue="all",
            estimated_tokens=20,
            queue_wait_s=0.1,
        )
        self.peers[0].say(version_5.Granted(number, dispatch))


def endpoint_of_version_5(*values: Any) -> SchedulerEndpoint:
    """As Ray hands one over: fields one by one, without those that a later release has added."""
    endpoint = SchedulerEndpoint.__new__(SchedulerEndpoint)
    endpoint.__setstate__(list(values))  # type: ignore[attr-defined]  # made by the dataclass, for its slots
    return endpoint


@pytest.fixture
async def old_scheduler() -> AsyncIterator[OldScheduler]:
    scheduler = OldScheduler()
    await scheduler.start()
    yield scheduler
    await scheduler.stop()


async def test_a_gateway_speaks_the_version_before_to_a_scheduler_that_is_upgraded_last(
    old_scheduler: OldScheduler,
) -> None:
    client = GatewayClient("g1", old_scheduler.locate, FAST)
    client.start()
    await until(lambda: client.is_connected)
    asked = asyncio.create_task(client.acquire(submission("r1")))
    conversation = old_scheduler.peers[0]
    assert (await conversation.hear(version_5.Submit)).submission.request_id == "r1"
    # It could not tell, and does not hear that it is asked.
    client.watch("r1", lambda outlook: pytest.fail(f"{outlook}"))
    old_scheduler.grant("r1", 1)
    assert isinstance(await asyncio.wait_for(asked, PATIENCE_S), Grant)
    # Each of today's reasons arrives as one that the old scheduler knows.
    for number, failure in enumerate(DispatchFailure, start=1):
        again = asyncio.create_task(client.put_back("r1", "s1", failure, "it came back"))
        assert (await conversation.hear(version_5.PutBack, number)).grant == number
        old_scheduler.grant("r1", number + 1)
        assert isinstance(await asyncio.wait_for(again, PATIENCE_S), Grant)
    client.first_token("r1")
    client.finish("r1", Outcome.COMPLETED, USAGE)
    assert (await conversation.hear(version_5.Finish)).outcome == "completed"
    assert not conversation.ended
    assert old_scheduler.rejected == 0
    await client.close()


async def test_a_replica_speaks_the_version_before_to_a_scheduler_that_is_upgraded_last(
    old_scheduler: OldScheduler,
) -> None:
    double = ReplicaDouble("s1", "short", 8)
    client = ReplicaClient(double.spec, double.address, old_scheduler.locate, double.load, FAST)
    client.start()
    await until(lambda: bool(old_scheduler.peers))
    conversation = old_scheduler.peers[0]
    assert (await conversation.hear(version_5.Register)).spec.max_num_seqs == 8
    assert (await conversation.hear(version_5.Report)).report.running == 0
    conversation.say(version_5.Queued(2.5))
    double.engine_failure = "it is dead"
    assert "it is dead" in (await conversation.hear(version_5.EngineFailed)).reason
    assert client.is_connected
    await client.close()


@pytest.mark.parametrize("theirs", [VERSION - 2, VERSION + 1])
async def test_versions_further_apart_are_told_so(world: Simulation, theirs: int) -> None:
    endpoint = world.endpoint(None if theirs <= version_5.VERSION else Role.GATEWAY)
    conversation = Conversation(
        *await asyncio.open_connection(endpoint.host, endpoint.port), version_5.decode_from_scheduler
    )
    conversation.say(version_5.Hello(theirs, version_5.Role.GATEWAY, "g1", endpoint.secret, 0))
    reason = (await conversation.hear(version_5.Rejected)).reason
    assert f"version {theirs} of the protocol, this scheduler {VERSION - 1} and {VERSION}" in reason
    conversation.leave()


def members(kind: type[enum.StrEnum]) -> Iterator[Any]:
    yield from kind


def test_every_value_that_can_be_said_reaches_a_reader_of_the_version_before() -> None:
    said = [
        *(PutBack("r1", "s1", failure, "why", 1) for failure in members(DispatchFailure)),
        *(
            Submit(submission("r1"), 1.0, 1.0, 1, PutBack("r1", "s1", failure, "why", 1))
            for failure in members(DispatchFailure)
        ),
        *(Finish("r1", outcome, USAGE) for outcome in members(Outcome)),
        Finish("r1", Outcome.COMPLETED, USAGE, RequestTimes("/v1/completions", 0.1, 0.2, None, None)),
        Submit(submission("r1"), 1.0, 1.0, client_request_id="mine"),
        Running(submission("r1"), 1.0, 1, "s1", True, client_request_id="mine"),
    ]
    version_5.decode_from_peer(msgspec.msgpack.encode([as_before(message) for message in said]))
    told = [as_before(Refused("r1", Conclusion(outcome, "why", 2.0))) for outcome in members(Outcome)]
    read = version_5.decode_from_scheduler(msgspec.msgpack.encode(told))
    refusals = [message for message in read if isinstance(message, version_5.Refused)]
    assert [message.conclusion.retry_after_s for message in refusals] == [2.0] * len(Outcome)


def test_news_of_the_queue_is_not_for_the_version_before() -> None:
    assert as_before(Watch("r1")) is None
    assert as_before(Outlooks([RequestOutlook("r1", 1, None, None, None)])) is None


def test_a_value_that_the_version_before_lacked_is_put_as_the_nearest_one() -> None:
    # Such members come and go with versions; these stand for them.
    unknown = PutBack("r1", "s1", _Later.SOMETHING, "why", 1)  # type: ignore[arg-type]
    assert as_before(unknown) == PutBack("r1", "s1", DispatchFailure.LOST, "why", 1)
    limited = Refused("r1", Conclusion(_Later.REJECTED_SOMEHOW, "why", 2.0))  # type: ignore[arg-type]
    assert as_before(limited) == Refused("r1", Conclusion(Outcome.REJECTED_QUEUE_FULL, "why", 2.0))
    ended = Finish("r1", _Later.SOMETHING, None)  # type: ignore[arg-type]
    assert as_before(ended) == Finish("r1", Outcome.FAILED, None)


class _Later(enum.StrEnum):
    SOMETHING = "something"
    REJECTED_SOMEHOW = "rejected_somehow"


def test_messages_of_the_version_before_are_read_today() -> None:
    put_back = version_5.PutBack("r1", "s1", version_5.DispatchFailure.LOST, "why", 1)
    from_peers = [
        version_5.Hello(5, version_5.Role.REPLICA, "s1", "secret", 3),
        version_5.Submit(wants("r1"), 2.0, 1.0, 1, put_back),
        version_5.Running(wants("r1"), 2.0, 1, "s1", True),
        version_5.Cancel("r1"),
        version_5.Bye(),
    ]
    assert len(decode_from_peer(msgspec.msgpack.encode(from_peers))) == len(from_peers)
    conclusion = version_5.Conclusion(version_5.Outcome.EXPIRED, "late")
    from_schedulers = [
        version_5.Refused("r1", conclusion),
        version_5.Rejected("no"),
        version_5.Welcome(1, {version_5.PriorityClass.BATCH: 3.0}),
        version_5.Exposition(1, "text"),
    ]
    assert len(decode_from_scheduler(msgspec.msgpack.encode(from_schedulers))) == len(from_schedulers)

"""Reconciliation rules on a real core and a recording link; `test_survival` shows others over sockets."""

from dataclasses import replace

from serve_app.core import Scheduler
from serve_app.core.commands import Conclude, Dispatch
from serve_app.core.dispatch.promotion import BAND, EnginePrioritySettings
from serve_app.core.events import (
    DispatchFailure,
    Event,
    Finished,
    Message,
    ReplicaJoined,
    ReplicaReported,
)
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, RequestTimes
from serve_app.serving.channel.gateway_sessions import GatewaySessions
from serve_app.serving.channel.messages import Granted, PutBack, Rejected, Running, SnapshotEnd, Submit
from tests import builders
from tests.serving.channel.harness import RecordingLink, scheduler_settings, submission


class FakeLiveScheduler:
    """Minimal live scheduler: a core, a manual clock, and the list of events fed."""

    def __init__(self) -> None:
        self.core = Scheduler(scheduler_settings())
        self.clock = 100.0
        self.events: list[Event] = []
        self.watched: list[str] = []
        self.late: dict[str, RequestTimes] = {}
        self.sessions = GatewaySessions(self, 1.0)
        self.registered = {"s1", "s2"}
        for replica_id in sorted(self.registered):
            self.feed(ReplicaJoined(builders.spec(replica_id)))
            self.feed(ReplicaReported(replica_id, builders.report()))
        self.events.clear()

    def watch(self, request_id: str) -> None:
        self.watched.append(request_id)

    def feed(self, event: Event) -> None:
        self.events.append(event)
        for command in self.core.handle(event, self.clock):
            if isinstance(command, Dispatch):
                self.sessions.grant(command, self.core.requests[command.request_id].request)
            elif isinstance(command, Conclude):
                self.sessions.conclude(command, event)

    def now(self) -> float:
        return self.clock

    def queue_timeout_s(self, priority: PriorityClass) -> float:
        return self.core.settings.queue_timeout_s.of(priority)

    def is_registered(self, replica_id: str) -> bool:
        return replica_id in self.registered

    def on_late_times(self, request_id: str, times: RequestTimes) -> None:
        self.late[request_id] = times

    async def exposition(self) -> str:
        return ""

    async def answer(self, query: str, arguments: bytes) -> bytes:
        return b"{}"

    def connect(self, *snapshot: Message) -> RecordingLink:
        """Connect or reconnect the gateway with this snapshot."""
        link = RecordingLink()
        send = self.sessions.on_join("g1", link)  # type: ignore[arg-type]
        for message in (*snapshot, SnapshotEnd()):
            send(message)
        self.send = send
        return link

    @property
    def names(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


def waits(request_id: str = "r1", *, grants: int = 0, put_back: PutBack | None = None) -> Submit:
    return Submit(submission(request_id), 0.0, grants, put_back)


def runs(replica_id: str, *, grants: int = 1, started: bool = False) -> Running:
    return Running(submission("r1"), 0.0, grants, replica_id, started)


def running() -> tuple[FakeLiveScheduler, str]:
    """Return a host on which r1 runs by its first grant, and its replica."""
    host = FakeLiveScheduler()
    link = host.connect(waits())
    granted = link.of(Granted)
    host.events.clear()
    return host, granted[0].dispatch.replica_id


async def test_a_grant_and_its_repetition_carry_the_engines_priority() -> None:
    host = FakeLiveScheduler()
    host.connect()
    host.core = Scheduler(replace(scheduler_settings(), engine_priority=EnginePrioritySettings(enabled=True)))
    for event in (ReplicaJoined(builders.spec("s1")), ReplicaReported("s1", builders.report())):
        host.feed(event)
    link = host.connect(waits("r1"), waits("r2"))
    assert [granted.dispatch.engine_priority % BAND for granted in link.of(Granted)] == [0, 1]
    # The gateway has received neither grant and submits again.
    link = host.connect(waits("r1"), waits("r2"))
    assert [granted.dispatch.engine_priority % BAND for granted in link.of(Granted)] == [0, 1]


async def test_a_grant_that_never_arrived_is_not_repeated_for_a_replica_that_has_left() -> None:
    host, replica_id = running()
    host.registered.remove(replica_id)
    link = host.connect(waits())
    assert host.names == ["DispatchFailed"]
    assert {granted.dispatch.replica_id for granted in link.of(Granted)} == host.registered


async def test_unknown_and_waiting_arrives_with_its_true_age() -> None:
    host = FakeLiveScheduler()
    host.connect(Submit(submission("r1", queue_timeout_s=30.0), 12.0, 2))
    entry = host.core.find("r1")
    assert host.names == ["Arrived"]
    assert entry is not None
    assert entry.request.arrived_at == 88.0
    assert entry.request.expires_at == 118.0, "30 s after its arrival, however often it was dispatched"
    assert entry.request.attempts == 2
    assert entry.request.grants == 3, "numbers go on from what the gateway has seen"


async def test_unknown_and_running_is_resumed() -> None:
    host = FakeLiveScheduler()
    host.connect(runs("s2", grants=2, started=True))
    entry = host.core.find("r1")
    assert host.names == ["Resumed"]
    assert entry is not None
    assert (entry.replica_id, entry.started) == ("s2", True)


async def test_unknown_and_ended_is_ignored() -> None:
    host = FakeLiveScheduler()
    host.connect(Finished("r1", Outcome.COMPLETED, None))
    assert host.names == []


async def test_waiting_on_both_sides_changes_nothing() -> None:
    host = FakeLiveScheduler()
    link = host.connect(*(waits(f"r{n}") for n in range(60)))
    stuck = next(each.request.request_id for each in host.core.requests if each.queued)
    host.events.clear()
    host.send(waits(stuck))
    assert host.names == []
    assert not [message for message in link.of(Granted) if message.dispatch.request_id == stuck]


async def test_running_on_both_sides_changes_nothing_but_its_start() -> None:
    host, replica_id = running()
    host.connect(runs(replica_id))
    assert host.names == []
    host.connect(runs(replica_id, started=True))
    host.connect(runs(replica_id, started=True))
    assert host.names == ["FirstToken"]


async def test_the_gateways_snapshot_decides_where_a_request_runs() -> None:
    host, replica_id = running()
    other = "s1" if replica_id == "s2" else "s2"
    host.connect(runs(other, grants=4))
    entry = host.core.find("r1")
    assert host.names == ["Cancelled", "Resumed"]
    assert entry is not None
    assert entry.replica_id == other


async def test_known_and_not_mentioned_is_cancelled_whether_it_waits_or_runs() -> None:
    host = FakeLiveScheduler()
    host.connect(*(waits(f"r{n}") for n in range(60)))
    host.events.clear()
    host.connect(waits("r5"))
    assert host.names == ["Cancelled"] * 59
    assert [each.request.request_id for each in host.core.requests] == ["r5"]


async def test_a_put_back_of_an_unknown_request_is_answered_and_does_not_hang() -> None:
    host = FakeLiveScheduler()
    link = host.connect()
    host.send(PutBack("r1", "s1", DispatchFailure.LOST, "", 1))
    assert [(rejection.request_id, rejection.conclusion.outcome) for rejection in link.of(Rejected)] == [
        ("r1", Outcome.FAILED)
    ]


async def test_a_second_connection_is_not_ended_by_the_loss_of_the_first() -> None:
    host, replica_id = running()
    first = RecordingLink()
    host.sessions.on_join("g1", first)  # type: ignore[arg-type]
    host.connect(runs(replica_id))
    host.sessions.on_loss("g1", first, permanent=False)  # type: ignore[arg-type]
    assert host.sessions.connected_count == 1

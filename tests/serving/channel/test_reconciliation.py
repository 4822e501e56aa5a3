"""Reconciliation rules of `gateway_sessions`, on a real core and a real client, joined by lists of messages.

The matrix visits each pair of states of a request at both ends, with each set of messages in transit, and
breaks the connection there.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from serve_app.core import Scheduler
from serve_app.core.commands import Conclude, Dispatch, Revoke
from serve_app.core.dispatch.promotion import EnginePrioritySettings
from serve_app.core.events import (
    DispatchFailed,
    DispatchFailure,
    Event,
    Finished,
    Message,
    ReplicaJoined,
    ReplicaLost,
    ReplicaReported,
)
from serve_app.core.request import ScheduledRequest
from serve_app.errors import Conclusion, Outcome
from serve_app.request import PriorityClass, RequestTimes
from serve_app.serving.channel.gateway_client import GatewayClient
from serve_app.serving.channel.gateway_sessions import GatewaySessions
from serve_app.serving.channel.messages import (
    Granted,
    PutBack,
    Rejected,
    ReplicaEntry,
    ReplicaTable,
    Revoked,
    Running,
    SnapshotEnd,
    Submit,
    Welcome,
)
from serve_app.serving.channel.scheduler_client import ChannelRequest, ReplicaAddress, RequestOutlook
from tests import builders
from tests.serving.channel.harness import FAST, FakeReplica, RecordingLink, scheduler_settings, submission

# Events after a snapshot, by the state here, the state there, and the message whose loss made them differ.
TABLE: dict[tuple[str, ...], list[str]] = {
    ("unknown", "waits"): ["Arrived"],
    ("unknown", "runs"): ["Resumed"],
    ("unknown", "ended"): [],
    ("unknown", "withdrawn"): [],
    ("unknown", "rejected"): [],
    ("waits", "waits"): [],
    ("waits", "withdrawn"): ["Cancelled"],
    ("runs", "waits", "grant"): [],
    ("runs", "waits", "grant of a lost replica"): ["DispatchFailed"],
    ("runs", "waits", "put-back"): ["DispatchFailed"],
    ("runs", "runs"): [],
    ("runs", "runs", "first token"): ["FirstToken"],
    ("runs", "ended"): ["Finished"],
    ("runs", "withdrawn"): ["Cancelled"],
}
# All cells are reached by six actions.
MAX_ACTIONS = 7
PUT_BACKS = {
    "fail": (DispatchFailure.LOST, "it broke", 0),
    "yield": (DispatchFailure.REVOKED, "needed elsewhere", 7),
}


class FakeLiveScheduler:
    """Minimal live scheduler: a core, a manual clock, and the list of events fed."""

    def __init__(self, replicas: Sequence[str] = ("s1", "s2"), **settings: Any) -> None:
        self.core = Scheduler(scheduler_settings(**settings))
        self.clock = 100.0
        self.events: list[Event] = []
        self.dispatches: list[Dispatch] = []
        self.watched: list[str] = []
        self.late: dict[str, RequestTimes] = {}
        self.sessions = GatewaySessions(self, 1.0)
        self.registered = set(replicas)
        for replica_id in replicas:
            self.feed(ReplicaJoined(builders.spec(replica_id)))
            self.feed(ReplicaReported(replica_id, builders.report()))
        self.events.clear()

    def watch(self, request_id: str) -> None:
        self.watched.append(request_id)

    def feed(self, event: Event) -> None:
        self.events.append(event)
        for command in self.core.handle(event, self.clock):
            if isinstance(command, Dispatch):
                self.dispatches.append(command)
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
        self.send = self.sessions.on_join("g1", link)  # type: ignore[arg-type]
        for message in (*snapshot, SnapshotEnd()):
            self.send(message)
        return link

    def find(self) -> ScheduledRequest:
        found = self.core.find("r1")
        assert found is not None
        return found

    @property
    def names(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


class Tracked(ChannelRequest):
    """Request that accepts only the answers that its state allows.

    Attributes:
        grant: number of its last grant.
    """

    def __init__(self) -> None:
        self.submission = submission("r1", priority=PriorityClass.BATCH, revocable=True)
        self.state, self.replica_id, self.grant, self.started = "waits", "", 0, False

    def on_grant(self, dispatch: Dispatch, address: ReplicaAddress) -> None:
        assert self.state == "waits", "it is granted once"
        assert dispatch.replica_id == address.replica_id
        self.state, self.replica_id, self.started = "runs", dispatch.replica_id, False

    def on_rejection(self, rejection: Conclusion) -> None:
        assert self.state == "waits", "it is answered once"
        self.state = "rejected"

    def on_revocation(self) -> None:
        raise AssertionError("nothing revokes it")

    def on_outlook(self, outlook: RequestOutlook | None) -> None:
        raise AssertionError("it is not watched")


class Channel:
    """One request, its gateway and its scheduler, and the messages in transit each way.

    Attributes:
        reconciled: cells of `TABLE` that snapshots were compared with.
    """

    def __init__(self, replicas: Sequence[str]) -> None:
        self._replicas = replicas
        self.request = Tracked()
        self.client = GatewayClient("g1", None, FAST)  # type: ignore[arg-type]
        self.reconciled: list[tuple[str, ...]] = []
        self._repeats_end = False
        self._start_scheduler()
        self._connect()
        self.do("read up")
        self.client.submit(self.request)

    def _start_scheduler(self) -> None:
        priority = EnginePrioritySettings(enabled=True)
        self.host = FakeLiveScheduler(self._replicas, max_attempts=1, engine_priority=priority)

    def _connect(self) -> None:
        self.up, self.down = RecordingLink(), RecordingLink()
        self.read_up = self.read_down = 0
        self._receive = self.host.sessions.on_join("g1", self.down)  # type: ignore[arg-type]
        self.client.on_connected(self.up, Welcome(1, {}))  # type: ignore[arg-type]
        addresses = (FakeReplica(each, "short", 8).address for each in ("s1", "s2"))
        self.client.on_message(ReplicaTable([ReplicaEntry(each, True, ()) for each in addresses]))

    @property
    def here(self) -> str:
        """State of the request at the scheduler."""
        scheduled = self.host.core.find("r1")
        return "unknown" if scheduled is None else "waits" if scheduled.replica_id is None else "runs"

    @property
    def cell(self) -> tuple[str, ...]:
        """Key of `TABLE`."""
        match cell := (self.here, self.request.state):
            case ("runs", "waits") if self.request.grant == self.host.find().request.grants:
                return (*cell, "put-back")
            case ("runs", "waits"):
                is_lost = self.host.find().replica_id not in self.host.registered
                return (*cell, "grant of a lost replica" if is_lost else "grant")
            case ("runs", "runs") if self.request.started and not self.host.find().started:
                return (*cell, "first token")
        return cell

    @property
    def state(self) -> str:
        """All that determines what may follow."""
        scheduled, request = self.host.core.find("r1"), self.request
        here = scheduled and (scheduled.replica_id, scheduled.started, scheduled.request.grants)
        there = request.state, request.grant, request.started, self._repeats_end
        unread = (*self.up.messages[self.read_up :], *self.down.messages[self.read_down :])
        in_transit = [
            (type(each).__name__, getattr(each, "grant", None), getattr(each, "failure", None))
            for each in unread
        ]
        return repr((here, there, sorted(self.host.registered), in_transit))

    def actions(self) -> Iterator[str]:
        """Yield what may happen next."""
        if self.read_up < len(self.up.messages):
            yield "read up"
        if self.read_down < len(self.down.messages):
            yield "read down"
        if self.request.state == "runs":
            yield from ("begin", "finish")
            if self.request.grant < 3:
                yield from PUT_BACKS
        if self.request.state in ("waits", "runs"):
            yield "withdraw"
        if self._repeats_end:
            yield "acknowledge"
        if "s1" in self.host.registered:
            yield "lose s1"
        yield from ("cut", "replace")

    def do(self, action: str) -> None:
        request = self.request
        match action:
            case "read up":
                self._receive(self.up.messages[self.read_up])
                self.read_up += 1
            case "read down":
                message = self.down.messages[self.read_down]
                self.client.on_message(message)
                self.read_down += 1
                if isinstance(message, Granted) and request.state == "runs":
                    request.grant = max(request.grant, message.grant)
            case "begin":
                request.started = True
                self.client.first_token(request)
            case "finish":
                request.state, self._repeats_end = "ended", True
                self.client.finish(request, Outcome.COMPLETED)
            case "fail" | "yield":
                request.state = "waits"
                self.client.put_back(request, *PUT_BACKS[action])
            case "withdraw":
                request.state = "withdrawn"
                self.client.cancel(request)
            case "acknowledge":
                self.up.acknowledged = self.read_up
                self.client.on_heartbeat()
                self._repeats_end = self.read_up < len(self.up.messages)
            case "lose s1":
                self.host.registered.remove("s1")
                self.host.feed(ReplicaLost("s1"))
            case "replace":
                self._start_scheduler()
                self._reconnect()
            case "cut":
                self._reconnect()

    def _reconnect(self) -> None:
        """Lose what is in transit, and reconcile both ends by a snapshot, as the table says."""
        cell, before, issued = self.cell, len(self.host.events), len(self.host.dispatches)
        self.client.on_disconnected()
        self._connect()
        assert len(self.up.of(Finished)) == self._repeats_end
        assert all(each.age_s > 0.0 for each in (*self.up.of(Submit), *self.up.of(Running)))
        while self.read_up < len(self.up.messages):
            self.do("read up")
        events = self.host.events[before:]
        assert [type(each).__name__ for each in events] == TABLE[cell], cell
        granted = [each.dispatch for each in self.down.of(Granted)]
        # A lost grant is repeated and not decided again.
        assert granted == self.host.dispatches[-1 if cell[2:] == ("grant",) else issued :], cell
        if cell[2:] == ("put-back",):
            assert isinstance(events[0], DispatchFailed)
            assert (events[0].failure, events[0].message, events[0].generated_tokens) in PUT_BACKS.values()
        self.reconciled.append(cell)

    def settle(self) -> None:
        """Deliver all messages; both ends then agree, and the ledger with them."""
        while (action := next(self.actions())).startswith("read"):
            self.do(action)
        request = self.request
        assert self.here == (request.state if request.state in ("waits", "runs") else "unknown")
        assert sum(each.in_flight for each in self.host.core.ledger) == (request.state == "runs")
        if request.state == "runs":
            found = self.host.find()
            there = request.replica_id, request.grant, request.started
            assert (found.replica_id, found.request.grants, found.started) == there
        assert request.state == "withdrawn" or "Cancelled" not in self.host.names


async def test_both_ends_agree_after_the_loss_of_any_messages() -> None:
    reconciled = set[tuple[str, ...]]()
    for replicas in ((), ("s1",), ("s1", "s2")):
        histories, seen = deque[tuple[str, ...]]([()]), set[str]()
        while histories:
            history = histories.popleft()
            channel = Channel(replicas)
            for action in history:
                channel.do(action)
            reconciled.update(channel.reconciled)
            if channel.state in seen:
                continue
            seen.add(channel.state)
            if len(history) < MAX_ACTIONS:
                histories.extend((*history, action) for action in channel.actions())
            channel.settle()
    assert reconciled == TABLE.keys()


def connected(replicas: Sequence[str] = ("s1",)) -> FakeLiveScheduler:
    """Return a scheduler on which r1 waits, or runs on s1 by its first grant."""
    host = FakeLiveScheduler(replicas)
    host.connect(Submit(submission("r1"), 0.0))
    host.events.clear()
    return host


@pytest.mark.parametrize(
    ("replicas", "there", "events"),
    [
        ((), Running(submission("r1"), 0.0, 1, "s1", True), ["Cancelled", "Resumed"]),
        (("s1",), Running(submission("r1"), 0.0, 1, "s2", True), ["Cancelled", "Resumed"]),
        (("s1",), Running(submission("r1"), 0.0, 4, "s1", True), ["Cancelled", "Resumed"]),
        (("s1",), Submit(submission("r1"), 0.0, 1), ["Cancelled", "Arrived"]),
    ],
    ids=["waits and runs", "another replica", "another grant", "waits without a put-back"],
)
async def test_the_gateways_state_is_used_where_no_loss_explains_the_difference(
    replicas: tuple[str, ...], there: Message, events: list[str]
) -> None:
    host = connected(replicas)
    host.connect(there)
    assert host.names == events
    if isinstance(there, Running):
        found = host.find()
        state = found.replica_id, found.request.grants, found.started
        assert state == (there.replica_id, there.grants, True)


@pytest.mark.parametrize(
    ("put_back", "expected"),
    [
        (None, (118.0, 2, False, True)),
        (PutBack("r1", "s1", DispatchFailure.BUSY, "", 2, 0), (118.0, 2, False, True)),
        (PutBack("r1", "s1", DispatchFailure.LOST, "", 2, 0), (118.0, 2, True, True)),
        (PutBack("r1", "s1", DispatchFailure.LOST, "", 2, 7), (130.0, 2, True, True)),
        # It is not served first, because it has been served in part.
        (PutBack("r1", "s1", DispatchFailure.REVOKED, "", 2, 7), (130.0, 0, False, False)),
    ],
    ids=["no put-back", "busy", "lost", "lost after tokens", "revoked"],
)
async def test_a_request_arrives_at_a_new_scheduler_with_its_age_and_its_attempts(
    put_back: PutBack | None, expected: tuple[float, int, bool, bool]
) -> None:
    host = FakeLiveScheduler()
    host.connect(Submit(submission("r1", queue_timeout_s=30.0), 12.0, 2, put_back))
    found, request = host.find(), host.find().request
    assert (request.arrived_at, request.grants) == (88.0, 3)
    assert (request.expires_at, request.attempts, request.lost, found.attempts.returned) == expected


async def test_a_put_back_of_an_unknown_request_is_answered_and_does_not_hang() -> None:
    host = FakeLiveScheduler()
    link = host.connect()
    host.send(PutBack("r1", "s1", DispatchFailure.LOST, "", 1))
    assert [(rejection.request_id, rejection.conclusion.outcome) for rejection in link.of(Rejected)] == [
        ("r1", Outcome.FAILED)
    ]


async def test_a_put_back_of_an_earlier_grant_is_ignored_and_the_end_of_a_waiting_request_is_not() -> None:
    host = connected()
    host.send(PutBack("r1", "s1", DispatchFailure.LOST, "", 0))
    assert host.events == []
    host = connected(replicas=())
    host.send(Finished("r1", Outcome.COMPLETED, None))
    assert host.names == ["Cancelled"]


async def test_only_the_grant_on_the_replica_is_revoked() -> None:
    host = FakeLiveScheduler(("s1",))
    link = host.connect(Submit(submission("r1"), 0.0))
    for replica_id in ("s1", "s2"):
        host.sessions.revoke(Revoke(request_id="r1", gateway_id="g1", replica_id=replica_id))
    assert link.of(Revoked) == [Revoked("r1", 1)]


async def test_a_second_connection_is_not_ended_by_the_loss_of_the_first() -> None:
    host = FakeLiveScheduler()
    first = host.connect()
    host.connect()
    host.sessions.on_loss("g1", first, permanent=False)  # type: ignore[arg-type]
    assert host.sessions.connected_count == 1

"""The messages of the control channel.

A message is a msgpack array whose first element is its name; a frame holds an array of messages. The
order within one connection is kept.

`VERSION` rises with every release that changes the shape or the meaning of a message. A process speaks its
own version and the one before, so the parts of an application may be upgraded one by one, in any order:

- The scheduler's endpoint names the version that it speaks, `Hello` the one that the peer has chosen: the
  highest that both know. A connection keeps it to its end.
- Received messages need no translation, because messages only grow: new fields come last and have a default,
  which means "as before". Older readers skip unknown fields.
- Messages to a peer of the version before pass through `as_before`, which puts them as that version knew
  them. A new kind of message is left out, so nothing may depend on it.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from serve_app.core.commands import Dispatch
from serve_app.core.events import DispatchFailure
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.errors import ChannelError, Conclusion, Outcome
from serve_app.request import PriorityClass, Submission, Usage
from serve_app.serving.channel.scheduler_client import ReplicaAddress, RequestOutlook, RequestTimes

VERSION = 1
OLDEST_VERSION = 1
"""The version before `VERSION`, once there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerEndpoint:
    """Where a scheduler listens, and what it takes to be let in. Handed out by Ray alone.

    Attributes:
        secret: made anew by each incarnation, so that a leaked one ends with it.
        incarnation: rises with every scheduler that is started for the model.
        version: of the protocol.
    """

    host: str
    port: int
    secret: str
    incarnation: int
    version: int = VERSION


class Role(enum.StrEnum):
    """What a peer of the scheduler is."""

    GATEWAY = "gateway"
    REPLICA = "replica"


class Message(msgspec.Struct, frozen=True, array_like=True, tag=str.lower, gc=False):
    """Base of all messages; `gc=False` because none can be part of a reference cycle."""


# Either way.


class Heartbeat(Message, frozen=True):
    """The sender lives, and has dealt with the first `read` messages of this connection."""

    read: int


class GatewayPage(Message, frozen=True):
    """A gateway's own metrics: answer to `PageRequest`; from the scheduler, a part of that to `Scrape`.

    The pages of other gateways come before the scheduler's own, which is the last part.
    """

    serial: int
    text: str


# From a peer to the scheduler.


class Hello(Message, frozen=True):
    """The first message of every connection.

    Attributes:
        version: of the protocol, which both sides keep to on this connection.
        highest_incarnation: the highest that the peer has met.
    """

    version: int
    role: Role
    peer_id: str
    secret: str
    highest_incarnation: int


class Bye(Message, frozen=True):
    """The peer leaves on purpose: whatever it held may be released at once."""


class PutBack(Message, frozen=True):
    """Grant number `grant` came to nothing before the first byte; the request waits again."""

    request_id: str
    replica_id: str
    failure: DispatchFailure
    message: str
    grant: int


class Submit(Message, frozen=True):
    """A request waits. In a snapshot: with how it came to wait.

    Attributes:
        age_s: time since it came in.
        grants: how many grants for it the gateway has seen.
        put_back: how the last of them ended.
        client_request_id: the id that its client gave it; empty where the client knows it by ours.
    """

    submission: Submission
    age_s: float
    grants: int = 0
    put_back: PutBack | None = None
    client_request_id: str = ""


class Running(Message, frozen=True):
    """In a snapshot: it runs on a replica, by grant number `grants`; the client's id as in `Submit`."""

    submission: Submission
    age_s: float
    grants: int
    replica_id: str
    started: bool
    client_request_id: str = ""


class SnapshotEnd(Message, frozen=True):
    """All that the gateway holds has been said; from here on it says what changes."""


class First(Message, frozen=True):
    """The first byte of the answer has come."""

    request_id: str


class Finish(Message, frozen=True):
    """A granted request is over; `times` are for its receipt.

    Also said of a request that the scheduler has refused, or that was cancelled while it waited, and only for
    its receipt: the scheduler knows no such request any more.
    """

    request_id: str
    outcome: Outcome
    usage: Usage | None
    times: RequestTimes | None = None


class Cancel(Message, frozen=True):
    """Nobody waits for the request any more."""

    request_id: str


class Watch(Message, frozen=True):
    """Tell how a waiting request stands in the queue, until it is granted or refused."""

    request_id: str


class Scrape(Message, frozen=True):
    """Ask for the scheduler's metrics."""

    serial: int


class Question(Message, frozen=True):
    """Ask something about the scheduler for an admin; see `scheduler.questions`.

    Attributes:
        arguments: a JSON object.
    """

    serial: int
    name: str
    arguments: bytes


class Register(Message, frozen=True):
    """A replica is ready, or ready again; its address is what gateways are told."""

    spec: ReplicaSpec
    address: ReplicaAddress


class Report(Message, frozen=True):
    """What a replica says of its load."""

    report: ReplicaReport


class EngineFailed(Message, frozen=True):
    """A registered replica's engine does not answer: nothing may be sent there until it registers again."""

    reason: str


# From the scheduler to a peer.


class Welcome(Message, frozen=True):
    """The peer is let in; `queue_timeouts_s` are the defaults by class."""

    incarnation: int
    queue_timeouts_s: dict[PriorityClass, float]


class Rejected(Message, frozen=True):
    """The peer is not let in; the connection ends."""

    reason: str


class ReplicaEntry(Message, frozen=True):
    """One line of the replica table.

    Attributes:
        open: it takes new requests: it has reported lately, and does not drain.
        adapters: names of the LoRA adapters that its engine lists.
    """

    address: ReplicaAddress
    open: bool
    adapters: tuple[str, ...] = ()


class ReplicaTable(Message, frozen=True):
    """All replicas as they stand now; replaces what was said before."""

    entries: list[ReplicaEntry]


class Granted(Message, frozen=True):
    """Grant number `grant` of a request; the address of the replica stands in the table."""

    grant: int
    dispatch: Dispatch


class Refused(Message, frozen=True):
    """The scheduler ended a waiting request."""

    request_id: str
    conclusion: Conclusion


class Outlooks(Message, frozen=True):
    """How requests stand in the queue that the gateway watches; only those of which there is news."""

    entries: list[RequestOutlook]


class Exposition(Message, frozen=True):
    """Answer to `Scrape`."""

    serial: int
    text: str


class Answer(Message, frozen=True):
    """A part of the answer to `Question`, which is JSON.

    Attributes:
        is_last: no part follows.
        error: why there is no answer; empty where there is one.
    """

    serial: int
    part: bytes
    is_last: bool
    error: str = ""


class PageRequest(Message, frozen=True):
    """Ask a gateway for its own metrics."""

    serial: int


FromGateway = (
    Submit
    | PutBack
    | Running
    | SnapshotEnd
    | First
    | Finish
    | Cancel
    | Watch
    | Scrape
    | GatewayPage
    | Question
)
FromReplica = Register | Report | EngineFailed
FromPeer = Heartbeat | Hello | Bye | FromGateway | FromReplica
ToGateway = ReplicaTable | Granted | Refused | Outlooks | Exposition | GatewayPage | PageRequest | Answer
FromScheduler = Heartbeat | Welcome | Rejected | ToGateway

_AS_BEFORE: Mapping[type[Message], Callable[[Any], Message | None]] = {}
"""Messages that the version before `VERSION` knew differently; empty before the second release."""


def common_version(theirs: int) -> int:
    """Return the version to speak with a scheduler whose own is `theirs`.

    Raises:
        ChannelError: there is none.
    """
    if theirs < OLDEST_VERSION:
        raise ChannelError(
            f"the scheduler speaks version {theirs} of the protocol, this peer {OLDEST_VERSION} to "
            f"{VERSION}: upgrade by one version at a time"
        )
    return min(theirs, VERSION)


def as_before(message: Message) -> Message | None:
    """Return the message as the version before knew it; None where it had none for that."""
    change = _AS_BEFORE.get(type(message))
    return message if change is None else change(message)

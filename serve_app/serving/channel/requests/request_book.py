"""The scheduler's book of requests: which gateway holds each, and by which grant it runs."""

import asyncio
import math
from collections import Counter
from dataclasses import dataclass
from typing import Self

from serve_app.errors import ChannelError
from serve_app.request import PriorityClass, Request, Usage
from serve_app.scheduling.events import DispatchFailure
from serve_app.serving.channel.link import Link
from serve_app.serving.channel.messages import Granted, Message, Running, Submit
from serve_app.serving.channel.scheduler_client import RequestTimes


@dataclass(slots=True, eq=False)
class GatewaySession:
    """One gateway.

    Attributes:
        link: None while it is away.
        mentioned: requests named in its snapshot so far; None once the snapshot is complete.
        release: will give its requests up, unless it comes back.
        lost: it has not come back in time, and is kept for what it may still have running.
    """

    gateway_id: str
    link: Link | None = None
    mentioned: set[str] | None = None
    release: asyncio.TimerHandle | None = None
    lost: bool = False

    def tell(self, message: Message) -> None:
        """Send the message, unless the gateway is away: its next snapshot will show what it missed."""
        if self.link is not None:
            self.link.send(message)

    def mention(self, request_id: str) -> None:
        """Note that the snapshot, if one is being read, names the request."""
        if self.mentioned is not None:
            self.mentioned.add(request_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """A request that ended in an engine.

    Attributes:
        model: the name that its client used.
        usage: as the engine counted it; None when it did not say.
    """

    key_id: str
    model: str
    usage: Usage | None


@dataclass(slots=True, eq=False)
class GatewayRequest:
    """One request.

    Attributes:
        grants: how many have been issued for it.
        granted: the one that this scheduler issued and that it runs by.
        replica_id: where it runs; None while it waits.
        started: its answer has begun.
        granted_at: when it was granted, or found to run.
        key_id: of its API key; empty when it came with none.
        model: the name that its client used.
        tenant: who is charged for it.
        usage: what the engine counted, once it is over.
        arrived_at: on the scheduler's clock.
        times: what its gateway tells for its receipt, once it is over.
        client_request_id: the id that its client gave it; empty where it gave none.
    """

    gateway: GatewaySession
    priority: PriorityClass
    grants: int
    granted: Granted | None = None
    replica_id: str | None = None
    started: bool = False
    granted_at: float = 0.0
    key_id: str = ""
    model: str = ""
    tenant: str = ""
    usage: Usage | None = None
    arrived_at: float = 0.0
    times: RequestTimes | None = None
    client_request_id: str = ""

    @classmethod
    def of(cls, gateway: GatewaySession, message: Submit | Running) -> Self:
        """The record of a request that a gateway tells of."""
        submission = message.submission
        key_id = submission.key.key_id if submission.key is not None else ""
        record = cls(gateway, submission.priority, message.grants, key_id=key_id, model=submission.spec.model)
        record.tenant, record.client_request_id = submission.tenant, message.client_request_id
        return record

    def ended(self) -> EndedRequest | None:
        """Its line for the ledger of usage; None when it came with no key, or ended before it ran."""
        if not self.key_id or not self.runs:
            return None
        return EndedRequest(key_id=self.key_id, model=self.model, usage=self.usage)

    @property
    def runs(self) -> bool:
        """Whether it has a grant."""
        return self.replica_id is not None

    def wait(self) -> str:
        """Take the grant back; return the replica that it was for."""
        replica_id = self.replica_id
        assert replica_id is not None, "only a running request waits again"
        self.granted, self.replica_id, self.started = None, None, False
        return replica_id


class RequestBook(dict[str, GatewayRequest]):
    """Records by request id."""

    def __repr__(self) -> str:
        running = sum(record.runs for record in self.values())
        return f"<RequestBook waiting {len(self) - running}, running {running}>"

    def own(self, gateway: GatewaySession, request_id: str) -> GatewayRequest | None:
        """Return a gateway's own request, None when it is unknown or another's."""
        record = self.get(request_id)
        return record if record is not None and record.gateway is gateway else None

    def ids_of(self, gateway: GatewaySession) -> list[str]:
        """All requests of one gateway."""
        return [request_id for request_id, record in self.items() if record.gateway is gateway]

    def waiting(self) -> Counter[PriorityClass]:
        """How many wait, by class."""
        return Counter(record.priority for record in self.values() if not record.runs)

    def in_flight(self) -> Counter[str]:
        """How many run, by replica."""
        return Counter(record.replica_id for record in self.values() if record.replica_id is not None)


def as_request(gateway_id: str, message: Submit | Running, now: float, default_timeout_s: float) -> Request:
    """Put a submission on the scheduler's clock.

    Raises:
        ChannelError: its age is no time.
    """
    submission, age_s = message.submission, message.age_s
    waits = isinstance(message, Submit)
    if not 0 <= age_s < math.inf:
        raise ChannelError(f"a request cannot be {age_s} s old")
    put_back = message.put_back if isinstance(message, Submit) else None
    timeout_s = default_timeout_s if submission.queue_timeout_s is None else submission.queue_timeout_s
    return Request(
        submission=submission,
        gateway_id=gateway_id,
        arrived_at=now - age_s,
        # From its arrival, however often it was dispatched meanwhile.
        expires_at=now - age_s + timeout_s,
        # The dispatch that it runs by is not one before this.
        attempts=message.grants if waits else max(0, message.grants - 1),
        lost=put_back is not None and put_back.failure is DispatchFailure.LOST,
    )

"""Responses that engines store: their names, a look-up of the replicas that hold them, and background work.

A name contains a digest of its tenant and replica, so every gateway finds the replica without shared state.
Names that engines choose themselves are remembered by the gateway that saw them.

In background work, engines continue a response after its request has been answered. Only the response itself
shows when it ends, so the gateway polls it. Until then the request holds its capacity on the replica. Two
things are unknown:

- the time of its first token;
- its remaining work once the gateway that forwarded the request has ended. The request is then no longer
  counted, but the engine's reports still include its load.
"""

import asyncio
import contextvars
import logging
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable
from hashlib import blake2b

import msgspec

from serve_app.errors import Outcome
from serve_app.request import Usage
from serve_app.serving.channel.scheduler_client import ReplicaAddress
from serve_app.serving.gateway.answer.stream import usage_of
from serve_app.serving.gateway.request.fields import engine_head
from serve_app.serving.gateway.upstream import UpstreamError, UpstreamPool

# The holder's digest, the chain of responses that continue each other, and the response.
_OURS = re.compile(r"resp_([0-9a-f]{16})([0-9a-f]{12})[0-9a-f]{12}")
_RANDOM_BYTES = 6
# About 200 bytes each.
_MAX_REMEMBERED = 10_000

_DATA = re.compile(rb"^data:\s*(.+?)\s*$", re.MULTILINE)


class AnsweredResponse(msgspec.Struct):
    """Head of a response object in an answer; `status` is such as `queued`, or empty if absent."""

    id: str = ""
    status: str = ""

    @property
    def is_running(self) -> bool:
        """True if the engine has not finished it."""
        return self.status in ("queued", "in_progress")


class _AnnouncingEvent(msgspec.Struct):
    response: AnsweredResponse | None = None


_whole = msgspec.json.Decoder(AnsweredResponse)


_event = msgspec.json.Decoder(_AnnouncingEvent)


class ResponseHolders:
    """Names of responses, and a look-up of the replicas that store them."""

    def __init__(self) -> None:
        # Owner, replica and chain.
        self._remembered: OrderedDict[str, tuple[str, str, str]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ResponseHolders remembered={len(self._remembered)}>"

    def name(self, owner: str, replica: ReplicaAddress, previous: str | None = None) -> str:
        """Return a name for a new response on a replica, to which only `owner` may refer.

        The names of a chain share a part, by which every gateway recognizes the chain.
        """
        ours = _OURS.fullmatch(previous or "")
        chain = ours[2] if ours is not None else secrets.token_hex(_RANDOM_BYTES)
        return f"resp_{_digest(owner, replica.replica_id)}{chain}{secrets.token_hex(_RANDOM_BYTES)}"

    def chain(self, response_id: str) -> str:
        """Return an id that a response shares with those that it continues, as far as they are known."""
        ours = _OURS.fullmatch(response_id)
        return ours[2] if ours is not None else self._remembered.get(response_id, ("", "", response_id))[2]

    def remember(self, response_id: str, owner: str, replica_id: str, previous: str | None = None) -> None:
        """Record a response that was named by its engine."""
        self._remembered[response_id] = owner, replica_id, self.chain(previous or response_id)
        self._remembered.move_to_end(response_id)
        while len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)

    def find(self, response_id: str, owner: str, replicas: Iterable[ReplicaAddress]) -> ReplicaAddress | None:
        """Return the replica that stores a response of this tenant; None if there is none."""
        remembered = self._remembered.get(response_id)
        if remembered is not None:
            whose, replica_id, _ = remembered
            return next((each for each in replicas if each.replica_id == replica_id and whose == owner), None)
        ours = _OURS.fullmatch(response_id)
        if ours is None:
            return None
        return next((each for each in replicas if _digest(owner, each.replica_id) == ours[1]), None)


def answered_response(body: bytes) -> AnsweredResponse:
    """Parse a complete answer as a response; the id is empty if it is something else."""
    try:
        return _whole.decode(body)
    except (ValueError, RecursionError):
        return AnsweredResponse()


def announced_response(events: bytes) -> AnsweredResponse:
    """Parse the response that the first events of a stream announce; the id is empty if there is none."""
    found = _DATA.search(events)
    try:
        event = _event.decode(found[1]) if found is not None else _AnnouncingEvent()
    except (ValueError, RecursionError):
        event = _AnnouncingEvent()
    return event.response or AnsweredResponse()


def _digest(owner: str, replica_id: str) -> str:
    both = b"".join(len(part).to_bytes(4, "big") + part for part in (owner.encode(), replica_id.encode()))
    return blake2b(both, digest_size=8, person=b"response holder").hexdigest()


class StoredResponse:
    """A response that its engine will store, and the conditions under which it does.

    Args:
        owner: tenant that owns the response.
        is_named: the client chose an id, which is replaced because it might be another tenant's.

    Attributes:
        previous: id of the response that it continues; None if there is none.
        is_background: the engine continues after its answer, or after a disconnect.
        response_id: empty until known.
        is_running: the engine works on it in the background.
    """

    __slots__ = (
        "_holders",
        "_is_named",
        "_replica",
        "is_background",
        "is_running",
        "owner",
        "previous",
        "response_id",
    )

    def __init__(
        self,
        holders: ResponseHolders,
        owner: str,
        *,
        previous: str | None = None,
        is_background: bool = False,
        is_named: bool = False,
    ) -> None:
        self.owner = owner
        self.previous = previous
        self.is_background = is_background
        self._is_named = is_named
        self._holders = holders
        self._replica: ReplicaAddress | None = None
        self.response_id = ""
        self.is_running = False

    def name(self, replica: ReplicaAddress) -> str | None:
        """Return the name for the response on a replica; None if the engine chooses it."""
        self._replica = replica
        self.response_id = ""
        if not (replica.names_responses or self._is_named):
            return None
        self.response_id = self._holders.name(self.owner, replica, self.previous)
        return self.response_id

    def on_answer(self, body: bytes) -> None:
        """Parse a non-streamed answer."""
        if self.is_background or self._may_be_named_otherwise:
            self._note(answered_response(body))

    def on_first_events(self, events: bytes) -> None:
        """Parse the first events of a streamed answer."""
        if self.is_background or self._may_be_named_otherwise:
            self._note(announced_response(events))

    @property
    def _may_be_named_otherwise(self) -> bool:
        return self._replica is not None and not self._replica.names_responses

    def _note(self, response: AnsweredResponse) -> None:
        if not response.id:
            return
        assert self._replica is not None, "name() was called"
        if response.id != self.response_id:
            self._holders.remember(response.id, self.owner, self._replica.replica_id, self.previous)
        # The engine may have chosen another name.
        self.response_id = response.id
        self.is_running = self.is_background and response.is_running


logger = logging.getLogger("ray.serve")

# A look-up in a table for an engine, about as expensive as a scrape of its metrics.
_EVERY_S = 1.0
_MAX_FAILURES = 5
_OUTCOMES = {
    "completed": Outcome.COMPLETED,
    "incomplete": Outcome.COMPLETED,
    "cancelled": Outcome.CANCELLED,
}

OnEnd = Callable[[Outcome, Usage | None, str], None]
"""Called with the outcome, the usage and a detail for the log."""


class BackgroundWork:
    """Poller of background responses until their engines finish them."""

    def __init__(self, upstream: UpstreamPool, every_s: float = _EVERY_S) -> None:
        self._upstream = upstream
        self._every_s = every_s
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<BackgroundWork {len(self._tasks)}>"

    def follow(self, response_id: str, replica: ReplicaAddress, on_end: OnEnd) -> None:
        """Poll a response until it ends, then call `on_end`."""
        loop = asyncio.get_running_loop()
        # In an empty context, because Serve cancels the tasks of a request's context.
        task = loop.create_task(
            self._follow(response_id, replica, on_end),
            name=f"background {response_id}",
            context=contextvars.Context(),
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Stop polling; the capacity of unfinished responses is not released here."""
        for task in tuple(self._tasks):
            task.cancel()

    async def _follow(self, response_id: str, replica: ReplicaAddress, on_end: OnEnd) -> None:
        try:
            end = await self._end_of(response_id, replica)
        except Exception as error:
            # Release the capacity on any error.
            logger.exception("event=background_error response=%r", response_id)
            end = Outcome.FAILED, None, f"in the background: {error!r}"
        on_end(*end)

    async def _end_of(self, response_id: str, replica: ReplicaAddress) -> tuple[Outcome, Usage | None, str]:
        failures, why = 0, ""
        while failures < _MAX_FAILURES:
            await asyncio.sleep(self._every_s)
            try:
                head = engine_head(replica, f"/v1/responses/{response_id}")
                answer, body = await self._upstream.fetch(replica.server, head)
            except UpstreamError as error:
                failures, why = failures + 1, str(error)
                continue
            status = answer.status
            response = answered_response(body) if status == 200 else AnsweredResponse()
            if response.is_running:
                failures = 0
            elif response.status in _OUTCOMES:
                return _OUTCOMES[response.status], usage_of(body), f"in the background: {response.status}"
            elif status == 404 or response.status:
                why = f"the engine answered {status} {response.status}"
                break
            else:
                failures, why = failures + 1, f"the engine answered {status}"
        return Outcome.FAILED, None, f"in the background: {why}"

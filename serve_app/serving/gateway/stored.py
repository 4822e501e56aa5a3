"""Stored responses: requests that refer to one are sent to the replica that has it, or rejected.

Names of stored responses, and a look-up of the replicas that hold them.

A name contains a digest of its tenant and replica, so every gateway finds the replica without shared state.
Names that engines choose themselves are remembered by the gateway that saw them.

Background work: engines continue a response after its request has been answered.

Only the response itself shows when it ends, so the gateway polls it. Until then the request holds its
capacity on the replica. Two things are unknown:

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from urllib.parse import parse_qsl, urlencode

import msgspec

from serve_app.core.events import DispatchFailure
from serve_app.errors import Outcome
from serve_app.request import ProgramHint, Usage
from serve_app.serving.channel.scheduler_client import ReplicaAddress, SchedulerClient
from serve_app.serving.gateway.answer.responses import EngineTimedOut, RequestRejected, failure_of, send_body
from serve_app.serving.gateway.answer.stream import usage_of
from serve_app.serving.gateway.keys import Caller
from serve_app.serving.gateway.models import ServedModels
from serve_app.serving.gateway.request.fields import engine_head, response_headers, upstream_head
from serve_app.serving.gateway.request.incoming import IncomingRequest, ResponseTerms
from serve_app.serving.gateway.request.reader import RequestReader
from serve_app.serving.gateway.router import HttpRoute
from serve_app.serving.gateway.upstream import (
    EngineSilentError,
    UpstreamError,
    UpstreamPool,
    UpstreamResponse,
)

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


class EngineResponse:
    """State of a response that its engine will store.

    Its id is empty until known; while `is_running`, the engine works on it in the background.
    """

    __slots__ = ("_holders", "_replica", "_terms", "is_running", "response_id")

    def __init__(self, terms: ResponseTerms, holders: ResponseHolders) -> None:
        self._terms = terms
        self._holders = holders
        self._replica: ReplicaAddress | None = None
        self.response_id = ""
        self.is_running = False

    def name(self, replica: ReplicaAddress) -> str | None:
        """Return the name for the response on a replica; None if the engine chooses it."""
        self._replica = replica
        self.response_id = ""
        if not (replica.names_responses or self._terms.is_named):
            return None
        self.response_id = self._holders.name(self._terms.owner, replica, self._terms.previous)
        return self.response_id

    def on_answer(self, body: bytes) -> None:
        """Parse a non-streamed answer."""
        if self._terms.background or self._may_be_named_otherwise:
            self._note(answered_response(body))

    def on_first_events(self, events: bytes) -> None:
        """Parse the first events of a streamed answer."""
        if self._terms.background or self._may_be_named_otherwise:
            self._note(announced_response(events))

    @property
    def _may_be_named_otherwise(self) -> bool:
        return self._replica is not None and not self._replica.names_responses

    def _note(self, response: AnsweredResponse) -> None:
        if not response.id:
            return
        assert self._replica is not None, "name() was called"
        if response.id != self.response_id:
            terms = self._terms
            self._holders.remember(response.id, terms.owner, self._replica.replica_id, terms.previous)
        # The engine may have chosen another name.
        self.response_id = response.id
        self.is_running = self._terms.background and response.is_running


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

    def __len__(self) -> int:
        """Return the number of responses that are polled."""
        return len(self._tasks)

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
                status, body = await self._fetch(response_id, replica)
            except UpstreamError as error:
                failures, why = failures + 1, str(error)
                continue
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

    async def _fetch(self, response_id: str, replica: ReplicaAddress) -> tuple[int, bytes]:
        head = engine_head(replica, f"/v1/responses/{response_id}")
        response = await self._upstream.send(replica.server, head, b"")
        try:
            return response.status, await response.read()
        finally:
            response.close()


RESPONSES_PATH = "/v1/responses"
# Method and summary by path.
STORED_PATHS: Mapping[str, tuple[str, str]] = {
    RESPONSES_PATH + "/{response_id}": ("GET", "stored response, or its events with `stream=true`"),
    RESPONSES_PATH + "/{response_id}/cancel": ("POST", "cancelled background response"),
}

# Two endpoints of OpenAI, which vLLM lacks, have the form of an id.
_RESPONSE_ID = r"(?!(?:compact|input_tokens)$)[A-Za-z0-9_.:-]{1,200}"
_RETRY_AFTER_S = 1.0
_EVENT_STREAM = b"text/event-stream"


class StoredResponses:
    """Routing of requests to the replicas that store responses."""

    def __init__(
        self,
        upstream: UpstreamPool,
        schedulers: Mapping[str, SchedulerClient],
        models: ServedModels,
        reader: RequestReader,
        holders: ResponseHolders,
    ) -> None:
        self._upstream = upstream
        self._schedulers = schedulers
        self._models = models
        self._reader = reader
        self._holders = holders

    def routes(self) -> Iterator[HttpRoute]:
        """Yield the routes of stored responses."""
        for path, (method, summary) in STORED_PATHS.items():
            yield HttpRoute(method, path, self._serve, summary, _RESPONSE_ID)

    def bind(self, request: IncomingRequest) -> None:
        """Bind a request that continues an earlier response to the replica that stores it.

        Raises:
            RequestRejected: no replica stores the response for this tenant.
        """
        terms = request.response_terms
        if terms is None or terms.previous is None:
            return
        # A replica belongs to one scheduler; the names of a model share one.
        holders = {
            replica: submission
            for submission in reversed((request.submission, *request.fallbacks))
            for replica in self._schedulers[submission.spec.model].all_replicas()
        }
        replica = self._holder(terms.previous, terms.owner, holders, param="previous_response_id")
        submission = holders[replica]
        program = submission.program or ProgramHint(session=self._holders.chain(terms.previous))
        bound = msgspec.structs.replace(submission, bound_to=replica.replica_id, program=program)
        request.submission, request.fallbacks = bound, ()

    async def _serve(self, incoming: IncomingRequest, response_id: str) -> None:
        """Forward the retrieval or cancellation of a response.

        Raises:
            RequestRejected: no replica stores it for this tenant, or the replica does not answer.
        """
        caller = self._reader.authenticate(incoming)
        owner = self._reader.owner(incoming, caller)
        held = await self._reader.body(incoming)
        held.release()
        replica = self._holder(response_id, owner, self._replicas(caller), param="response_id")
        with incoming.watch():
            await self._forward(replica, incoming)

    def _replicas(self, caller: Caller) -> list[ReplicaAddress]:
        # Names and adapters of a model share a scheduler, and a key may allow only one of them.
        schedulers = {
            id(model.scheduler): model.scheduler
            for name in self._models.usable(caller)
            for model in name.models
        }
        return [replica for client in schedulers.values() for replica in client.all_replicas()]

    def _holder(
        self, response_id: str, owner: str, replicas: Iterable[ReplicaAddress], *, param: str
    ) -> ReplicaAddress:
        known = tuple(replicas)
        found = self._holders.find(response_id, owner, known)
        if found is not None:
            return found
        if not known:
            raise RequestRejected(
                Outcome.REJECTED_NO_REPLICA,
                "no replica is connected yet: retry later",
                retry_after_s=_RETRY_AFTER_S,
            )
        raise RequestRejected(
            Outcome.REJECTED_UNKNOWN_RESPONSE,
            f"Response with id '{response_id[:200]}' not found: it was never stored, belongs to another "
            "tenant, or was lost with its replica. Send the whole conversation instead",
            param=param,
        )

    async def _forward(self, replica: ReplicaAddress, incoming: IncomingRequest) -> None:
        path, forwarded = incoming.path + _query(incoming), self._reader.forwarded(incoming)
        head = upstream_head(incoming.engine_method, path, incoming.request_id, forwarded, replica, 0)
        try:
            response = await self._upstream.send(replica.server, head, b"")
            try:
                await _answer(response, incoming, replica)
            finally:
                response.close()
        except EngineSilentError as error:
            raise EngineTimedOut(f"the engine did not answer in time: {error}") from error
        except UpstreamError as error:
            raise RequestRejected(
                Outcome.REJECTED_NO_REPLICA,
                f"the replica that stores this response does not respond: retry later ({error})",
                retry_after_s=_RETRY_AFTER_S,
            ) from error


async def _answer(response: UpstreamResponse, incoming: IncomingRequest, replica: ReplicaAddress) -> None:
    named = (b"x-replica", replica.replica_id.encode("latin-1", "replace"))
    headers = [*response_headers(response.headers), *incoming.id_headers, named]
    if response.header(b"content-type").startswith(_EVENT_STREAM):
        await _stream(response, incoming, headers)
        return
    body = await response.read()
    failure = failure_of(response.status, response.headers, body)
    if failure is not None and failure.failure is not DispatchFailure.TOO_LONG:
        raise failure
    headers, body = incoming.api.engine_answer(response.status, incoming.path, headers, body)
    await send_body(incoming.send, response.status, headers, body)


async def _stream(
    response: UpstreamResponse, incoming: IncomingRequest, headers: list[tuple[bytes, bytes]]
) -> None:
    start = {"type": "http.response.start", "status": response.status, "headers": headers}
    events = await response.next()
    await incoming.send(start)
    while not response.at_end:
        await incoming.send({"type": "http.response.body", "body": events, "more_body": True})
        try:
            events = await response.next()
        except UpstreamError as error:
            message = f"the engine failed during these events: retrieve the response again ({error})"
            events = incoming.api.error_event(RequestRejected(Outcome.FAILED, message))
            break
    await incoming.send({"type": "http.response.body", "body": events, "more_body": False})


def _query(incoming: IncomingRequest) -> str:
    """Return the re-encoded query with its question mark; empty if there is none."""
    written = incoming.exchange.query.decode("latin-1")
    query = urlencode(parse_qsl(written, keep_blank_values=True))
    return f"?{query}" if query else ""

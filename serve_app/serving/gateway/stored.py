"""Stored responses: requests that refer to one are sent to the replica that has it, or rejected."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import parse_qsl, urlencode

import msgspec

from serve_app.core.events import DispatchFailure
from serve_app.errors import Outcome
from serve_app.request import ProgramHint
from serve_app.serving.channel.scheduler_client import ReplicaAddress, SchedulerClient
from serve_app.serving.gateway.answer.responses import EngineTimedOut, RequestRejected, failure_of
from serve_app.serving.gateway.answer.stored import ResponseHolders
from serve_app.serving.gateway.keys import Caller
from serve_app.serving.gateway.models import ServedModels
from serve_app.serving.gateway.path import Request
from serve_app.serving.gateway.request.fields import response_headers, upstream_head
from serve_app.serving.gateway.request.reader import RequestReader
from serve_app.serving.gateway.router import HttpRoute
from serve_app.serving.gateway.upstream import (
    EngineSilentError,
    UpstreamError,
    UpstreamPool,
    UpstreamResponse,
)

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

    def bind(self, request: Request) -> None:
        """Bind a request that continues an earlier response to the replica that stores it.

        Raises:
            RequestRejected: no replica stores the response for this tenant.
        """
        stored, fallbacks = request.stored, request.fallbacks
        if stored is None or stored.previous is None:
            return
        others = () if fallbacks is None else fallbacks.remaining
        # A replica belongs to one scheduler; the names of a model share one.
        holders = {
            replica: submission
            for submission in reversed((request.submission, *others))
            for replica in self._schedulers[submission.spec.model].all_replicas()
        }
        replica = self._holder(stored.previous, stored.owner, holders, param="previous_response_id")
        submission = holders[replica]
        program = submission.program or ProgramHint(session=self._holders.chain(stored.previous))
        request.submission = msgspec.structs.replace(submission, bound_to=replica.replica_id, program=program)
        if fallbacks is not None:
            fallbacks.remaining.clear()

    async def _serve(self, request: Request, response_id: str) -> None:
        """Forward the retrieval or cancellation of a response.

        Raises:
            RequestRejected: no replica stores it for this tenant, or the replica does not answer.
        """
        caller = self._reader.authenticate(request)
        owner = self._reader.owner(request, caller)
        held = await self._reader.body(request)
        held.release()
        replica = self._holder(response_id, owner, self._replicas(caller), param="response_id")
        with request.watch():
            await self._forward(replica, request)

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

    async def _forward(self, replica: ReplicaAddress, request: Request) -> None:
        path, forwarded = request.path + _query(request), self._reader.forwarded(request)
        head = upstream_head(request.engine_method, path, request.request_id, forwarded, replica, 0)
        try:
            with contextlib.closing(await self._upstream.send(replica.server, head, b"")) as response:
                await _answer(response, request, replica)
        except EngineSilentError as error:
            raise EngineTimedOut(error) from error
        except UpstreamError as error:
            raise RequestRejected(
                Outcome.REJECTED_NO_REPLICA,
                f"the replica that stores this response does not respond: retry later ({error})",
                retry_after_s=_RETRY_AFTER_S,
            ) from error


async def _answer(response: UpstreamResponse, request: Request, replica: ReplicaAddress) -> None:
    named = (b"x-replica", replica.replica_id.encode("latin-1", "replace"))
    headers = [*response_headers(response.headers), named]
    if response.header(b"content-type").startswith(_EVENT_STREAM):
        await _stream(response, request, headers)
        return
    body = await response.read()
    failure = failure_of(response.status, response.headers, body)
    if failure is not None and failure.failure is not DispatchFailure.TOO_LONG:
        raise failure
    headers, body = request.api.engine_answer(response.status, request.path, headers, body)
    request.respond(response.status, headers, body)


async def _stream(response: UpstreamResponse, request: Request, headers: list[tuple[bytes, bytes]]) -> None:
    events = await response.next()
    request.exchange.start_response(response.status, headers, request.id_lines)
    while not response.at_end:
        await request.write(events)
        try:
            events = await response.next()
        except UpstreamError as error:
            message = f"the engine failed during these events: retrieve the response again ({error})"
            events = request.api.error_event(RequestRejected(Outcome.FAILED, message))
            break
    await request.write(events, ends=True)


def _query(request: Request) -> str:
    """Return the re-encoded query with its question mark; empty if there is none."""
    written = request.exchange.query.decode("latin-1")
    query = urlencode(parse_qsl(written, keep_blank_values=True))
    return f"?{query}" if query else ""

"""Requests that refer to a response that some replica keeps: they go to that replica, or are refused."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from urllib.parse import parse_qsl, urlencode

import msgspec

from serve_app.errors import Outcome
from serve_app.scheduling.events import DispatchFailure
from serve_app.serving.channel.scheduler_client import ReplicaAddress, SchedulerClient
from serve_app.serving.gateway.answer.engine_answer import failure_of
from serve_app.serving.gateway.answer.responses import EngineTimedOut, RequestRefused, send_body
from serve_app.serving.gateway.keys import Caller
from serve_app.serving.gateway.request.headers import returned, upstream_head
from serve_app.serving.gateway.request.incoming import ForwardJob, IncomingRequest
from serve_app.serving.gateway.request.reader import RequestReader
from serve_app.serving.gateway.stored.holders import ResponseHolders
from serve_app.serving.gateway.upstream.pool import UpstreamPool
from serve_app.serving.gateway.upstream.response import EngineSilentError, UpstreamError, UpstreamResponse

RESPONSES_PATH = "/v1/responses"
# What they are called in descriptions: method and summary.
STORED_PATHS: Mapping[str, tuple[str, str]] = {
    RESPONSES_PATH + "/{response_id}": ("GET", "a response that was kept, or with `stream=true` its events"),
    RESPONSES_PATH + "/{response_id}/cancel": ("POST", "the end of a response in the background"),
}

_PATH = re.compile(re.escape(RESPONSES_PATH) + r"/([A-Za-z0-9_.:-]{1,200})(/cancel)?")
_RETRY_AFTER_S = 1.0
_EVENT_STREAM = b"text/event-stream"


def method_of(path: str) -> str | None:
    """The method of a path of this kind; None for every other path."""
    found = _PATH.fullmatch(path)
    return None if found is None else "POST" if found[2] else "GET"


class StoredResponses:
    """Finds the replica that keeps a response, and asks it.

    Args:
        schedulers: of each model, by name.
    """

    def __init__(
        self,
        upstream: UpstreamPool,
        schedulers: Mapping[str, SchedulerClient],
        reader: RequestReader,
        holders: ResponseHolders,
    ) -> None:
        self._upstream = upstream
        self._schedulers = schedulers
        self._reader = reader
        self._holders = holders

    def bound(self, job: ForwardJob) -> ForwardJob:
        """A job that goes on from an earlier response, bound to the replica that keeps it; others unchanged.

        Raises:
            RequestRefused: no replica keeps the response for this tenant.
        """
        if job.response is None or job.response.previous is None:
            return job
        scheduler = self._schedulers[job.submission.spec.model]
        param = "previous_response_id"
        replica = self._holder(
            job.response.previous, job.response.owner, scheduler.all_replicas(), param=param
        )
        return msgspec.structs.replace(job, submission=replace(job.submission, bound_to=replica.replica_id))

    async def serve(self, incoming: IncomingRequest) -> None:
        """Ask for a response, its events or its end.

        Raises:
            RequestRefused: no replica keeps it for this tenant, or that one does not answer.
        """
        caller = self._reader.authenticate(incoming)
        owner = self._reader.owner(incoming, caller)
        found = _PATH.fullmatch(incoming.path)
        assert found is not None, "the router looks at the path"
        held = await self._reader.body(incoming)
        held.release()
        replica = self._holder(found[1], owner, self._replicas(caller), param="response_id")
        with incoming.watch():
            await self._pass_on(replica, incoming)

    def _replicas(self, caller: Caller) -> list[ReplicaAddress]:
        # Names of one model share a scheduler, and its adapters, too: a key may be for one of those alone.
        schedulers = {
            id(client): client
            for name, client in self._schedulers.items()
            if any(caller.may_use(each) for each in (name, *client.adapters()))
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
            raise RequestRefused(
                Outcome.REJECTED_NO_REPLICA,
                "no replica is known yet, so none can be asked for this response: try again",
                retry_after_s=_RETRY_AFTER_S,
            )
        raise RequestRefused(
            Outcome.REJECTED_UNKNOWN_RESPONSE,
            f"Response with id '{response_id[:200]}' not found: it was never kept, or is another tenant's, "
            "or the replica that kept it is gone. Send the whole conversation instead",
            param=param,
        )

    async def _pass_on(self, replica: ReplicaAddress, incoming: IncomingRequest) -> None:
        asked = msgspec.structs.replace(incoming, path=incoming.path + _query(incoming))
        head = upstream_head(asked, self._reader.forwarded(incoming), replica, 0)
        try:
            response = await self._upstream.send(replica.server, head, b"")
            try:
                await _answer(response, incoming, replica)
            finally:
                response.close()
        except EngineSilentError as error:
            raise EngineTimedOut(f"the engine gave no answer in time: {error}") from error
        except UpstreamError as error:
            raise RequestRefused(
                Outcome.REJECTED_NO_REPLICA,
                f"the replica that keeps this response does not answer: {error}; try again",
                retry_after_s=_RETRY_AFTER_S,
            ) from error


async def _answer(response: UpstreamResponse, incoming: IncomingRequest, replica: ReplicaAddress) -> None:
    named = (b"x-replica", replica.replica_id.encode("latin-1", "replace"))
    headers = [*returned(response.headers), *incoming.id_headers, named]
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
            message = f"the engine stopped in the middle of these events: {error}"
            events = incoming.api.error_event(RequestRefused(Outcome.FAILED, message))
            break
    await incoming.send({"type": "http.response.body", "body": events, "more_body": False})


def _query(incoming: IncomingRequest) -> str:
    """The query, written anew, with its question mark."""
    written = incoming.scope.get("query_string", b"").decode("latin-1")
    query = urlencode(parse_qsl(written, keep_blank_values=True))
    return f"?{query}" if query else ""

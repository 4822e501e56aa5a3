"""Requests that any replica can answer without scheduling, because they cost an engine next to nothing."""

from collections.abc import Sequence

from serve_app.core.events import DispatchFailure
from serve_app.errors import Outcome
from serve_app.serving.channel.scheduler_client import ReplicaAddress
from serve_app.serving.gateway.answer.engine_answer import failure_of
from serve_app.serving.gateway.answer.responses import EngineTimedOut, RequestRejected, send_body
from serve_app.serving.gateway.request.headers import response_headers, upstream_head
from serve_app.serving.gateway.request.incoming import IncomingRequest
from serve_app.serving.gateway.upstream import (
    EngineSilentError,
    UpstreamError,
    UpstreamPool,
    UpstreamResponse,
)

# More consecutive failures are unlikely to be a coincidence.
_MAX_ATTEMPTS = 3
# Replicas are added and replaced within seconds; without a queue there is no drain rate to measure.
_RETRY_AFTER_S = 1.0


class AnyReplica:
    """Round-robin over the replicas of a model."""

    def __init__(self, upstream: UpstreamPool) -> None:
        self._upstream = upstream
        self._next = 0

    async def forward(
        self, replicas: Sequence[ReplicaAddress], incoming: IncomingRequest, forwarded: bytes, body: bytes
    ) -> None:
        """Send a request to one of `replicas`, and its answer to the client.

        Raises:
            RequestRejected: no replica answers.
        """
        response, answer = await self._try_replicas(replicas, incoming, forwarded, body)
        headers = [*response_headers(response.headers), *incoming.id_headers]
        headers, answer = incoming.api.engine_answer(response.status, incoming.path, headers, answer)
        await send_body(incoming.send, response.status, headers, answer)

    async def _try_replicas(
        self, replicas: Sequence[ReplicaAddress], incoming: IncomingRequest, forwarded: bytes, body: bytes
    ) -> tuple[UpstreamResponse, bytes]:
        failure = "no replica is ready"
        self._next += 1
        for offset in range(min(_MAX_ATTEMPTS, len(replicas))):
            replica = replicas[(self._next + offset) % len(replicas)]
            try:
                return await self._exchange(replica, incoming, forwarded, body)
            except EngineSilentError as error:
                raise EngineTimedOut(f"the engine did not answer in time: {error}") from error
            except UpstreamError as error:
                failure = str(error)
        raise RequestRejected(
            Outcome.REJECTED_NO_REPLICA,
            f"no replica responds: {failure}; retry later",
            retry_after_s=_RETRY_AFTER_S,
        )

    async def _exchange(
        self, replica: ReplicaAddress, incoming: IncomingRequest, forwarded: bytes, body: bytes
    ) -> tuple[UpstreamResponse, bytes]:
        head = upstream_head(incoming, forwarded, replica, len(body))
        response = await self._upstream.send(replica.server, head, body)
        try:
            answer = await response.read()
        finally:
            response.close()
        failure = failure_of(response.status, response.headers, answer)
        if failure is not None and failure.failure is not DispatchFailure.TOO_LONG:
            raise failure
        return response, answer

"""Requests that any replica can answer without scheduling, because they cost an engine next to nothing."""

from collections.abc import Sequence

import msgspec

from serve_app.core.events import DispatchFailure
from serve_app.errors import Outcome
from serve_app.serving.channel.scheduler_client import ReplicaAddress
from serve_app.serving.gateway.answer.engine_answer import failure_of
from serve_app.serving.gateway.answer.responses import EngineTimedOut, RequestRejected, encode, send_body
from serve_app.serving.gateway.request.headers import response_headers, upstream_head
from serve_app.serving.gateway.request.incoming import IncomingRequest
from serve_app.serving.gateway.upstream.pool import UpstreamPool
from serve_app.serving.gateway.upstream.response import EngineSilentError, UpstreamError, UpstreamResponse

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
        self,
        replicas: Sequence[ReplicaAddress],
        incoming: IncomingRequest,
        forwarded: bytes,
        body: bytes,
        max_model_len: int | None = None,
    ) -> None:
        """Send a request to one of `replicas`, and its answer to the client.

        Args:
            max_model_len: longest context of the model's pools, for answers that state that of one engine.

        Raises:
            RequestRejected: no replica answers.
        """
        response, answer = await self._try_replicas(replicas, incoming, forwarded, body)
        if incoming.path == "/tokenize" and response.status == 200 and max_model_len is not None:
            answer = _with_limit(answer, max_model_len)
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
        head = upstream_head(
            incoming.engine_method, incoming.path, incoming.request_id, forwarded, replica, len(body)
        )
        response = await self._upstream.send(replica.server, head, body)
        try:
            answer = await response.read()
        finally:
            response.close()
        failure = failure_of(response.status, response.headers, answer)
        if failure is not None and failure.failure is not DispatchFailure.TOO_LONG:
            raise failure
        return response, answer


def _with_limit(answer: bytes, max_model_len: int) -> bytes:
    try:
        document = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return answer
    if not isinstance(document, dict) or "max_model_len" not in document:
        return answer
    return encode({**document, "max_model_len": max_model_len})

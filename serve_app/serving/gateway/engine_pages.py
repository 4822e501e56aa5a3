"""`/metrics/engines`: the engines' own metrics, for a Prometheus that cannot reach their ports.

A replica's port requires a token that only gateways have. The gateway therefore lists its replicas as
targets of Prometheus' HTTP service discovery, each at this path, and passes a replica's page on unchanged.
Prometheus adds the labels of a target. Pages are not merged, which would take megabytes at 200 replicas.
"""

import asyncio
import contextvars
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.errors import Outcome
from serve_app.serving.channel.scheduler_client import ReplicaAddress, SchedulerClient
from serve_app.serving.gateway.answer.responses import RequestRejected, encode, send_body, send_json
from serve_app.serving.gateway.request.headers import engine_head
from serve_app.serving.gateway.request.incoming import IncomingRequest
from serve_app.serving.gateway.upstream.pool import UpstreamPool
from serve_app.serving.gateway.upstream.response import UpstreamError

ENGINES_PATH = "/metrics/engines"
_CONTENT_TYPE = b"content-type"
# Shorter than usual scrape intervals, so that several scrapers cost an engine as much as one.
_KEPT_S = 1.0
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Page:
    content_type: bytes
    text: bytes


class EnginePages:
    """The `/metrics/engines` endpoint; `check` raises `RequestRejected` for headers without access."""

    def __init__(
        self,
        upstream: UpstreamPool,
        schedulers: Mapping[str, SchedulerClient],
        check: Callable[[Mapping[bytes, bytes]], None],
    ) -> None:
        self._upstream = upstream
        # Each of a model's names maps to the same scheduler; the model's own name is first.
        self._models = {id(scheduler): model for model, scheduler in reversed([*schedulers.items()])}
        self._schedulers = {id(scheduler): scheduler for scheduler in schedulers.values()}
        self._check = check
        self._pages: dict[str, asyncio.Task[_Page | RequestRejected]] = {}

    async def serve(self, incoming: IncomingRequest) -> None:
        """Return the targets, or the metrics of the replica named by `?replica=`.

        Raises:
            RequestRejected: access is denied, the replica is unknown, or it does not answer.
        """
        self._check(incoming.headers)
        asked = incoming.query().get("replica")
        if asked is None:
            # The address that the scraper used is one that it can reach.
            host = incoming.headers.get(b"host", b"").decode("latin-1")
            await send_json(incoming.send, 200, encode([*self._targets(host)]), [])
            return
        page = await self._page(asked[0])
        await send_body(incoming.send, 200, [(_CONTENT_TYPE, page.content_type)], page.text)

    def _targets(self, host: str) -> Iterator[dict[str, Any]]:
        for model, replica in self._replicas():
            labels = {"model": model, "pool": replica.pool, "replica": replica.replica_id}
            place = {"__metrics_path__": ENGINES_PATH, "__param_replica": replica.replica_id}
            yield {"targets": [host], "labels": {**labels, **place}}

    def _replicas(self) -> Iterator[tuple[str, ReplicaAddress]]:
        for key, scheduler in self._schedulers.items():
            for replica in scheduler.replicas():
                yield self._models[key], replica

    async def _page(self, replica_id: str) -> _Page:
        """Return the recently cached page of a replica; concurrent callers share one fetch."""
        fetching = self._pages.get(replica_id)
        if fetching is None:
            address = next((one for _, one in self._replicas() if one.replica_id == replica_id), None)
            if address is None:
                message = f"unknown replica {replica_id[:200]}: see {ENGINES_PATH}"
                raise RequestRejected(Outcome.REJECTED_INVALID, message, code="not_found", status=404)
            loop = asyncio.get_running_loop()
            # In an empty context, because Ray Serve cancels a request's tasks with the request.
            fetching = loop.create_task(self._fetched(address), context=contextvars.Context())
            fetching.add_done_callback(
                lambda _: loop.call_later(_KEPT_S, self._pages.pop, replica_id, None),
            )
            self._pages[replica_id] = fetching
        found = await asyncio.shield(fetching)
        if isinstance(found, RequestRejected):
            # A new exception each time, because a raised one keeps its traceback.
            raise RequestRejected(found.outcome, found.message, status=found.status)
        return found

    async def _fetched(self, address: ReplicaAddress) -> _Page | RequestRejected:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                response = await self._upstream.send(address.server, engine_head(address, "/metrics"), b"")
                try:
                    text = await response.read()
                finally:
                    response.close()
        except (UpstreamError, TimeoutError) as error:
            reason = f"replica {address.replica_id} gave no metrics: {error or 'it took too long'}"
            return RequestRejected(Outcome.FAILED, reason, status=502)
        if response.status != 200:
            reason = f"replica {address.replica_id} answered {response.status} to a scrape"
            return RequestRejected(Outcome.FAILED, reason, status=502)
        return _Page(response.header(_CONTENT_TYPE), text)

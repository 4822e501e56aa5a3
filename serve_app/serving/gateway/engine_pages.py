"""`/metrics/engines`: the engines' own metrics, for a Prometheus that cannot reach their ports.

A replica's port asks for a token that only gateways are given, and lives as long as the replica. So the
gateway lists its replicas as targets of Prometheus' HTTP service discovery, each at this very path, and
passes a replica's page on as it is. Prometheus adds the labels of a target by itself: no page is parsed,
written anew or joined with others, whose sum would be megabytes at 200 replicas.
"""

import asyncio
import contextvars
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from serve_app.errors import Outcome
from serve_app.serving.channel.scheduler_client import ReplicaAddress, SchedulerClient
from serve_app.serving.gateway.answer.responses import RequestRefused, encode, send_body, send_json
from serve_app.serving.gateway.request.headers import engine_head
from serve_app.serving.gateway.request.incoming import IncomingRequest
from serve_app.serving.gateway.upstream.pool import UpstreamPool
from serve_app.serving.gateway.upstream.response import UpstreamError

ENGINES_PATH = "/metrics/engines"
_CONTENT_TYPE = b"content-type"
# Shorter than any interval between scrapes: several scrapers cost an engine as much as one.
_KEPT_S = 1.0
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Page:
    content_type: bytes
    text: bytes


class EnginePages:
    """The list of engines, and the page of each.

    Args:
        schedulers: by model name.
        check: refuses whoever may not read metrics, by the headers of a request.
    """

    def __init__(
        self,
        upstream: UpstreamPool,
        schedulers: Mapping[str, SchedulerClient],
        check: Callable[[Mapping[bytes, bytes]], None],
    ) -> None:
        self._upstream = upstream
        # A scheduler stands once under each of its model's names, the model's own first.
        self._models = {id(scheduler): model for model, scheduler in reversed([*schedulers.items()])}
        self._schedulers = {id(scheduler): scheduler for scheduler in schedulers.values()}
        self._check = check
        self._pages: dict[str, asyncio.Task[_Page | RequestRefused]] = {}

    async def serve(self, incoming: IncomingRequest) -> None:
        """Answer with the targets, or with the page of the replica that `?replica=` names.

        Raises:
            RequestRefused: the caller may not read metrics, there is no such replica, or it does not answer.
        """
        self._check(incoming.headers)
        asked = parse_qs(incoming.scope["query_string"].decode("latin-1")).get("replica")
        if asked is None:
            # Where the scraper has found us, it finds us again.
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
        """The page of a replica, fetched a moment ago; those who ask meanwhile wait for the same one."""
        fetching = self._pages.get(replica_id)
        if fetching is None:
            address = next((one for _, one in self._replicas() if one.replica_id == replica_id), None)
            if address is None:
                message = f"there is no replica {replica_id[:200]}: ask {ENGINES_PATH} again"
                raise RequestRefused(Outcome.REJECTED_INVALID, message, code="not_found", status=404)
            loop = asyncio.get_running_loop()
            # In an empty context: Ray Serve cancels what a request has started with the request.
            fetching = loop.create_task(self._fetched(address), context=contextvars.Context())
            fetching.add_done_callback(
                lambda _: loop.call_later(_KEPT_S, self._pages.pop, replica_id, None),
            )
            self._pages[replica_id] = fetching
        found = await asyncio.shield(fetching)
        if isinstance(found, RequestRefused):
            # A new one for each: an exception that is raised keeps where it was raised.
            raise RequestRefused(found.outcome, found.message, status=found.status)
        return found

    async def _fetched(self, address: ReplicaAddress) -> _Page | RequestRefused:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                response = await self._upstream.send(address.server, engine_head(address, "/metrics"), b"")
                try:
                    text = await response.read()
                finally:
                    response.close()
        except (UpstreamError, TimeoutError) as error:
            reason = f"replica {address.replica_id} gave no metrics: {error or 'it took too long'}"
            return RequestRefused(Outcome.FAILED, reason, status=502)
        if response.status != 200:
            reason = f"replica {address.replica_id} answered {response.status} to a scrape"
            return RequestRefused(Outcome.FAILED, reason, status=502)
        return _Page(response.header(_CONTENT_TYPE), text)

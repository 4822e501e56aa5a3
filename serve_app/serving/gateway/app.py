"""The gateway's application: routing, and the endpoints that need no engine.

`AnyReplica` serves requests that any replica can answer without scheduling, because they cost an engine next
to nothing. Read next: `request/reader.py`, which reads a request, and `path.py`, its way to an engine and
back.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from serve_app.core.events import DispatchFailure
from serve_app.errors import Outcome, SettingsError
from serve_app.serving.channel.scheduler_client import (
    ReplicaAddress,
    SchedulerClient,
    SchedulerQueries,
    ServerAddress,
)
from serve_app.serving.gateway.admin import (
    ENGINES_PATH,
    DebugPages,
    EndpointAdmin,
    EnginePages,
    KeyAdmin,
    ModeAdmin,
    PoolWatcher,
)
from serve_app.serving.gateway.answer.responses import (
    ClientExchange,
    ClientGone,
    EngineTimedOut,
    RequestRejected,
    encode,
    failure_of,
    stopping,
)
from serve_app.serving.gateway.answer.stored import BackgroundWork, ResponseHolders
from serve_app.serving.gateway.batches.api import NO_BATCHES, BatchApi, BatchHandler, batch_routes
from serve_app.serving.gateway.dashboard import Dashboard
from serve_app.serving.gateway.dashboard.pages import Frames
from serve_app.serving.gateway.keys import Budgets
from serve_app.serving.gateway.metrics_page import MetricsEndpoint
from serve_app.serving.gateway.models import ServedModels
from serve_app.serving.gateway.path import Request, Services, observe
from serve_app.serving.gateway.request.body import append_fields, check_structure, model_field
from serve_app.serving.gateway.request.endpoints import ENDPOINTS, QUERY_ROUTES, parse_model
from serve_app.serving.gateway.request.fields import response_headers, upstream_head
from serve_app.serving.gateway.request.reader import RequestReader
from serve_app.serving.gateway.router import Cors, HttpRoute, Router
from serve_app.serving.gateway.settings import GatewaySettings, ServedModel, with_hot_gateway
from serve_app.serving.gateway.stored import StoredResponses
from serve_app.serving.gateway.telemetry import Telemetry
from serve_app.serving.gateway.tracing.request_trace import make_metric_export, make_tracer
from serve_app.serving.gateway.upstream import (
    EngineSilentError,
    HaltWatch,
    UpstreamError,
    UpstreamPool,
    UpstreamResponse,
)
from serve_app.serving.tls import TlsSettings, make_tls

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
        request: Request,
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
        response, answer = await self._try_replicas(replicas, request, forwarded, body)
        if request.path == "/tokenize" and response.status == 200 and max_model_len is not None:
            answer = _with_limit(answer, max_model_len)
        headers = response_headers(response.headers)
        headers, answer = request.api.engine_answer(response.status, request.path, headers, answer)
        request.respond(response.status, headers, answer)

    async def _try_replicas(
        self, replicas: Sequence[ReplicaAddress], request: Request, forwarded: bytes, body: bytes
    ) -> tuple[UpstreamResponse, bytes]:
        failure = "no replica is ready"
        self._next += 1
        for offset in range(min(_MAX_ATTEMPTS, len(replicas))):
            replica = replicas[(self._next + offset) % len(replicas)]
            head = upstream_head(
                request.engine_method, request.path, request.request_id, forwarded, replica, len(body)
            )
            try:
                response, answer = await self._upstream.fetch(replica.server, head, body)
            except EngineSilentError as error:
                raise EngineTimedOut(error) from error
            except UpstreamError as error:
                failure = str(error)
                continue
            found = failure_of(response.status, response.headers, answer)
            if found is None or found.failure is DispatchFailure.TOO_LONG:
                return response, answer
            failure = str(found)
        raise RequestRejected(
            Outcome.REJECTED_NO_REPLICA,
            f"no replica responds: {failure}; retry later",
            retry_after_s=_RETRY_AFTER_S,
        )


def _with_limit(answer: bytes, max_model_len: int) -> bytes:
    try:
        document = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return answer
    if not isinstance(document, dict) or "max_model_len" not in document:
        return answer
    return encode({**document, "max_model_len": max_model_len})


logger = logging.getLogger("ray.serve")

# Time for clients to read the last event of an aborted stream, and for the export of the last spans.
_FINAL_MESSAGES_S = 2.0


class Gateway:
    """Application in front of the schedulers of its models; it is called with each request.

    Args:
        schedulers: by model name.
        gateway_id: unique among all gateways; prefix of every request id.
        queries: admin queries of each model's scheduler, by model name.
        tls: for connections to replicas.
        watchers: watchers of endpoint pools, by model and pool.

    Attributes:
        router: routes of all endpoints.

    Raises:
        SettingsError: a model has no scheduler, a key cannot be read, or tracing is enabled but unavailable.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        schedulers: Mapping[str, SchedulerClient],
        gateway_id: str,
        queries: Mapping[str, SchedulerQueries] | None = None,
        tls: TlsSettings | None = None,
        watchers: Mapping[tuple[str, str], PoolWatcher] | None = None,
    ) -> None:
        missing = [model.name for model in settings.models if model.name not in schedulers]
        if missing:
            raise SettingsError(f"no scheduler for the models {', '.join(missing)}")
        self._settings = settings
        self._gateway_id = gateway_id
        self._numbers = itertools.count(1)
        self._cors = _cors_of(settings)
        self._schedulers = schedulers
        self._queries = queries or {}
        self._served = ServedModels(settings.models, schedulers, settings.routes)
        self._tracer = make_tracer(gateway_id) if settings.tracing else None
        prices = {model.name: model.price for model in settings.models if model.price is not None}
        self._budgets = Budgets(self._queries, prices)
        self._reader = RequestReader(
            settings,
            self._served,
            self._budgets,
            self._tracer,
            lambda *ignored: self.telemetry.on_ignored_header(*ignored),  # noqa: PLW0108 - created below
            holders := ResponseHolders(),
        )
        self._upstream = UpstreamPool(settings.upstream, make_tls(tls))
        self._halts = HaltWatch(self._upstream, self._open_servers)
        self.telemetry = Telemetry(
            gateway_id,
            log_requests=settings.log_requests,
            upstream_counts=lambda: (self._upstream.connects, self._upstream.stale_retries),
            held_body_bytes=lambda: self._reader.bodies.held_bytes,
            targets={model.name: model.targets for model in settings.models},
            export=make_metric_export(gateway_id) if settings.tracing else None,
        )
        self._metrics_endpoint = MetricsEndpoint(
            self.telemetry,
            schedulers.values(),
            key=settings.metrics_key,
            requires_keys=settings.requires_keys,
            authenticate=self._reader.caller,
        )
        self._background = BackgroundWork(self._upstream)
        self._request_ended = asyncio.Event()
        self._services = Services(
            self._upstream,
            self.telemetry,
            self._background,
            schedulers,
            open=set(),
            on_end=self._request_ended.set,
            queue_comment_interval_s=settings.queue_comment_interval_s,
        )
        self._stored = StoredResponses(self._upstream, schedulers, self._served, self._reader, holders)
        self._any_replica = AnyReplica(self._upstream)
        self._dashboard = Dashboard(Frames(self._queries, gateway_id, self._batch_overview), self._reader)
        # `Retry-After` of rejections, in seconds, once the application stops.
        self._stopping_retry_after_s: float | None = None
        self._batches: BatchApi | None = None
        self._debug = DebugPages(self._queries, self._reader, prices, self.telemetry.ignored_objectives)
        self._key_admin = KeyAdmin(self._reader, self._budgets, settings.keys_path)
        self.router = Router(self._routes(watchers or {}))

    def __repr__(self) -> str:
        return f"<Gateway models={len(self._settings.models)} in_flight={self.in_flight} {self._upstream!r}>"

    def change(self, user_config: Mapping[str, Any]) -> None:
        """Apply hot settings to new requests; requests that have been read are unaffected.

        Args:
            user_config: hot settings by name; omitted ones keep their values.

        Raises:
            SettingsError: a setting is unknown, cold or invalid, or a key cannot be read; nothing changes.
        """
        changed = with_hot_gateway(self._settings, user_config)
        if changed == self._settings:
            return
        # Steps that can fail run first, so that an error leaves everything unchanged.
        self._metrics_endpoint.change(changed.metrics_key, requires_keys=changed.requires_keys)
        try:
            self._reader.change(changed)
        except SettingsError:
            before = self._settings
            self._metrics_endpoint.change(before.metrics_key, requires_keys=before.requires_keys)
            raise
        self._served.change(changed.routes)
        self._key_admin.change(changed.keys_path)
        self._cors = _cors_of(changed)
        self.telemetry.log_requests = changed.log_requests
        self._services = replace(self._services, queue_comment_interval_s=changed.queue_comment_interval_s)
        before, self._settings = self._settings, changed
        names = [each.name for each in fields(changed)]
        differing = [name for name in names if getattr(before, name) != getattr(changed, name)]
        logger.info("event=audit action=settings_changed by=deploy settings=%s", ",".join(differing))

    def show_objectives(self, source: str, priorities: Mapping[str, int]) -> None:
        """Replace the `InferenceObjective`s of a source: priorities by name."""
        self._reader.show_objectives(source, priorities)

    def _routes(self, watchers: Mapping[tuple[str, str], PoolWatcher]) -> Iterator[HttpRoute]:
        for path, endpoint in ENDPOINTS.items():
            handler = self._scheduled if endpoint.is_scheduled else self._forward_unscheduled
            yield HttpRoute("POST", path, handler, endpoint.summary)
        for path, summary in QUERY_ROUTES.items():
            yield HttpRoute("GET", path, self._forward_query, summary)
        engine_pages = EnginePages(self._upstream, self._schedulers, self._metrics_endpoint.check)
        yield HttpRoute("GET", "/v1/models", self._list_models, "available models")
        yield HttpRoute("GET", "/v1/models/{model}", self._show_model, "one model")
        yield HttpRoute("GET", "/load", self._load, "number of requests in this gateway")
        yield HttpRoute("GET", "/ping", self._health, "liveness of the gateway")
        yield HttpRoute("GET", "/health", self._health, "liveness of the gateway")
        readiness = "readiness: every model has a replica, or starts one on demand"
        yield HttpRoute("GET", "/ready", self._ready, readiness)
        yield HttpRoute("GET", "/metrics", self._metrics, "metrics for Prometheus")
        targets = "the engines as Prometheus targets, or with `?replica=` the metrics of one engine"
        yield HttpRoute("GET", ENGINES_PATH, engine_pages.serve, targets)
        yield from batch_routes(self._batch_handler)
        yield from self._stored.routes()
        yield from EndpointAdmin(watchers, self._reader).routes()
        yield from ModeAdmin(self._queries, self._reader).routes()
        yield from self._key_admin.routes()
        yield from self._debug.routes()
        yield from self._dashboard.routes()

    def start_batches(self, folder: Path) -> None:
        """Offer the Batch API, and run its batches. Without this, its endpoints answer 501.

        Args:
            folder: the same for all gateways of the application.
        """
        self._batches = BatchApi(self._settings, folder, self._reader, self._gateway_id, self)

    async def stop_batches(self) -> None:
        """Leave the batches to another gateway, which serves their open requests again. Idempotent."""
        if self._batches is not None:
            await self._batches.stop()

    @property
    def in_flight(self) -> int:
        """Requests that are being received, queued or running."""
        return sum(self.telemetry.in_flight.values())

    @property
    def open_requests(self) -> int:
        """Scheduled requests whose answers are incomplete."""
        return len(self._services.open)

    async def drain(self, drain_s: float, retry_after_s: float) -> int:
        """Reject new requests, and wait until in-flight ones end.

        Args:
            drain_s: grace period; requests that are still in flight after it are aborted with an error.
            retry_after_s: `Retry-After` of the rejections.

        Returns:
            The number of requests that were aborted.
        """
        self._stopping_retry_after_s = retry_after_s
        self._dashboard.close()
        await self.stop_batches()
        await self._until_idle(drain_s)
        aborted = self.abort(retry_after_s)
        await self._until_idle(_FINAL_MESSAGES_S)
        return aborted

    def abort(self, retry_after_s: float = _RETRY_AFTER_S) -> int:
        """End all open requests with an error, because the gateway stops; return their number."""
        aborted = tuple(self._services.open)
        for request in aborted:
            request.end(retry_after_s)
        return len(aborted)

    async def _until_idle(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._services.open:
                    self._request_ended.clear()
                    await self._request_ended.wait()

    def _open_servers(self) -> set[ServerAddress]:
        return {each.server for scheduler in self._schedulers.values() for each in scheduler.replicas()}

    def _check_stopping(self) -> None:
        if self._stopping_retry_after_s is not None:
            raise stopping(self._stopping_retry_after_s)

    def close(self) -> None:
        """Close all connections to replicas, and flush the request log and the spans."""
        self.telemetry.close(_FINAL_MESSAGES_S)
        self._dashboard.close()
        self._background.close()
        self._halts.close()
        self._budgets.close()
        self._upstream.close()
        if self._batches is not None:
            self._batches.close()
        self._reader.close()
        if self._tracer is not None:
            self._tracer.close(_FINAL_MESSAGES_S)

    def __call__(self, exchange: ClientExchange) -> None:
        """Serve one request."""
        if self._cors is not None and self._cors.serve(exchange):
            return
        own_id = f"{self._gateway_id}-{next(self._numbers)}"
        request = Request(self._services, exchange, own_id, monotonic())
        try:
            if self._tracer is not None:
                self._tracer.begin(request)
            handler, parameters = self.router.find(exchange.method, request.path)
            work = handler(request, *parameters)
        except RequestRejected as rejection:
            self._reject(request, rejection)
        else:
            if work is not None:
                exchange.run(self._serve(request, work))

    async def _serve(self, request: Request, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except RequestRejected as rejection:
            self._reject(request, rejection)
        except ClientGone as gone:
            self._record(request, gone)

    def _reject(self, request: Request, rejection: RequestRejected) -> None:
        request.reject(rejection)
        self._record(request, rejection)

    def _scheduled(self, request: Request) -> Coroutine[None, None, None] | None:
        """Read and submit a request at once, or return the work that does."""
        self._check_stopping()
        if not self._reader.read_now(request):
            return self._read(request)
        self._submit(request)
        return None

    async def _read(self, request: Request) -> None:
        observe(self.telemetry.on_arrival, "")
        try:
            await self._reader.read(request)
        finally:
            observe(self.telemetry.on_departure, "")
        # The gateway may have begun to stop while the body arrived.
        self._submit(request)

    def _submit(self, request: Request) -> None:
        try:
            self._check_stopping()
            self._stored.bind(request)
        except BaseException:
            request.body.release()
            raise
        request.submit()

    def _batch_handler(self, handler: BatchHandler) -> Callable[..., Coroutine[None, None, None]]:
        """Return a handler of the Batch API that rejects requests while this gateway does not offer it."""

        async def serve(request: Request, *parameters: str) -> None:
            if self._batches is None:
                message = (
                    "the Batch API has no folder here: this cluster has several nodes, so set "
                    "gateway.batches.folder to a folder that all of them share"
                )
                raise RequestRejected(Outcome.FAILED, message, code="not_supported", status=501)
            await self._batches.serve(handler, request, *parameters)

        return serve

    async def _batch_overview(self) -> Mapping[str, Any]:
        """Return the batches of all tenants, for the dashboard."""
        return NO_BATCHES if self._batches is None else await self._batches.overview()

    async def _forward_query(self, request: Request) -> None:
        """Forward a query without a body to a replica of the named model, or else of the first model."""
        caller = self._reader.authenticate(request)
        named = request.query().get("model")
        found = self._served.find(named[0] if named else self._served.first(caller), caller).ready()
        forwarded = self._reader.forwarded(request)
        await self._any_replica.forward(found.replicas(), request, forwarded, b"")

    async def _forward_unscheduled(self, request: Request) -> None:
        caller = self._reader.authenticate(request)
        held = await self._reader.body(request)
        try:
            check_structure(held.data)
            name = self._served.find(parse_model(held.data), caller)
            found = name.ready()
            body = append_fields(held.data, [model_field(found.name)] if name.route is not None else [])
            with request.watch():
                forwarded = self._reader.forwarded(request)
                await self._any_replica.forward(
                    found.replicas(), request, forwarded, body, found.model.max_model_len
                )
        finally:
            held.release()

    def _list_models(self, request: Request) -> None:
        caller = self._reader.authenticate(request)
        models = [found.describe() for found in self._served.usable(caller)]
        request.respond_json({"object": "list", "data": models})

    def _show_model(self, request: Request, name: str) -> None:
        caller = self._reader.authenticate(request)
        request.respond_json(self._served.find(name, caller).describe())

    def _health(self, request: Request) -> None:
        request.respond_json({"status": "ok"})

    def _load(self, request: Request) -> None:
        """Report this gateway's in-flight requests, as vLLM's `/load` does."""
        self._reader.authenticate(request)
        request.respond_json({"server_load": self.in_flight})

    def _ready(self, request: Request) -> None:
        """Report readiness: every model has a replica, or one that its first request starts.

        Only a connected scheduler can have a replica started. Without a connection, each model is listed as
        missing unless a replica of it is known, but its requests wait for the next scheduler.
        """
        missing = [model.name for model in self._settings.models if not self._can_serve(model)]
        waiting = [name for name in missing if not self._schedulers[name].is_connected]
        stops = self._stopping_retry_after_s is not None
        status = "stopping" if stops else "waiting" if missing else "ready"
        document = {
            "status": status,
            "models_without_replica": missing,
            "models_without_scheduler": waiting,
        }
        request.respond_json(document, 503 if missing or stops else 200)

    def _can_serve(self, model: ServedModel) -> bool:
        scheduler = self._schedulers[model.name]
        return bool(scheduler.replicas()) or (model.starts_on_demand and scheduler.is_connected)

    async def _metrics(self, request: Request) -> None:
        """Serve the metrics of this gateway and of its schedulers."""
        self._metrics_endpoint.check(request.headers)
        kind, page = await self._metrics_endpoint.page(request.headers.get(b"accept", b""))
        request.respond(200, [kind], page)

    def _record(self, request: Request, end: RequestRejected | ClientGone) -> None:
        """Count and log a request that never reached a scheduler."""
        # Clients choose the path, so only known paths become labels.
        endpoint = request.path if self.router.is_literal(request.path) else "-"
        observe(self.telemetry.on_rejection, request, endpoint, end)


def _cors_of(settings: GatewaySettings) -> Cors | None:
    return Cors(settings.cors) if settings.cors.allow_origins else None

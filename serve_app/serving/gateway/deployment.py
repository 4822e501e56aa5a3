"""The gateway as a Ray Serve deployment: the application's ingress.

- `GatewayDeployment`: runs one gateway; `__del__` drains its open requests.
- `GatewayListener`: the server on the application's address, where otherwise a proxy of Ray Serve would
  listen. It serves the gateway below the application's route prefix, and the endpoints of such a proxy,
  `/-/healthz` and `/-/routes`. A gateway that drains or stops first fails `/-/healthz` while it serves on, so
  that load balancers choose another node; then it stops as `serving.http_server` describes.
"""

import asyncio
import contextvars
import json
import logging
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.errors import Outcome, SettingsError
from serve_app.serving._ray import HttpOptions, ServedAddress, alive_nodes, served_address
from serve_app.serving.access import max_connections, raise_descriptor_limit
from serve_app.serving.autoscaling import CPU_CORES
from serve_app.serving.channel.gateway_client import GatewayClient
from serve_app.serving.channel.messages import Role
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.deployments import locator
from serve_app.serving.gateway.admin import PoolWatcher
from serve_app.serving.gateway.answer.responses import JSON_TYPE, RequestRejected
from serve_app.serving.gateway.app import Gateway
from serve_app.serving.gateway.batches.settings import default_folder
from serve_app.serving.gateway.settings import GatewaySettings
from serve_app.serving.http_server import Application, Exchange, HttpServer, HttpServerOptions
from serve_app.serving.listening import HeldSocket
from serve_app.serving.process import tune_memory
from serve_app.serving.remote.sources import ApiServer, InferencePoolSource, SourceHealth, source_of
from serve_app.serving.watchdog import start_watchdog

# Listen backlog; the kernel's default limit.
_BACKLOG = 4096
_OWN_PAGES = "/-/"
_RETRY_AFTER_S = 1.0
# First pause after a failed look at the cluster; further ones are longer.
_REFRESH_S = 5.0


class GatewayListener:
    """HTTP server of a gateway on the application's address.

    Args:
        address: from the configuration of Ray Serve.
        stalled_s: timeout of clients that do not read; see `HttpServerOptions`.

    Raises:
        SettingsError: a proxy of Ray Serve has the address, an option is not supported, or a certificate
            cannot be loaded.
    """

    def __init__(self, gateway: Gateway, address: ServedAddress, stalled_s: float | None = None) -> None:
        options = address.options
        if address.has_proxy:
            raise SettingsError(
                "proxy_location must be Disabled: gateways listen on http_options.port themselves"
            )
        if options.request_timeout_s:
            raise SettingsError(
                f"http_options.request_timeout_s {options.request_timeout_s} is not supported: use "
                "queue_timeout_s instead"
            )
        self._options, self._gateway = options, gateway
        # `serve` has done this already, but `ray start` and KubeRay have not.
        raise_descriptor_limit()
        self._socket = HeldSocket(options.host or "127.0.0.1", options.port, _BACKLOG, address.cluster)
        self._closes = False
        self._mounted = MountedGateway(gateway, address.route, address.application)
        self._server = HttpServer(
            "the gateway",
            self._mounted,
            HttpServerOptions(
                idle_s=options.keep_alive_timeout_s,
                stalled_s=stalled_s,
                max_connections=max_connections(),
                overload=_refuse_connection,
                tls=_tls_of(options),
                shares_socket=True,
            ),
        )

    def __repr__(self) -> str:
        return f"GatewayListener({self._options.host}:{self._options.port}, {self._server!r})"

    async def start(self) -> None:
        """Bind the address and accept connections.

        Raises:
            PortError: the address is not available.
        """
        await self._server.start(await self._socket.open(), self._socket.has_turn)

    def check_health(self) -> None:
        """Raise `ServerNotRunningError` if no connections are accepted."""
        self._server.check_health()

    def deregister(self, *, closes: bool = False) -> None:
        """Fail `/-/healthz` from now on, and serve all else. `closes`: no gateway follows on this address."""
        self._mounted.leaving = True
        self._closes = self._closes or closes

    async def stop(self, grace_s: float, deregister_s: float = 0.0) -> None:
        """Shut down gracefully.

        Args:
            grace_s: time for in-flight responses; longer ones are aborted.
            deregister_s: time before that in which `/-/healthz` fails while requests are served.
        """
        self.deregister()
        await asyncio.sleep(deregister_s)
        self._socket.leave(closes=self._closes)
        await self._server.stop(grace_s, self._gateway.abort)


class MountedGateway:
    """Application that mounts the gateway below a prefix; while `leaving`, `/-/healthz` fails."""

    def __init__(self, gateway: Application, route: str, application: str) -> None:
        self.leaving = False
        self._gateway = gateway
        self._prefix = route.rstrip("/")
        self._routes = json.dumps({route: application}).encode()

    def __call__(self, exchange: Exchange) -> None:
        """Serve one request."""
        path, prefix = exchange.path, self._prefix
        if path.startswith(_OWN_PAGES) or not (not prefix or path == prefix or path.startswith(prefix + "/")):
            self._own_page(exchange)
            return
        if prefix:
            exchange.path = path.removeprefix(prefix)
        self._gateway(exchange)

    def _own_page(self, exchange: Exchange) -> None:
        status, kind, path = 200, b"text/plain", exchange.path
        if path == _OWN_PAGES + "healthz":
            status, body = (503, b"draining") if self.leaving else (200, b"success")
        elif path == _OWN_PAGES + "routes":
            kind, body = b"application/json", self._routes
        else:
            status, body = 404, f"Path {path!r} not found. See /-/routes for the paths that are.".encode()
        exchange.respond(status, [(b"content-type", kind)], body)


def _refuse_connection(exchange: Exchange) -> None:
    rejected = RequestRejected(
        Outcome.REJECTED_QUEUE_FULL,
        "This gateway has as many connections as it may have: try again, or use fewer connections.",
        code="too_many_connections",
        status=503,
        retry_after_s=_RETRY_AFTER_S,
    )
    headers = [JSON_TYPE, (b"connection", b"close"), *rejected.headers()]
    exchange.respond(rejected.status, headers, rejected.body())


def _tls_of(options: HttpOptions) -> ssl.SSLContext | None:
    if not options.ssl_certfile:
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=options.ssl_ca_certs)
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, options.ssl_keyfile_password)
    except OSError as exc:
        raise SettingsError(
            f"http_options.ssl_certfile {options.ssl_certfile} cannot be loaded: {exc}"
        ) from exc
    return context


logger = logging.getLogger("ray.serve")

_LOOPBACK = "127.0.0.1"


class GatewayDeployment:
    """Serve deployment that runs one `Gateway` per replica.

    Args:
        channel: settings of the connections to the schedulers.
        schedulers: scheduler handles by model name.
        names: model by requested name, aliases included.
        endpoints: watcher handles of endpoint pools, by model and pool.
        drain_timeout_s: grace period of open responses at shutdown.
        deregister_s: time to serve on before draining; see `GatewayListener.stop`.
        others: handles of pools and tuners, passed only to bind these to the application.

    Raises:
        SettingsError: the address is exposed without authentication, or `http_options` is not supported.
        PortError: the application's address cannot be bound.
    """

    # Serve awaits it, which mypy cannot know, and passes what `app` binds.
    async def __init__(  # type: ignore[misc]  # noqa: PLR0913, PLR0917
        self,
        settings: GatewaySettings,
        channel: ChannelSettings,
        schedulers: Mapping[str, DeploymentHandle[Any]],
        names: Mapping[str, str],
        endpoints: Mapping[str, Mapping[str, DeploymentHandle[Any]]],
        drain_timeout_s: float,
        deregister_s: float,
        others: Sequence[DeploymentHandle[Any]],  # noqa: ARG002 - binds them to the application
    ) -> None:
        # The call to Serve's controller blocks.
        address = await asyncio.to_thread(served_address)
        settings.check_exposure(address.options.host or _LOOPBACK)
        gateway_id = serve.get_replica_context().replica_id.unique_id
        self._clients = {
            model: GatewayClient(gateway_id, locator(handle, Role.GATEWAY), channel)
            for model, handle in schedulers.items()
        }
        dispatchers = {name: self._clients[model] for name, model in names.items()}
        watchers = {
            (model, pool): _watcher_of(handle)
            for model, pools in endpoints.items()
            for pool, handle in pools.items()
        }
        self._cpu = CpuMeter()
        self._rejected = ""
        self._gateway = Gateway(settings, dispatchers, gateway_id, self._clients, channel.tls, watchers)
        self._following = follow_objectives(settings, self._gateway)
        for client in self._clients.values():
            client.start()
        self._stop_times = drain_timeout_s, deregister_s
        self._drain: asyncio.Task[int] | None = None
        stalled_s = settings.upstream.stalled_client_timeout_s
        self._listener = GatewayListener(self._gateway, address, stalled_s)
        await self._listener.start()
        folder = await asyncio.to_thread(_batches_folder, settings, address)
        if folder is not None:
            self._gateway.start_batches(folder)
        tune_memory()
        self._watchdog = start_watchdog()

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Apply other hot settings; see `Gateway.change`.

        Invalid settings are logged and the current ones stay in effect. An error here would make Serve
        replace a working gateway with one that cannot start. `deploy` requests the reason.
        """
        try:
            self._gateway.change(user_config)
            self._rejected = ""
        except SettingsError as error:
            self._rejected = str(error)
            logger.error(  # noqa: TRY400 - the message says all
                "event=settings_rejected reason=%r action='the current settings stay in effect'", str(error)
            )

    async def rejected_settings(self) -> str:
        """Return why the deployed settings are not in effect; empty if they are."""
        return self._rejected

    # A coroutine, because Serve runs each call of a plain function in a thread.
    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the CPU cores used since Serve's last call; see `serving.autoscaling`."""
        return {CPU_CORES: self._cpu.cores()}

    async def open_requests(self) -> int:
        """Return the number of requests whose answers are incomplete."""
        return self._gateway.open_requests

    async def begin_drain(self, drain_s: float, retry_after_s: float) -> None:
        """Fail the health check of load balancers, and start to drain; see `Gateway.drain`. Idempotent."""
        self._listener.deregister(closes=True)
        if self._drain is None:
            # In an empty context, because Serve cancels the tasks of a call's context with the call.
            drain = self._gateway.drain(drain_s, retry_after_s)
            self._drain = asyncio.get_running_loop().create_task(drain, context=contextvars.Context())

    async def end_drain(self) -> int:
        """Wait for the end of the drain; return the number of requests that were aborted."""
        return 0 if self._drain is None else await self._drain

    def check_health(self) -> None:
        """Raise `ServerNotRunningError` if the gateway's own port accepts no connections."""
        self._listener.check_health()

    async def __del__(self) -> None:
        if (gateway := getattr(self, "_gateway", None)) is not None:
            await gateway.stop_batches()
        if (listener := getattr(self, "_listener", None)) is not None:
            await listener.stop(*self._stop_times)
        for task in getattr(self, "_following", ()):
            task.cancel()
        for client in getattr(self, "_clients", {}).values():
            await client.close()
        if gateway is not None:
            gateway.close()


def follow_objectives(
    settings: GatewaySettings, gateway: Gateway, api: ApiServer | None = None, refresh_s: float = _REFRESH_S
) -> list[asyncio.Task[None]]:
    """Start to follow the InferenceObjectives of the models' InferencePools, and return the tasks."""
    tasks = []
    for text in sorted({each for model in settings.models for each in model.inference_pools}):
        pool = source_of(text)
        assert isinstance(pool, InferencePoolSource), "only those are among the settings"
        pool = replace(pool, api=api or pool.api)
        health = SourceHealth(f"InferenceObjectives of {text}")
        work = pool.follow_objectives(partial(gateway.show_objectives, text), refresh_s, health)
        # In an empty context, because Serve cancels the tasks of a call's context with the call.
        tasks.append(asyncio.get_running_loop().create_task(work, context=contextvars.Context()))
    return tasks


class CpuMeter:
    """CPU usage of this process."""

    def __init__(self) -> None:
        self._last = time.monotonic(), time.process_time()

    def cores(self) -> float:
        """Return the cores used since the previous call, or since construction."""
        (began, used), self._last = self._last, (time.monotonic(), time.process_time())
        passed_s, used_s = self._last[0] - began, self._last[1] - used
        return used_s / passed_s if passed_s > 0 else 0.0


def _batches_folder(settings: GatewaySettings, address: ServedAddress) -> Path | None:
    """Return the folder of the Batch API; None if the nodes share none."""
    if settings.batches.folder is not None:
        return Path(settings.batches.folder)
    if alive_nodes() > 1:
        return None
    return default_folder(address.application, address.options.port)


def _watcher_of(handle: DeploymentHandle[Any]) -> PoolWatcher:
    async def describe() -> list[dict[str, object]]:
        found: list[dict[str, object]] = await handle.described.remote()
        return found

    async def change(action: str, url: str) -> dict[str, object]:
        answer: dict[str, object] = await handle.change.remote(action, url)
        return answer

    return PoolWatcher(describe, change)

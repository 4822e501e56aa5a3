"""The gateway as a Ray Serve deployment: the application's ingress.

The gateway listens on the application's address (`listener`) instead of the proxies of Ray Serve, and
`__del__` drains its open requests.
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.errors import SettingsError
from serve_app.serving._ray import ServedAddress, alive_nodes, served_address
from serve_app.serving.autoscaling import CPU_CORES
from serve_app.serving.channel.gateway_client import GatewayClient
from serve_app.serving.channel.messages import Role
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.discovery import locator
from serve_app.serving.gateway.app import Gateway
from serve_app.serving.gateway.batches.settings import default_folder
from serve_app.serving.gateway.endpoint_admin import PoolWatcher
from serve_app.serving.gateway.listener import GatewayListener
from serve_app.serving.gateway.settings import GatewaySettings
from serve_app.serving.memory import tune_memory
from serve_app.serving.watchdog import start_watchdog

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
        for client in getattr(self, "_clients", {}).values():
            await client.close()
        if gateway is not None:
            gateway.close()


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

"""The gateway as a Ray Serve deployment: the application's ingress, with or without a front end of Serve's.

- With HAProxy requests come by connections of our own, see `front`. When the replica is to stop, Serve waits
  for the open requests before it calls `__del__`.
- With `proxy_location: Disabled` the gateway listens itself, see `front.own_port`; `__del__` waits for them.
- With Serve's proxy in Python, Serve hands every request to the ASGI app.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.engines.engine import ASGIApp, Message, Receive, Scope, Send
from serve_app.errors import SettingsError
from serve_app.serving.autoscaling import CPU_CORES
from serve_app.serving.channel.gateway_client import GatewayClient
from serve_app.serving.channel.messages import Role
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.discovery import locator
from serve_app.serving.gateway.app import Gateway
from serve_app.serving.gateway.endpoint_admin import PoolWatcher
from serve_app.serving.gateway.front.connection import serve_front_end
from serve_app.serving.gateway.front.of_serve import front_of_serve
from serve_app.serving.gateway.front.own_port import OwnPort
from serve_app.serving.gateway.settings import GatewaySettings
from serve_app.serving.memory import keep_memory

logger = logging.getLogger("ray.serve")

_REQUEST_ID = b"x-request-id"
_LOOPBACK = "127.0.0.1"
# Between the end of what is cut and that of the process.
_STOP_MARGIN_S = 2.0


class GatewayDeployment:
    """Runs one `Gateway` in a Serve replica.

    Args:
        settings: what it serves, to whom.
        channel: how it keeps in touch with the schedulers.
        schedulers: the handle of each model's scheduler, by the model's name.
        names: the model that each name belongs to, aliases included.
        endpoints: the watcher of each pool of endpoints, by model and pool.
        others: handles of pools and tuners, which keep these in the same application.

    Raises:
        SettingsError: everybody who reaches this machine would be let in, or Serve is asked for a front end's
            work and for none.
        PortError: it cannot listen on the application's address.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it, which mypy cannot know
        self,
        settings: GatewaySettings,
        channel: ChannelSettings,
        schedulers: Mapping[str, DeploymentHandle[Any]],
        names: Mapping[str, str],
        endpoints: Mapping[str, Mapping[str, DeploymentHandle[Any]]],
        others: Sequence[DeploymentHandle[Any]],  # noqa: ARG002 - binds them to the application
    ) -> None:
        # Asking the controller blocks.
        front = await asyncio.to_thread(front_of_serve)
        settings.check_exposure(front.options.host or _LOOPBACK)
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
        self._gateway = Gateway(settings, dispatchers, gateway_id, self._clients, channel.tls, watchers)
        for client in self._clients.values():
            client.start()
        self._drain_s = front.drain_s
        self._own_port: OwnPort | None = None
        if front.route is not None:
            self._own_port = OwnPort(self._gateway, front.options, front.route, front.application)
            await self._own_port.start()
        keep_memory()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """What Serve serves; called once, after the constructor."""
        serve_front_end(self._gateway)
        return without_request_id(self._gateway)

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Take other settings; see `Gateway.change`.

        Settings that cannot be are logged, and those of before hold: an error here would make Serve end a
        gateway that serves well, for one that cannot start.
        """
        try:
            self._gateway.change(user_config)
        except SettingsError as error:
            logger.error(  # noqa: TRY400 - the message says all
                "event=settings_refused reason=%r action='those of before stay in force'", str(error)
            )

    # Serve would begin a thread for each call of a plain function.
    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Cores that this process has used since Serve asked last, see `serving.autoscaling`."""
        return {CPU_CORES: self._cpu.cores()}

    async def open_requests(self) -> int:
        """Requests whose answers are not complete."""
        return self._gateway.open_requests

    async def drain(self, drain_s: float, retry_after_s: float) -> int:
        """See `Gateway.drain`."""
        return await self._gateway.drain(drain_s, retry_after_s)

    def check_health(self) -> None:
        """Raise `ServerEndedError` when its own port takes no requests."""
        if self._own_port is not None:
            self._own_port.check_health()

    async def __del__(self) -> None:
        if (port := getattr(self, "_own_port", None)) is not None:
            # Serve ends the process when the time is over.
            await port.stop(max(0.0, self._drain_s - _STOP_MARGIN_S))
        for client in getattr(self, "_clients", {}).values():
            await client.close()
        if (gateway := getattr(self, "_gateway", None)) is not None:
            gateway.close()


class CpuMeter:
    """How busy this process is."""

    def __init__(self) -> None:
        self._last = time.monotonic(), time.process_time()

    def cores(self) -> float:
        """Cores that it has used since the last call, or since the meter was made."""
        (began, used), self._last = self._last, (time.monotonic(), time.process_time())
        passed_s, used_s = self._last[0] - began, self._last[1] - used
        return used_s / passed_s if passed_s > 0 else 0.0


def without_request_id(app: ASGIApp) -> ASGIApp:
    """Leave `x-request-id` out of the app's answers, because Serve adds it to every answer itself.

    Serve's value is the client's own, or one that Serve made and put into the request for the app to read, so
    both would be the same; sent twice, a client would join them into one that nobody knows.
    """

    async def serve_request(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_once(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [pair for pair in message["headers"] if pair[0].lower() != _REQUEST_ID]
            await send(message)

        await app(scope, receive, send_once)

    return serve_request


def _watcher_of(handle: DeploymentHandle[Any]) -> PoolWatcher:
    async def described() -> list[dict[str, object]]:
        found: list[dict[str, object]] = await handle.described.remote()
        return found

    async def change(action: str, url: str) -> dict[str, object]:
        answer: dict[str, object] = await handle.change.remote(action, url)
        return answer

    return PoolWatcher(described, change)

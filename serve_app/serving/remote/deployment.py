"""The watcher of a pool's endpoints as a Ray Serve deployment: one small process for all endpoints."""

from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.serving.channel.messages import Role
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.discovery import locator
from serve_app.serving.remote.choices import EndpointChoices
from serve_app.serving.remote.settings import RemoteSettings
from serve_app.serving.remote.watcher import EndpointWatcher
from serve_app.serving.state.store import StateStore
from serve_app.serving.versions import ALL_AT_ONCE_PERCENT

# One replica, because two would register the same endpoint. Until a dead one is replaced, gateways finish
# running requests, and new ones wait. A changed one stops once its successor has found an endpoint that can
# be used; for the moments in between, the scheduler keeps the latest registration of each endpoint.
WATCHER_DEPLOYMENT_OPTIONS: dict[str, Any] = {
    "num_replicas": 1,
    "max_surge_percent": ALL_AT_ONCE_PERCENT,
    "health_check_period_s": 1.0,
    "graceful_shutdown_wait_loop_s": 0.1,
    "graceful_shutdown_timeout_s": 10.0,
}


class EndpointsDeployment:
    """Serve deployment that runs one `EndpointWatcher`; without a `state_uri`, nothing is persisted."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it, which mypy cannot know
        self,
        scope: str,
        pool: str,
        settings: RemoteSettings,
        channel: ChannelSettings,
        scheduler: DeploymentHandle[Any],
        state_uri: str | None,
    ) -> None:
        application = serve.get_replica_context().app_name
        store = None if state_uri is None else StateStore(state_uri, "endpoints", f"{application}/{scope}")
        self._watcher = EndpointWatcher(
            pool,
            settings,
            channel,
            locator(scheduler, Role.REPLICA),
            EndpointChoices(store),
            scheduler.show_endpoints.remote,
        )
        await self._watcher.start()

    async def check_health(self) -> None:
        """Raise if the watcher must be replaced."""
        self._watcher.check_health()

    async def described(self) -> list[dict[str, object]]:
        """Return a description of each endpoint."""
        return self._watcher.describe()

    async def change(self, action: str, url: str) -> dict[str, object]:
        """See `EndpointWatcher.change`."""
        return await self._watcher.change(action, url)

    async def __del__(self) -> None:
        # Serve awaits this once before it ends the process; Python would not await it.
        if hasattr(self, "_watcher"):
            await self._watcher.close()

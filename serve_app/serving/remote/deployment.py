"""The watcher of a pool's endpoints as a Ray Serve deployment: one small process for all endpoints."""

from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.serving._ray import read_record, write_record
from serve_app.serving.channel.messages import Role
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.discovery import locator
from serve_app.serving.remote.choices import EndpointChoices
from serve_app.serving.remote.settings import RemoteSettings
from serve_app.serving.remote.watcher import EndpointWatcher
from serve_app.serving.state.store import StateStore
from serve_app.serving.versions import ALL_AT_ONCE_PERCENT
from serve_app.serving.watchdog import start_watchdog

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


class ChoicesStore(StateStore):
    """Store of a pool's `EndpointChoices`, which a new watcher loads after a deployment.

    A copy is in Ray's control service. It outlives the watcher, but only a `state_uri` outlives the cluster.
    """

    def __init__(self, state_uri: str | None, name: str) -> None:
        super().__init__(state_uri or "ray:", "endpoints", name)
        self.outlives_cluster = state_uri is not None
        self._record = f"endpoints/{name}"

    def _read(self) -> bytes | None:
        stored = super()._read() if self.outlives_cluster else None
        if stored is None and (stored := read_record(self._record)) is not None:
            # The deployment may have added the `state_uri`.
            self._write(stored)
        return stored

    def _write(self, data: bytes) -> None:
        write_record(self._record, data)
        if self.outlives_cluster:
            super()._write(data)


class EndpointsDeployment:
    """Serve deployment that runs one `EndpointWatcher`."""

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
        self._watcher = EndpointWatcher(
            pool,
            settings,
            channel,
            locator(scheduler, Role.REPLICA),
            EndpointChoices(ChoicesStore(state_uri, f"{application}/{scope}")),
            scheduler.show_endpoints.remote,
        )
        await self._watcher.start()
        self._watchdog = start_watchdog()

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

"""A pool replica as a Ray Serve deployment: Ray places, health-checks and stops it.

Requests use the replica's own port, so Serve does not count them. Therefore the replica drains in `__del__`,
and its scheduler decides the number of replicas.
"""

from typing import Any

import ray.util
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.engines.engine import EngineSettings
from serve_app.serving.channel.messages import Role
from serve_app.serving.discovery import locator
from serve_app.serving.pool.replica import PoolReplica, PoolReplicaSettings
from serve_app.serving.watchdog import start_watchdog

# Serve replaces a replica after three failed checks in a row. A dead engine does not recover, so a longer
# period would only delay its replacement.
HEALTH_CHECK_PERIOD_S = 1.0


class PoolDeployment:
    """Serve deployment that runs one `PoolReplica`.

    The constructor returns once the engine serves, which takes minutes for a large model. Serve waits without
    a limit, and logs a slow start.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it, which mypy cannot know
        self, settings: PoolReplicaSettings, engine: EngineSettings, scheduler: DeploymentHandle[Any]
    ) -> None:
        replica_id = serve.get_replica_context().replica_id.unique_id
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._replica = PoolReplica(
            replica_id, host, settings, engine.make(), locator(scheduler, Role.REPLICA)
        )
        await self._replica.start()
        self._watchdog = start_watchdog()

    async def check_health(self) -> None:
        """Raise if the replica must be replaced."""
        await self._replica.check_health()

    async def __del__(self) -> None:
        # Serve awaits this once before it ends the process; Python would not await it.
        if hasattr(self, "_replica"):
            await self._replica.stop()

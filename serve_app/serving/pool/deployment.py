"""A pool replica as a Ray Serve deployment: Ray places it, checks its health and stops it.

Serve does not count the requests, because they use the replica's own port. So the replica drains in
`__del__`, and its scheduler decides how many there are.
"""

from typing import Any

import ray.util
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.engines.engine import EngineSettings
from serve_app.serving.channel.messages import Role
from serve_app.serving.discovery import locator
from serve_app.serving.pool.replica import PoolReplica, PoolReplicaSettings

# Serve replaces a replica after three failed checks in a row. An engine that is dead stays dead, so every
# second until its replacement is lost.
HEALTH_CHECK_PERIOD_S = 1.0


class PoolDeployment:
    """Runs one `PoolReplica` in a Serve replica.

    The constructor returns when the engine serves, which takes minutes for a large model. Serve waits without
    limit, and logs that the start is slow.
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

    async def check_health(self) -> None:
        """Raise when the replica must be replaced."""
        await self._replica.check_health()

    async def __del__(self) -> None:
        # Serve awaits this once before it ends the process; Python itself would not await it.
        if hasattr(self, "_replica"):
            await self._replica.stop()

"""Deployments on Ray Serve: the scheduler's handle, versions of processes, and pool replicas.

- `locator`: finds the scheduler by its Ray handle.
- `with_version`: decides which processes a changed deployment replaces.
- `PoolDeployment`: a pool replica as a deployment: Ray places, health-checks and stops it.

`with_version`. Serve computes one version for all deployments of an application from all its arguments. Any
change of a file would therefore replace every process, engines included. Here each deployment has its own
version, computed from the settings that its processes cannot change while they run (`cold`). Other settings
are applied in place as `user_config`. The release of this project is part of every version, and Serve itself
compares the runtime environment and resources.

A successor starts before the old process drains, so that pools stay available.

`PoolDeployment`. Requests use the replica's own port, so Serve does not count them. Therefore the replica
drains in `__del__`, and its scheduler decides the number of replicas.
"""

import hashlib
import json
from typing import Any

import ray.util
from pydantic_core import to_jsonable_python
from ray import serve
from ray.serve import Deployment
from ray.serve.handle import DeploymentHandle

from serve_app import __version__
from serve_app.engines.engine import EngineSettings
from serve_app.serving._ray import set_version
from serve_app.serving.channel.connector import Locate
from serve_app.serving.channel.messages import Role, SchedulerEndpoint
from serve_app.serving.pool import PoolReplica, PoolReplicaSettings
from serve_app.serving.watchdog import start_watchdog


def locator(scheduler: DeploymentHandle[Any], role: Role) -> Locate:
    """Return a function that finds the scheduler, with the secret of a role."""

    async def locate() -> SchedulerEndpoint:
        endpoint: SchedulerEndpoint = await scheduler.endpoint.remote(role.value)
        return endpoint

    return locate


# All successors may start before anything stops, for processes that cost next to nothing.
ALL_AT_ONCE_PERCENT = 100
_VERSION_CHARACTERS = 16


def with_version(deployment: Deployment, *cold: object) -> Deployment:
    """Set a version that changes only with `cold`, and return the deployment."""
    set_version(deployment, version_of(*cold))
    return deployment


def version_of(*cold: object) -> str:
    """Return a digest that is equal for equal values, in every process."""
    plain = to_jsonable_python([__version__, *cold], inf_nan_mode="constants")
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:_VERSION_CHARACTERS]


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

"""Discovery of the scheduler by its Ray handle."""

from typing import Any

from ray.serve.handle import DeploymentHandle

from serve_app.serving.channel.connector import Locate
from serve_app.serving.channel.messages import Role, SchedulerEndpoint


def locator(scheduler: DeploymentHandle[Any], role: Role) -> Locate:
    """Return a function that finds the scheduler, with the secret of a role."""

    async def locate() -> SchedulerEndpoint:
        endpoint: SchedulerEndpoint = await scheduler.endpoint.remote(role.value)
        return endpoint

    return locate

"""How gateways and replicas find the scheduler of their model: by its Ray handle, for their role."""

from typing import Any

from ray.serve.handle import DeploymentHandle

from serve_app.serving.channel.connector import Locate
from serve_app.serving.channel.messages import Role, SchedulerEndpoint


def locator(scheduler: DeploymentHandle[Any], role: Role) -> Locate:
    """What finds the scheduler, with the secret that lets this role in."""

    async def locate() -> SchedulerEndpoint:
        endpoint: SchedulerEndpoint = await scheduler.endpoint.remote(role.value)
        return endpoint

    return locate

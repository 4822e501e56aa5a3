"""Ray handles and versions of deployments: discovery of the scheduler, and what a change replaces."""

import hashlib
import json
from typing import Any

from pydantic_core import to_jsonable_python
from ray.serve import Deployment
from ray.serve.handle import DeploymentHandle

from serve_app import __version__
from serve_app.serving._ray import set_version
from serve_app.serving.channel.connector import Locate
from serve_app.serving.channel.messages import Role, SchedulerEndpoint


def locator(scheduler: DeploymentHandle[Any], role: Role) -> Locate:
    """What finds the scheduler, with the secret that lets this role in."""

    async def locate() -> SchedulerEndpoint:
        endpoint: SchedulerEndpoint = await scheduler.endpoint.remote(role.value)
        return endpoint

    return locate


# Which processes a deployment of other settings replaces, and how Ray Serve replaces them.
#
# Serve gives all deployments of an application one version, made of all its arguments. So any change of a
# file would replace every process, engines included. Here each deployment has a version of its own, made of
# the settings that its processes cannot change while they run (`cold`). The others reach them as
# `user_config`, in place. A release of this project is part of every version, and Serve itself compares the
# runtime environment and resources.
#
# A process is replaced by one that starts before the old one drains, so that no pool is away meanwhile.


# Everything may start before anything stops: for processes that cost next to nothing.
ALL_AT_ONCE_PERCENT = 100
_VERSION_CHARACTERS = 16


def with_own_version(deployment: Deployment, *cold: object) -> Deployment:
    """The deployment, with a version that changes only with these values.

    Args:
        cold: what its processes are made of and cannot change.
    """
    set_version(deployment, version_of(*cold))
    return deployment


def version_of(*cold: object) -> str:
    """A word that is the same for equal values, in every process."""
    plain = to_jsonable_python([__version__, *cold], inf_nan_mode="constants")
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:_VERSION_CHARACTERS]

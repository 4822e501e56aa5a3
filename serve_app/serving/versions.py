"""Versions of deployments: decide which processes a changed deployment replaces, and how.

Serve computes one version for all deployments of an application from all its arguments. Any change of a
file would therefore replace every process, engines included. Here each deployment has its own version,
computed from the settings that its processes cannot change while they run (`cold`). Other settings are
applied in place as `user_config`. The release of this project is part of every version, and Serve itself
compares the runtime environment and resources.

A successor starts before the old process drains, so that pools stay available.
"""

import hashlib
import json

from pydantic_core import to_jsonable_python
from ray.serve import Deployment

from serve_app import __version__
from serve_app.serving._ray import set_version

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

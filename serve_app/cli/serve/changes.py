"""Effects of a changed configuration on the processes of a running application."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ray.serve import Application, Deployment
from ray.serve.deployment import deployment_to_schema

from serve_app.serving._ray import deployments_of, own_version
from serve_app.settings.application import find_application

# Options of a deployment that belong to a process: Serve replaces it if one differs.
_OF_A_PROCESS = (
    "ray_actor_options",
    "placement_group_bundles",
    "placement_group_strategy",
    "max_replicas_per_node",
)
_MISSING = object()
# Keys of a file that take effect when Serve starts.
_NEED_A_RESTART = ("http_options", "proxy_location", "grpc_options")


STARTED = "started"
STOPPED = "stopped, after its requests"
REPLACED = "replaced: each process serves until its successor does"
REPLACED_IN_TURN = "replaced: each process stops before its successor starts"
CHANGED = "changed without a restart"
UNCHANGED = ""
"""Effects of a change on the processes of a deployment, as `deploy` shows them."""
IN_PLACE = frozenset({CHANGED, UNCHANGED})
"""Effects that start and stop no process."""


@dataclass(frozen=True, slots=True)
class Change:
    """Difference between two configurations.

    Attributes:
        settings: paths of the settings that differ, without their values, which may be secrets.
        effects: effect by deployment.
        after_restart: the file's keys that differ and take effect only when Ray Serve starts again.
    """

    settings: tuple[str, ...]
    effects: Mapping[str, str]
    after_restart: tuple[str, ...]


def change(before: Mapping[str, Any], old: Application, after: Mapping[str, Any], new: Application) -> Change:
    """Compare two configurations of one application, and the applications built from them."""
    settings = tuple(differences(_application(before), _application(after)))
    after_restart = tuple(
        path
        for key in _NEED_A_RESTART
        if key in before
        for path in differences(before[key], after.get(key), key)
    )
    return Change(settings, effects(deployments_of(old), deployments_of(new)), after_restart)


def effects(before: Mapping[str, Deployment], after: Mapping[str, Deployment]) -> dict[str, str]:
    """Return the effect on each deployment."""
    found = {
        name: _effect(before[name], deployment) if name in before else STARTED
        for name, deployment in after.items()
    }
    return found | {name: STOPPED for name in before if name not in after}


def _effect(before: Deployment, after: Deployment) -> str:
    old, new = (dict(deployment_to_schema(each)) for each in (before, after))
    if own_version(before) != own_version(after) or any(old[name] != new[name] for name in _OF_A_PROCESS):
        surge = new["max_surge_percent"]
        return REPLACED if isinstance(surge, int) and surge > 0 else REPLACED_IN_TURN
    return UNCHANGED if old == new else CHANGED


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield the paths at which two values of YAML differ, such as `models[0].scheduler.max_waiting`."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys([*before, *after]):
            below = f"{path}.{key}" if path else str(key)
            yield from differences(before.get(key, _MISSING), after.get(key, _MISSING), below)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, f"{path}[{number}]")
    elif before != after:
        yield path


def _application(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of the application, and its other keys."""
    ours = dict(find_application(content)[1])
    return {**ours.pop("args", {}), **ours}

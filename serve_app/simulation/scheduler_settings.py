"""The scheduler's settings in a simulated run: those of production, with two exceptions.

No request is denied for a full queue, because a policy that refuses work would look fast. And the gate on the
time per output token (`backpressure.tpot_gate_s`) is off. It trades throughput for decoding speed, which is
the operator's choice and no part of an ordering policy. Its price is paid by the policies whose time per
output token reaches it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from serve_app.errors import SettingsError
from serve_app.routing.pools import RoutingSettings
from serve_app.scheduling import SchedulerSettings
from serve_app.simulation.workload import MODEL

# More than any trace holds.
_UNLIMITED = 1_000_000_000

_ADAPTER = TypeAdapter(SchedulerSettings)


def scheduler_settings(
    policy: str, routing: RoutingSettings, changes: Mapping[str, object]
) -> SchedulerSettings:
    """Settings of one run.

    Args:
        policy: name of the ordering policy.
        routing: the fleet's pools.
        changes: values by dotted path, such as `backpressure.target_waiting`.

    Raises:
        SettingsError: there is no setting of that path, or it cannot have that value.
    """
    tree: dict[str, Any] = {
        "model": MODEL,
        "max_waiting": _UNLIMITED,
        "backpressure": {"tpot_gate_s": None},
    }
    for path, value in changes.items():
        _plant(tree, path, value)
    # These follow from the arguments: the fleet decides which pools there are.
    for owned in ("policy", "model", "routing.pools", "routing.b_short_tokens"):
        if owned in changes:
            raise SettingsError(f"{owned} is not to be set: it follows from the policy and the fleet")
    try:
        settings = _ADAPTER.validate_python(tree)
    except ValidationError as error:
        raise SettingsError(f"these scheduler settings do not work: {error}") from error
    chosen = settings.routing
    routing = replace(routing, spill=chosen.spill, adaptive_b_short=chosen.adaptive_b_short)
    return replace(settings, policy=policy, routing=routing)


def _plant(tree: dict[str, Any], path: str, value: object) -> None:
    *branches, leaf = path.split(".")
    for branch in branches:
        tree = tree.setdefault(branch, {})
        if not isinstance(tree, dict):
            raise SettingsError(f"{path} cannot be set below {branch!r}, which has a value itself")
    tree[leaf] = value

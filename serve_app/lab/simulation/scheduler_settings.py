"""Scheduler settings of a simulated run: those of production, with two exceptions.

No request is denied for a full queue, because a policy that rejects work would look fast. And the gate on the
time per output token (`backpressure.tpot_gate_s`) is off. It trades throughput for decoding speed, which is
the operator's choice and not part of an ordering policy, and it affects only the policies whose time per
output token reaches it.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from serve_app.core import SchedulerSettings
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.settings_base import ADVANCED, block_of, describe, read
from serve_app.errors import SettingsError
from serve_app.lab.simulation.workload import MODEL

# More than any trace contains.
_UNLIMITED = 1_000_000_000

# Routing settings that follow from the fleet.
_OF_THE_FLEET = ("pools", "b_short_tokens", "boundaries_tokens", "costs")


def scheduler_settings(
    policy: str, routing: RoutingSettings, changes: Mapping[str, object]
) -> SchedulerSettings:
    """Return the settings of one run.

    Args:
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
        set_path(tree, _known(path), value)
    # These follow from the arguments: the fleet defines the pools.
    for owned in ("policy", "model", *(f"routing.{name}" for name in _OF_THE_FLEET)):
        if owned in changes:
            raise SettingsError(f"{owned} cannot be set, because it follows from the policy and the fleet")
    try:
        settings = read(SchedulerSettings, tree, as_file=False)
    except SettingsError as error:
        raise SettingsError("; ".join(str(error).splitlines())) from error
    of_the_fleet = {name: getattr(routing, name) for name in _OF_THE_FLEET}
    routing = replace(settings.routing, **of_the_fleet)
    return replace(settings, policy=policy, routing=routing)


def set_path(tree: dict[str, Any], path: str, value: object) -> None:
    """Set the value under a dotted path of nested mappings.

    Raises:
        SettingsError: a part of the path has a value itself.
    """
    *branches, leaf = path.split(".")
    for branch in branches:
        tree = tree.setdefault(branch, {})
        if not isinstance(tree, dict):
            raise SettingsError(f"{path} cannot be set below {branch!r}, which has a value itself")
    tree[leaf] = value


def _known(path: str) -> str:
    """Return the path of a setting without `advanced`, which files use as a block and may omit here.

    Raises:
        SettingsError: there is no such setting.
    """
    steps = [step for step in path.split(".") if step != ADVANCED.value]
    plain = ".".join(steps)
    known = dict(_paths(SchedulerSettings))
    values = (each for each, is_block in known.items() if not is_block)
    if plain in known or any(plain.startswith(f"{each}.") for each in values):
        return plain
    same_name = [each for each in known if each.rpartition(".")[2] == steps[-1]]
    near = same_name or difflib.get_close_matches(plain, known, n=1)
    raise SettingsError(f"{path}: unknown key" + (f"; did you mean {near[0]}?" if near else ""))


def _paths(block: type, above: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the path of every setting, and whether it is a block of others."""
    for setting in describe(block):
        inner = block_of(setting.kind)
        yield above + setting.name, inner is not None
        if inner is not None:
            yield from _paths(inner, f"{above}{setting.name}.")

"""The fleet of a configuration file, for the simulator: the pools of a model, with their engines' limits.

Only what a simulated replica needs is read. Whether the file is right in all else, `check` says.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from serve_app.errors import SettingsError
from serve_app.routing.pools import RoutingSettings
from serve_app.simulation.fleet import EngineChanges, FleetSettings, PoolChanges

_CHANGES = tuple(EngineChanges.__dataclass_fields__)
_POOL = TypeAdapter(PoolChanges)


def fleet_of_file(path: Path, profile: str) -> FleetSettings:
    """The pools of the first model in a file.

    Args:
        profile: of engines that are not emulated, so that the file names none.

    Raises:
        SettingsError: the file holds no such model, or its pools cannot be simulated.
    """
    try:
        model = yaml.safe_load(path.read_text(encoding="utf-8"))["applications"][0]["args"]["models"][0]
        pools = {pool["name"]: pool for pool in model["pools"]}
        by_pool = {name: _changes(name, pool) for name, pool in pools.items()}
        routing = _block(model, "scheduler").get("routing") or {}
        return FleetSettings(
            profile=profile,
            replicas={name: _replicas(pool) for name, pool in pools.items()},
            b_short_tokens=routing.get("b_short_tokens") or _b_short(list(by_pool.values())),
            by_pool=by_pool,
        )
    except (OSError, yaml.YAMLError, KeyError, IndexError, TypeError, ValidationError) as exc:
        raise SettingsError(f"{path} holds no pools to simulate ({exc!r}): what does `check` say?") from exc


def _block(owner: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A block with its `advanced` settings beside the others."""
    block = dict(owner.get(name) or {})
    return block | dict(block.pop("advanced", None) or {})


def _replicas(pool: Mapping[str, Any]) -> int:
    """A fixed number, or the most that autoscaling allows."""
    scaled = (pool.get("autoscaling") or {}).get("max_replicas")
    return int(pool.get("replicas") or scaled or 1)


def _changes(name: str, pool: Mapping[str, Any]) -> PoolChanges:
    engines = pool["engine"]
    if "emulated" in engines:
        engine = _block(engines, "emulated")
        # An emulated engine has no limit unless it is given one, and the laptop's profile.
        engine = {"profile": "laptop", "long_prefill_token_threshold": 0} | engine
    elif "vllm" in engines:
        engine = dict(engines["vllm"].get("args") or {})
    else:
        raise SettingsError(f"pool {name} has remote engines, whose speed is not known: simulate --pools")
    advanced = dict(pool.get("advanced") or {})
    return _POOL.validate_python(
        {
            "profile": engine.get("profile"),
            "engine": {each: engine[each] for each in _CHANGES if engine.get(each) is not None},
            **{each: advanced[each] for each in ("cost", "boundary_tokens") if each in advanced},
        }
    )


def _b_short(pools: list[PoolChanges]) -> int:
    """As for a served model (`WrittenRouting.b_short_tokens`)."""
    usual, context = RoutingSettings().b_short_tokens, pools[0].engine.max_model_len
    if context is None:
        return usual
    return context if len(pools) > len(RoutingSettings().pools) else min(usual, context)

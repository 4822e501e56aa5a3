"""Fills in what a settings file need not say twice.

A component's settings are complete in themselves: the scheduler names its model, the gateway lists what it
serves, an engine knows under which names it answers. In a file all this stands once, with the model; here it
is copied to where it is needed, before anything is parsed. Whatever is malformed is left as it is, for the
parser to refuse.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.engine_model.profiles import load_profile
from serve_app.engines.emulated.engine import EmulatedEngineSettings
from serve_app.errors import SettingsError
from serve_app.routing.pools import RoutingSettings


def with_inherited_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an application, with every component's inherited keys in place.

    Raises:
        SettingsError: a key is given where it is inherited.
    """
    models = _list_of_mappings(raw.get("models"))
    gateway = raw.get("gateway") or {}
    if models is None or not isinstance(gateway, Mapping):
        return dict(raw)
    _refuse("gateway", gateway, ("models",))
    served = [entry for model in models for entry in _served(model)]
    return {
        **raw,
        "models": [_model(f"models[{index}]", model) for index, model in enumerate(models)],
        "gateway": {**gateway, "models": served},
    }


def _model(where: str, model: Mapping[str, Any]) -> dict[str, Any]:
    pools = _list_of_mappings(model.get("pools"))
    scheduler = model.get("scheduler") or {}
    routing = scheduler.get("routing") or {} if isinstance(scheduler, Mapping) else None
    if pools is None or not isinstance(scheduler, Mapping) or not isinstance(routing, Mapping):
        return dict(model)
    _refuse(f"{where}.scheduler", scheduler, ("model", "aliases"))
    _refuse(f"{where}.scheduler.routing", routing, ("pools",))
    names = {
        key: model[source] for key, source in (("model", "name"), ("aliases", "aliases")) if source in model
    }
    complete = {**_b_short(pools), **routing, "pools": [pool.get("name") for pool in pools]}
    return {
        **model,
        "pools": [_pool(pool, model) for pool in pools],
        "scheduler": {**scheduler, **names, "routing": complete},
    }


def _b_short(pools: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """A token budget that nobody chose is at most what the first of two pools can hold."""
    limits = [limit for pool in pools[:1] if (limit := _max_model_len(pool)) is not None]
    return (
        {"b_short_tokens": min(*limits, RoutingSettings().b_short_tokens)}
        if limits and len(pools) == 2
        else {}
    )


def _pool(pool: Mapping[str, Any], model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Engines answer under the names of their model, because bodies reach them as clients wrote them."""
    engine = pool.get("engine")
    if not isinstance(engine, Mapping) or "name" not in model:
        return pool
    return {**pool, "engine": {kind: _named(inner, model) for kind, inner in engine.items()}}


def _named(engine: Any, model: Mapping[str, Any]) -> Any:
    if engine is None:
        engine = {}
    return {"served_model_names": _names(model), **engine} if isinstance(engine, Mapping) else engine


def _served(model: Mapping[str, Any]) -> list[dict[str, Any]]:
    limits = [_max_model_len(pool) for pool in _list_of_mappings(model.get("pools")) or []]
    known = [limit for limit in limits if limit is not None]
    longest = max(known) if known and len(known) == len(limits) else None
    return [{"name": name, "max_model_len": longest} for name in _names(model)]


def _names(model: Mapping[str, Any]) -> list[Any]:
    aliases = model.get("aliases") or []
    return [model.get("name"), *(aliases if isinstance(aliases, list | tuple) else [])]


def _max_model_len(pool: Mapping[str, Any]) -> int | None:
    """What a pool's engine holds, as far as it is said; `EngineSettings.max_model_len` before parsing."""
    engine = pool.get("engine")
    for kind, inner in engine.items() if isinstance(engine, Mapping) else ():
        given = inner if isinstance(inner, Mapping) else {}
        place = given.get("args") if kind == "vllm" else given
        stated = place.get("max_model_len") if isinstance(place, Mapping) else None
        if isinstance(stated, int):
            return stated
        if kind == "emulated":
            with contextlib.suppress(SettingsError):
                return load_profile(str(given.get("profile", EmulatedEngineSettings().profile))).max_model_len
    return None


def _list_of_mappings(value: Any) -> Sequence[Mapping[str, Any]] | None:
    if isinstance(value, list | tuple) and all(isinstance(entry, Mapping) for entry in value):
        return value
    return None


def _refuse(where: str, given: Mapping[str, Any], inherited: Sequence[str]) -> None:
    for key in inherited:
        if key in given:
            raise SettingsError(f"{where}.{key} is not given here: it follows from models")

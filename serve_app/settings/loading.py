"""Loading of settings: from a file to complete settings. The only place where YAML becomes typed settings.

The address on which an application listens, from the content of its configuration.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import yaml

from serve_app.core.policies import POLICIES
from serve_app.core.routing.pools import RoutingConfig, RoutingSettings
from serve_app.core.settings import SchedulerConfig, SchedulerSettings
from serve_app.core.settings_base import read
from serve_app.errors import SettingsError
from serve_app.serving.gateway.settings import GatewayConfig, GatewaySettings, ServedModel
from serve_app.settings.application import (
    ApplicationConfig,
    ApplicationSettings,
    ModelConfig,
    ModelSettings,
    PoolSettings,
)

DEFAULT_PORT = 8000
DEFAULT_HOST = "0.0.0.0"  # noqa: S104 - Ray Serve's default, which is only checked here

_BLOCK = "http_options"


def http_address(content: Mapping[str, Any]) -> tuple[str, int]:
    """Return the host and port on which the application listens."""
    options = content.get(_BLOCK) or {}
    return str(options.get("host", DEFAULT_HOST)), int(options.get("port", DEFAULT_PORT))


def with_port(content: Mapping[str, Any], port: int | None) -> Mapping[str, Any]:
    """Return the content with another port; unchanged for None."""
    if port is None:
        return content
    options = content.get(_BLOCK)
    return {**content, _BLOCK: {**(options if isinstance(options, Mapping) else {}), "port": port}}


# -- completion: passes what follows from the models to every component -------------------------------------
#
# The scheduler receives the names of its model and pools, the gateway the models that it serves, and an
# engine the names that it serves. Checks that no component can do alone are here: unique names, pools in the
# order of their context, a token budget that fits its pool, engines that accept priorities if requests carry
# them.


Complete = TypeVar("Complete")

_TWO = 2


def resolve(config: ApplicationConfig) -> ApplicationSettings:
    """Derive complete settings from those of a file.

    Raises:
        SettingsError: parts of the settings contradict each other.
    """
    names = [name for model in config.models for name in model.names]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingsError(
            f"several models have the same name: {', '.join(twice)}; names and aliases must differ"
        )
    served = tuple(each for model in config.models for each in _served(model))
    return _completed(
        ApplicationSettings,
        config,
        models=tuple(_model(f"models[{index}]", model) for index, model in enumerate(config.models)),
        gateway=_completed(GatewaySettings, config.gateway, models=served),
    )


def _completed(cls: type[Complete], config: Any, **known: object) -> Complete:
    """Create a `cls` from an instance of its base class; `known` overrides and adds fields."""
    return cls(**{each.name: getattr(config, each.name) for each in fields(config)} | known)


def _model(where: str, model: ModelConfig) -> ModelSettings:
    if model.scheduler.policy not in POLICIES:
        raise SettingsError(
            f"{where}.scheduler.policy must be one of {', '.join(POLICIES)}, got {model.scheduler.policy!r}; "
            "`simulate --policy` plays further policies, for comparisons"
        )
    with _located(f"{where}.scheduler.routing"):
        routing = _routing(model)
    with _located(f"{where}.scheduler"):
        scheduler = _completed(
            SchedulerSettings,
            model.scheduler,
            model=model.name,
            aliases=model.aliases,
            routing=routing,
            price=model.price,
            budget_per_hour=model.budget_per_hour,
            on_demand_pools=tuple(pool.name for pool in model.pools if pool.starts_on_demand),
        )
    # Engines serve the model's names, because bodies are forwarded as clients wrote them.
    pools = tuple(replace(pool, engine=pool.engine.with_served_names(model.names)) for pool in model.pools)
    complete = _completed(ModelSettings, model, pools=pools, scheduler=scheduler)
    _check_pools(where, complete)
    if scheduler.engine_priority.enabled:
        _check_engine_priority(where, pools)
    return complete


@contextmanager
def _located(where: str) -> Iterator[None]:
    try:
        yield
    except ValueError as exc:
        raise SettingsError(f"{where}: {exc}") from exc


def _routing(model: ModelConfig) -> RoutingSettings:
    """Derive the routing settings. A default `b_short_tokens` is limited to the first pool's context."""
    chosen, pools = model.scheduler.routing, model.pools
    budget = chosen.b_short_tokens or RoutingSettings().b_short_tokens
    limit = pools[0].engine.max_model_len if len(pools) > 1 else None
    if chosen.b_short_tokens is None and limit is not None:
        is_boundary_of_contexts = len(pools) > _TWO or pools[1].engine.max_model_len == limit
        budget = limit if is_boundary_of_contexts else min(budget, limit)
    boundaries = tuple(pool.boundary_tokens for pool in pools[1:-1])
    return _completed(
        RoutingSettings,
        chosen,
        pools=tuple(pool.name for pool in pools),
        b_short_tokens=budget,
        boundaries_tokens=boundaries if any(boundaries) else (),
        costs=tuple(pool.cost for pool in pools) if len({pool.cost for pool in pools}) > 1 else (),
    )


def _served(model: ModelConfig) -> Iterator[ServedModel]:
    limits = [pool.engine.max_model_len for pool in model.pools]
    known = [limit for limit in limits if limit is not None]
    longest = max(known) if known and len(known) == len(limits) else None
    on_demand = any(pool.starts_on_demand for pool in model.pools)
    for name in model.names:
        yield ServedModel(
            name=name,
            max_model_len=longest,
            starts_on_demand=on_demand,
            price=model.price,
            targets=model.tuner.targets,
            resume_streams=model.resume_streams,
        )


def _check_pools(where: str, model: ModelSettings) -> None:
    first = model.pools[0]
    for pool, longer in pairwise(model.pools):
        limit, next_limit = pool.engine.max_model_len, longer.engine.max_model_len
        if limit is not None and next_limit is not None and limit > next_limit:
            raise SettingsError(
                f"{where}.pools: pools must be listed by increasing context, got max_model_len {limit:,} "
                f"in {pool.name} before {next_limit:,} in {longer.name}"
            )
    for number, pool in enumerate(model.pools):
        _check_boundary(f"{where}.pools[{number}].boundary_tokens", pool, model.pools)
    if len(model.pools) == 1 or first.engine.max_model_len is None:
        return
    budget = model.scheduler.routing.b_short_tokens
    if budget > first.engine.max_model_len:
        raise SettingsError(
            f"{where}.scheduler.routing.b_short_tokens of {budget:,} exceeds the "
            f"context of pool {first.name} (max_model_len "
            f"{first.engine.max_model_len:,}): lower the first or raise the second"
        )


def _check_boundary(where: str, pool: PoolSettings, pools: tuple[PoolSettings, ...]) -> None:
    boundary, limit = pool.boundary_tokens, pool.engine.max_model_len
    if boundary is None:
        return
    if pool is pools[0]:
        raise SettingsError(
            f"{where}: set scheduler.routing.b_short_tokens, which is the boundary of the first pool"
        )
    if pool is pools[-1]:
        raise SettingsError(
            f"{where}: remove it, because the last pool is the home pool above all other boundaries"
        )
    if limit is not None and boundary > limit:
        raise SettingsError(
            f"{where} of {boundary:,} exceeds the context of pool {pool.name} (max_model_len {limit:,}): "
            "lower the first or raise the second"
        )


def _check_engine_priority(where: str, pools: tuple[PoolSettings, ...]) -> None:
    """Raise if an engine rejects requests with a priority, because it serves in order of arrival."""
    for number, pool in enumerate(pools):
        hosted = pool.engine.hosted
        if hosted is not None and hosted.schedules_by_priority is False:
            key = f"engine.{pool.engine.kind}.{hosted.PRIORITY_SETTING}"
            raise SettingsError(
                f"{where}.scheduler.engine_priority is enabled, but the engine of pool {pool.name} does not "
                f"schedule by priority: set {where}.pools[{number}].{key} to priority"
            )


# -- reading: unknown keys are rejected by their full name, with the closest known key as a suggestion -------


IMPORT_PATH = "serve_app.app:build_app"

_EXTENDED: Mapping[type, type] = {
    GatewayConfig: GatewaySettings,
    SchedulerConfig: SchedulerSettings,
    RoutingConfig: RoutingSettings,
}


def load_settings(path: Path) -> ApplicationSettings:
    """Load the settings of the one application in a Ray Serve configuration file.

    Raises:
        SettingsError: the file is not such a configuration, or has an unknown key or an invalid value.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as exc:
        raise SettingsError(f"cannot read {path}: {exc}") from exc
    applications = content.get("applications", []) if isinstance(content, Mapping) else []
    ours = [entry for entry in applications if entry.get("import_path") == IMPORT_PATH]
    if len(ours) != 1:
        raise SettingsError(
            f"{path} must have exactly one application with import_path {IMPORT_PATH}, got {len(ours)}"
        )
    return settings_of(ours[0].get("args", {}))


def settings_of(args: object) -> ApplicationSettings:
    """Return the complete settings for an application's arguments as given in a file.

    Raises:
        SettingsError: an argument is unknown, misplaced, out of range, or contradicts another.
    """
    return resolve(config_of(args))


def config_of(args: object) -> ApplicationConfig:
    """Return the settings as the file states them.

    Raises:
        SettingsError: lists everything unknown, misplaced or out of range, one line each.
    """
    return read(ApplicationConfig, args, as_file=True, extended=_EXTENDED)

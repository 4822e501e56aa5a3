"""Completes the settings of an application: what follows from its models reaches every component.

The scheduler learns the names of its model and of its pools, the gateway which models it serves, an engine
under which names it answers. What no component can see by itself is checked here: names that must differ,
pools in the order of their context, a token budget that its pool can hold, engines that take priorities where
they are told one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, TypeVar

from serve_app.errors import SettingsError
from serve_app.routing.pools import RoutingSettings
from serve_app.scheduling.settings import SchedulerSettings
from serve_app.serving.gateway.settings import GatewaySettings, ServedModel
from serve_app.settings.application import AppSettings, ModelSettings, WrittenApplication, WrittenModel
from serve_app.settings.pools import PoolSettings

Complete = TypeVar("Complete")


def resolve(written: WrittenApplication) -> AppSettings:
    """The complete settings of what stands in a file.

    Raises:
        SettingsError: parts of it do not go together.
    """
    names = [name for model in written.models for name in model.names]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingsError(
            f"two models answer to the same name: {', '.join(twice)}; names and aliases must differ"
        )
    served = tuple(each for model in written.models for each in _served(model))
    return _completed(
        AppSettings,
        written,
        models=tuple(_model(f"models[{index}]", model) for index, model in enumerate(written.models)),
        gateway=_completed(GatewaySettings, written.gateway, models=served),
    )


def _completed(cls: type[Complete], written: Any, **known: object) -> Complete:
    """Settings of `cls`, made of a class that it extends; `known` replaces and adds."""
    return cls(**{each.name: getattr(written, each.name) for each in fields(written)} | known)


def _model(where: str, model: WrittenModel) -> ModelSettings:
    with _located(f"{where}.scheduler.routing"):
        routing = _routing(model)
    with _located(f"{where}.scheduler"):
        scheduler = _completed(
            SchedulerSettings, model.scheduler, model=model.name, aliases=model.aliases, routing=routing
        )
    # Bodies reach engines as clients wrote them, so engines answer under the names of their model.
    pools = tuple(replace(pool, engine=pool.engine.serving(model.names)) for pool in model.pools)
    complete = _completed(ModelSettings, model, pools=pools, scheduler=scheduler)
    if len(pools) == 2:
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


def _routing(model: WrittenModel) -> RoutingSettings:
    """A token budget that nobody chose is at most what the first of two pools can hold."""
    chosen = model.scheduler.routing
    budget = chosen.b_short_tokens or RoutingSettings().b_short_tokens
    limit = model.pools[0].engine.max_model_len if len(model.pools) == 2 else None
    if chosen.b_short_tokens is None and limit is not None:
        budget = min(budget, limit)
    names = tuple(pool.name for pool in model.pools)
    return _completed(RoutingSettings, chosen, pools=names, b_short_tokens=budget)


def _served(model: WrittenModel) -> Iterator[ServedModel]:
    limits = [pool.engine.max_model_len for pool in model.pools]
    known = [limit for limit in limits if limit is not None]
    longest = max(known) if known and len(known) == len(limits) else None
    for name in model.names:
        yield ServedModel(name=name, max_model_len=longest)


def _check_pools(where: str, model: ModelSettings) -> None:
    first, second = model.pools
    limit, longer = first.engine.max_model_len, second.engine.max_model_len
    if limit is None:
        return
    if longer is not None and limit >= longer:
        raise SettingsError(
            f"{where}.pools: the pool with the shorter context comes first, got max_model_len {limit:,} in "
            f"{first.name} before {longer:,} in {second.name}"
        )
    budget = model.scheduler.routing.b_short_tokens
    if budget > limit:
        raise SettingsError(
            f"{where}.scheduler.routing.b_short_tokens of {budget:,} exceeds what pool {first.name} holds "
            f"(max_model_len {limit:,}): lower the first or raise the second"
        )


def _check_engine_priority(where: str, pools: tuple[PoolSettings, ...]) -> None:
    """An engine that keeps to the order of arrival refuses every request that comes with a priority."""
    for number, pool in enumerate(pools):
        if pool.engine.schedules_by_priority is False:
            key = f"engine.{'emulated' if pool.engine.emulated else 'vllm.args'}.scheduling_policy"
            raise SettingsError(
                f"{where}.scheduler.engine_priority is enabled, but the engine of pool {pool.name} does not "
                f"schedule by priority: set {where}.pools[{number}].{key} to priority"
            )

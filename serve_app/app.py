"""The composition of an application: the only module that binds deployments to each other.

    serve run configs/local.yaml        import_path: serve_app.app:build_app, args: see `ApplicationConfig`

Each model has one scheduler, one deployment per pool, and a tuner if anything can be tuned. All models share
the gateways, which are the ingress. Arguments of deployments contain nothing random or timed, so a second
deployment of the same settings changes nothing. Each deployment has a separate version
(`serving.deployments`): changed settings replace only the processes that cannot change to them.
"""

import re
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application

from serve_app.errors import SettingsError
from serve_app.serving.autoscaling import gateway_config, pool_config, scheduler_config, tuner_config
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.deployments import (
    ALL_AT_ONCE_PERCENT,
    HEALTH_CHECK_PERIOD_S,
    PoolDeployment,
    with_version,
)
from serve_app.serving.gateway.deployment import GatewayDeployment
from serve_app.serving.gateway.settings import gateway_cold, gateway_hot
from serve_app.serving.pool import PoolReplicaSettings
from serve_app.serving.remote.watcher import WATCHER_DEPLOYMENT_OPTIONS, EndpointsDeployment
from serve_app.serving.scheduler.actor import (
    SCHEDULER_DEPLOYMENT_OPTIONS,
    SchedulerActorSettings,
    SchedulerDeployment,
)
from serve_app.serving.tuner import TUNER_DEPLOYMENT_OPTIONS, TunerDeployment
from serve_app.settings.application import (
    ApplicationSettings,
    GatewayDeploymentSettings,
    ModelSettings,
    PoolSettings,
    settings_of,
)

# Time for a replica to stop its server and its engine after its last answer, before Ray ends the process.
_STOP_MARGIN_S = 30.0
# Time between the end of a gateway's last responses and the end of its process.
_GATEWAY_STOP_MARGIN_S = 5.0
# Serve replaces a process after three failed checks in a row. Until then, clients of a gateway that hangs get
# no answer, and it is assigned new connections. A busy machine delays checks by seconds.
_GATEWAY_CHECK_TIMEOUT_S = 10.0
# The replica's own health check times out before Ray's, because its message names the engine.
_HEALTH_RATIO = 0.8


def build_app(args: Mapping[str, Any]) -> Application:
    """Return the application of a Serve configuration, ready for `serve.run`.

    Raises:
        SettingsError: see `settings_of` and `application_of`.
    """
    return application_of(settings_of(args))


def application_of(settings: ApplicationSettings) -> Application:
    """Return the application with these settings.

    Raises:
        SettingsError: two deployments would have the same name, or vLLM is installed here and rejects the
            arguments of an engine.
    """
    _check_unique_names(settings)
    schedulers = {model.name: _scheduler(model, settings) for model in settings.models}
    pools = {
        name: _pool(model.name, pool, settings.channel, schedulers[model.name])
        for model in settings.models
        for name, pool in zip(_pool_names(model), model.pools, strict=True)
        if pool.engine.remote is None
    }
    endpoints = {
        model.name: {
            pool.name: _endpoints(name, model, pool, settings, schedulers[model.name])
            for name, pool in zip(_pool_names(model), model.pools, strict=True)
            if pool.engine.remote is not None
        }
        for model in settings.models
    }
    tuners = [_tuner(model, schedulers[model.name], settings) for model in settings.models if model.is_tuned]
    names = {name: model.name for model in settings.models for name in model.names}
    gateways = settings.gateways
    deployment = serve.deployment(
        name="gateway",
        **_scale_of(gateways),
        graceful_shutdown_timeout_s=gateways.deregister_s + gateways.drain_timeout_s + _GATEWAY_STOP_MARGIN_S,
        # Serve notices a dead process only by a health check, and until then nothing listens on its port.
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=_GATEWAY_CHECK_TIMEOUT_S,
        # A gateway waits for its requests itself.
        graceful_shutdown_wait_loop_s=0.1,
        ray_actor_options={"num_cpus": gateways.num_cpus},
        max_surge_percent=ALL_AT_ONCE_PERCENT,
        user_config=gateway_hot(settings.gateway),
    )(GatewayDeployment)
    # Bound to the gateway so that they belong to the application; they communicate by other means.
    others = [*pools.values(), *tuners]
    scales = gateways.autoscaling is not None
    with_version(deployment, *gateway_cold(settings.gateway), settings.channel, names, scales)
    return deployment.bind(
        settings.gateway,
        settings.channel,
        schedulers,
        names,
        endpoints,
        gateways.drain_timeout_s,
        gateways.deregister_s,
        others,
    )


def _scale_of(gateways: GatewayDeploymentSettings) -> dict[str, Any]:
    if gateways.autoscaling is None:
        return {"num_replicas": gateways.initial_replicas}
    return {"autoscaling_config": gateway_config(gateways.autoscaling)}


def _scheduler(model: ModelSettings, settings: ApplicationSettings) -> Application:
    actor = SchedulerActorSettings(
        scheduler=model.scheduler,
        channel=settings.channel,
        scope=model.name,
        decision_log=model.decision_log,
        state_uri=settings.state_uri,
        state_interval_s=settings.state_interval_s,
        scaling=model.scaling,
        tuner_after=model.tuner.first_requests if _starts_tuner(model, settings) else None,
    )
    name = _deployment_name("scheduler", model.name)
    scales = any(pool.autoscaling is not None for pool in model.pools) or _starts_tuner(model, settings)
    deployment = serve.deployment(
        name=name,
        # Mostly idle: a decision takes microseconds.
        ray_actor_options={"num_cpus": 0.1},
        user_config=actor.hot(),
        **({"autoscaling_config": scheduler_config(name)} if scales else {"num_replicas": 1}),
        **SCHEDULER_DEPLOYMENT_OPTIONS,
    )(SchedulerDeployment)
    # Ray Serve queries autoscaling metrics only of processes that were autoscaled when they started.
    return with_version(deployment, *actor.cold(), scales).bind(actor)


def _starts_tuner(model: ModelSettings, settings: ApplicationSettings) -> bool:
    """Return whether the scheduler starts the tuner. A tuner with a persisted state starts at once."""
    return model.is_tuned and settings.state_uri is None


def _tuner(model: ModelSettings, scheduler: Application, settings: ApplicationSettings) -> Application:
    starts_later = _starts_tuner(model, settings)
    scale = {"autoscaling_config": tuner_config(_deployment_name("scheduler", model.name))}
    deployment = serve.deployment(
        name=_deployment_name("tuner", model.name),
        # Mostly idle as well; a search limits itself to its share of a core.
        ray_actor_options={"num_cpus": 0.1},
        **(scale if starts_later else {"num_replicas": 1}),
        **TUNER_DEPLOYMENT_OPTIONS,
    )(TunerDeployment)
    with_version(deployment, model.name, model.tuner, settings.state_uri)
    return deployment.bind(model.name, model.tuner, scheduler, settings.state_uri)


def _pool(model: str, pool: PoolSettings, channel: ChannelSettings, scheduler: Application) -> Application:
    engine = pool.engine.hosted
    assert engine is not None, "only called for hosted engines"
    engine.check()
    settings = PoolReplicaSettings(
        pool=pool.name,
        drain_timeout_s=pool.drain_timeout_s,
        health_timeout_s=pool.health_check_timeout_s * _HEALTH_RATIO,
        server=pool.server,
        channel=channel,
    )
    deployment = serve.deployment(
        name=_deployment_name(pool.name, model),
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=pool.health_check_timeout_s,
        graceful_shutdown_timeout_s=pool.drain_timeout_s + _STOP_MARGIN_S,
        # Ray Serve counts no requests here, so it need not wait before the replica drains.
        graceful_shutdown_wait_loop_s=0.1,
        max_surge_percent=pool.surge_percent,
        **_scale(pool, _deployment_name("scheduler", model)),
        **_resources(pool),
    )(PoolDeployment)
    with_version(deployment, settings, engine)
    return deployment.bind(settings, engine, scheduler)


def _endpoints(
    name: str, model: ModelSettings, pool: PoolSettings, settings: ApplicationSettings, scheduler: Application
) -> Application:
    assert pool.engine.remote is not None, "only called for remote engines"
    deployment = serve.deployment(
        name=name,
        ray_actor_options={"num_cpus": pool.num_cpus},
        **WATCHER_DEPLOYMENT_OPTIONS,
    )(EndpointsDeployment)
    scope = f"{model.name}/{pool.name}"
    with_version(deployment, scope, pool.name, pool.engine.remote, settings.channel, settings.state_uri)
    return deployment.bind(
        scope, pool.name, pool.engine.remote, settings.channel, scheduler, settings.state_uri
    )


def _scale(pool: PoolSettings, scheduler_name: str) -> dict[str, Any]:
    if pool.autoscaling is None:
        return {"num_replicas": pool.fixed_replicas}
    return {"autoscaling_config": pool_config(pool.autoscaling, scheduler_name, pool.name)}


def _resources(pool: PoolSettings) -> dict[str, Any]:
    resources = pool.resources
    actor: dict[str, Any] = {"num_cpus": resources.num_cpus, "num_gpus": resources.num_gpus}
    if resources.custom:
        actor["resources"] = dict(resources.custom)
    if resources.accelerator_type is not None:
        actor["accelerator_type"] = resources.accelerator_type
    if not resources.placement_bundles:
        return {"ray_actor_options": actor}
    return {
        "ray_actor_options": actor,
        "placement_group_bundles": [dict(bundle) for bundle in resources.placement_bundles],
        "placement_group_strategy": resources.placement_strategy,
    }


def _pool_names(model: ModelSettings) -> list[str]:
    return [_deployment_name(pool.name, model.name) for pool in model.pools]


def _deployment_name(kind: str, model: str) -> str:
    """Return a name that is valid in metric labels, URLs and `serve status`."""
    return f"{kind}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', model)}"


def _check_unique_names(settings: ApplicationSettings) -> None:
    names = [
        _deployment_name(kind, model.name) for model in settings.models for kind in ("scheduler", "tuner")
    ]
    names += [name for model in settings.models for name in _pool_names(model)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingsError(
            f"two deployments would be named {twice[0]}: choose model names that differ in letters or digits"
        )

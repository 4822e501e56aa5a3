"""Settings of a whole application: as written in a file, and completed with what follows from its models.

A file states each fact once, such as a model's names and its pools. The `Config` classes hold what the file
states. `resolve` derives the `Settings` classes from them, which hold the complete settings of each
component. `load_settings` is the only place where YAML becomes typed settings. `find_application` and
`http_address` return an application and its listen address from the content of its configuration.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml

from serve_app.core.admission.key_limits import TokenPrices
from serve_app.core.policies import POLICIES, learns_queues
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.scaling import AutoscalingSettings, ScaledPool, ScalingSettings
from serve_app.core.settings import SchedulerConfig, SchedulerSettings
from serve_app.core.settings_base import (
    ADVANCED,
    FINITE_POSITIVE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    at_least,
    read,
    settings,
)
from serve_app.engines.emulated.engine import EmulatedEngineSettings
from serve_app.engines.engine import EngineSettings as HostedEngineSettings
from serve_app.engines.engine import PoolEngineSettings
from serve_app.engines.vllm.engine import VllmEngineSettings
from serve_app.errors import SettingsError
from serve_app.serving.autoscaling import GatewayScaling
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.gateway.settings import GatewayConfig, GatewaySettings, ServedModel
from serve_app.serving.pool import ReplicaServerSettings
from serve_app.serving.remote.settings import RemoteSettings
from serve_app.serving.scheduler.journal import DecisionLogSettings
from serve_app.tuning.settings import TunerSettings

# -- settings of one pool: engine, resources, replicas -----------------------------------------------------


# A watcher needs next to no CPU for a few engines, and less than half a core for two hundred.
_WATCHER_CPUS = 0.1


# The list of engines: a new one is one more field.
@settings
class EngineSettings:
    """The engine of a pool: exactly one of these."""

    emulated: EmulatedEngineSettings | None = None
    vllm: VllmEngineSettings | None = None
    remote: RemoteSettings | None = None

    def __post_init__(self) -> None:
        known = [each.name for each in fields(self)]
        given = [name for name in known if getattr(self, name) is not None]
        if len(given) != 1:
            choice = f"{', '.join(known[:-1])} or {known[-1]}"
            raise ValueError(f"set exactly one engine ({choice}), got {', '.join(given) or 'none'}")

    @property
    def kind(self) -> str:
        """Name of the engine that is set."""
        return next(each.name for each in fields(self) if getattr(self, each.name) is not None)

    @property
    def chosen(self) -> PoolEngineSettings:
        """Settings of the engine that is set."""
        chosen: PoolEngineSettings = getattr(self, self.kind)
        return chosen

    @property
    def hosted(self) -> HostedEngineSettings | None:
        """Settings of the engine that each pool replica hosts; None for external servers."""
        return None if self.remote is not None else getattr(self, self.kind)

    @property
    def max_model_len(self) -> int | None:
        """Context limit in tokens; None if only the running engine can report it."""
        return self.chosen.context_limit

    def with_served_names(self, names: tuple[str, ...]) -> Self:
        """Return the same engine serving `names`, unless it has names already."""
        if self.chosen.served_model_names is not None:
            return self
        named: Any = replace(getattr(self, self.kind), served_model_names=names)
        return replace(self, **{self.kind: named})


@settings(block="resources")
class ResourceSettings:
    """Ray resources of one replica of a pool."""

    # CPU cores that Ray reserves for a replica; not a limit.
    num_cpus: Annotated[float, NOT_NEGATIVE] = 1.0
    # Whole GPUs for one engine (tensor parallelism within a node), or a fraction if engines share a GPU and
    # `gpu_memory_utilization` divides its memory.
    num_gpus: Annotated[float, NOT_NEGATIVE] = 0.0
    # GPU type as Ray names it, such as H100. Default: any type.
    accelerator_type: str | None = None
    # Custom Ray resources by name.
    custom: Mapping[str, float] = field(default_factory=dict)
    # Only for an engine that spans nodes (`distributed_executor_backend: ray`): one bundle per worker. The
    # first bundle also holds the replica itself.
    placement_bundles: Annotated[tuple[Mapping[str, float], ...], ADVANCED] = ()
    # Ray's placement strategy for the bundles: packed on few nodes, or spread over nodes.
    placement_strategy: Annotated[Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"], ADVANCED] = (
        "PACK"
    )

    def __post_init__(self) -> None:
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError(f"resources.num_gpus above 1 must be a whole number, got {self.num_gpus}")
        if self.placement_bundles:
            self._check_bundles()
        elif self.placement_strategy != "PACK":
            raise ValueError(
                f"resources.placement_strategy {self.placement_strategy} needs "
                "resources.placement_bundles, one per worker of an engine"
            )

    def _check_bundles(self) -> None:
        """Reject bundles that Ray Serve would reject at deployment, or that would never be placed."""
        for number, bundle in enumerate(self.placement_bundles):
            if not bundle or min(bundle.values()) <= 0:
                raise ValueError(
                    f"resources.placement_bundles[{number}] must name "
                    f"resources with amounts above 0, got {dict(bundle)}"
                )
        first = self.placement_bundles[0]
        for name, amount in self._replica_resources().items():
            if amount > first.get(name, 0.0):
                raise ValueError(
                    f"resources.placement_bundles[0] hosts the replica, which needs {name}: {amount:g}, but "
                    f"has {name}: {first.get(name, 0.0):g}: raise it, or lower the amount in resources"
                )

    def _replica_resources(self) -> dict[str, float]:
        """Return the Ray resources of the replica's own process."""
        required = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.custom}
        if self.accelerator_type is not None:
            # Ray's convention for a resource that only selects the node type.
            required[f"accelerator_type:{self.accelerator_type}"] = 0.001
        return required


@settings
class PoolSettings:
    """One pool: replicas with the same engine and the same limits.

    Attributes:
        replicas: fixed number of replicas; or use `autoscaling`.
        drain_timeout_s: time that a stopping replica allows its in-flight requests to complete.
    """

    # Unique within its model. Used as a metric label and in the header `x-pool`.
    name: str
    engine: EngineSettings
    replicas: Annotated[int | None, at_least(1)] = None
    autoscaling: AutoscalingSettings | None = None
    # Relative price of one replica, such as dollars per hour. Among pools with the same context, the cheapest
    # is the home pool, and requests spill to the others.
    cost: Annotated[float, FINITE_POSITIVE, ADVANCED] = 1.0
    # For pools between the first and the last: the largest token budget of requests whose home pool it is.
    # Null uses the pool's context limit. The first pool uses `routing.b_short_tokens` instead.
    boundary_tokens: Annotated[int | None, at_least(1), ADVANCED] = None
    resources: ResourceSettings = field(default_factory=ResourceSettings)
    server: Annotated[ReplicaServerSettings, ADVANCED] = field(default_factory=ReplicaServerSettings)
    # Longer than nearly every response, because aborting one loses all of it, and waiting only delays a
    # scale-down.
    drain_timeout_s: Annotated[float, POSITIVE] = 600.0
    # Additional replicas allowed while a new engine replaces an old one, as a share of the replicas, and at
    # least one. They need free GPUs, and the change waits until there are some. With 0, an old replica stops
    # first, and requests that fit no other replica are rejected until the new one is ready.
    surge_ratio: Annotated[float, SHARE, ADVANCED] = 0.25
    # An engine whose event loop is blocked for this long counts as dead and is replaced.
    health_check_timeout_s: Annotated[float, POSITIVE] = 30.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty: name a pool, such as short or long")
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError(f"pool {self.name}: set replicas or autoscaling, not both")
        if self.engine.remote is not None and (self.replicas is not None or self.autoscaling is not None):
            raise ValueError(
                f"pool {self.name}: remove replicas and autoscaling, because each of "
                "engine.remote.endpoints is a replica"
            )

    @property
    def surge_percent(self) -> int:
        """Ray Serve's `max_surge_percent`."""
        return math.ceil(100 * self.surge_ratio)

    @property
    def gpus_per_replica(self) -> float:
        """GPUs per replica, including its workers on other nodes."""
        bundles = sum(bundle.get("GPU", 0.0) for bundle in self.resources.placement_bundles)
        return max(self.resources.num_gpus, bundles)

    @property
    def fixed_replicas(self) -> int | None:
        """Constant number of replicas; None for pools that are scaled by this application or by others."""
        scaled = self.autoscaling is not None or self.engine.remote is not None
        return None if scaled else self.replicas or 1

    @property
    def starts_on_demand(self) -> bool:
        """True if the pool may have no replica until a request waits for one."""
        return self.autoscaling is not None and self.autoscaling.min_replicas == 0

    @property
    def num_cpus(self) -> float:
        """CPU cores reserved per Serve replica. A watcher of endpoints needs next to none."""
        required = self.resources.num_cpus
        return required if self.engine.remote is None else min(required, _WATCHER_CPUS)


# -- settings of a whole application -----------------------------------------------------------------------


@settings
class ModelConfig:
    """One model: names, pools and scheduler.

    Attributes:
        name: model name that clients request.
        aliases: further names for the same model (LoRA adapters, old names). Requests keep the name, so
            remote servers must have it as well; `gateway.routes` renames instead.
        pools: any number of pools, ordered by increasing context.
        scheduler: queueing of requests and their distribution over the pools.
        tuner: online learning for the scheduler.
        decision_log: record of the scheduler's decisions for replays; costs a tenth of the scheduler's speed.
        price: price of its tokens, for budgets and reports of usage.
        resume_streams: if a replica dies or drains, continue its streams on another one instead of ending
            them with an error. It needs vLLM, and costs the gateway more CPU time for each stream.
        budget_per_hour: what its requests may cost in any hour, for engines that are paid per token. Beyond
            it, requests are rejected, or fall back to other models (`gateway.routes`).
        gpu_budget: maximum number of GPUs for all pools together; None for no limit. The pool with the most
            work per replica gets the next GPU.
    """

    name: str
    aliases: tuple[str, ...] = ()
    pools: tuple[PoolSettings, ...]
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    tuner: TunerSettings = field(default_factory=TunerSettings)
    decision_log: DecisionLogSettings | None = None
    price: TokenPrices | None = None
    resume_streams: bool = False
    budget_per_hour: Annotated[float | None, FINITE_POSITIVE, ADVANCED] = None
    gpu_budget: Annotated[float | None, POSITIVE, ADVANCED] = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty: it is the name that clients send")
        if self.budget_per_hour is not None and self.price is None:
            raise ValueError(f"model {self.name}: budget_per_hour needs price, the prices of its tokens")
        # Raises if the budget is below the minimum that the pools need.
        _ = self.scaling

    @property
    def scaling(self) -> ScalingSettings:
        """Autoscaling settings, replica counts and GPUs of the pools."""
        pools = {
            pool.name: ScaledPool(
                autoscaling=pool.autoscaling, replicas=pool.fixed_replicas, gpus=pool.gpus_per_replica
            )
            for pool in self.pools
        }
        return ScalingSettings(pools=pools, gpu_budget=self.gpu_budget)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that clients may use for the model."""
        return (self.name, *self.aliases)


@settings
class ModelSettings(ModelConfig):
    """Complete settings of one model."""

    scheduler: SchedulerSettings

    @property
    def is_tuned(self) -> bool:
        """True if a tuner runs alongside the scheduler."""
        mode = self.tuner.mode
        return learns_queues(self.scheduler.policy) if mode == "auto" else mode is not False


@settings(block="gateways")
class GatewayDeploymentSettings:
    """Number of gateways. Each holds only its own clients' requests, so more can be added at any time."""

    # Fixed number of gateways, by default 1; or use `autoscaling`. One gateway handles a few
    # thousand requests/s. With two or more, the endpoint remains available if one fails.
    replicas: Annotated[int | None, at_least(1)] = None
    # Scales the number of gateways by their CPU time.
    autoscaling: GatewayScaling | None = None
    # CPU cores that Ray reserves for each gateway; not a limit.
    num_cpus: Annotated[float, NOT_NEGATIVE] = 0.5
    # Time that a gateway allows its in-flight requests to complete when it is replaced.
    drain_timeout_s: Annotated[float, POSITIVE] = 600.0
    # Time for which a stopping gateway fails `/-/healthz` before it stops listening. Set it to the time that
    # the load balancer in front needs to notice. 0 suits gateways on a single node, where the successor
    # listens on the same port.
    deregister_s: Annotated[float, NOT_NEGATIVE, ADVANCED] = 0.0

    def __post_init__(self) -> None:
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError("gateways: set replicas or autoscaling, not both")

    @property
    def initial_replicas(self) -> int:
        """Number of gateways at deployment."""
        return self.autoscaling.min_replicas if self.autoscaling is not None else self.replicas or 1


@settings
class ApplicationConfig:
    """The arguments of an application: `applications[].args` of a Ray Serve configuration.

    Attributes:
        models: at least one.
        gateway: authentication and limits of clients.
        gateways: number of gateways.
        channel: connections between gateways, scheduler and replicas.
        state_uri: folder for the learned state of schedulers and tuners, so that a restart resumes from it:
            an absolute path, or a URI that fsspec supports (`s3://bucket/folder`, with the package that it
            needs). All nodes must reach the same folder. None persists nothing.
        state_interval_s: time between two writes; a scheduler that is killed loses this much of its learning.
    """

    models: tuple[ModelConfig, ...]
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    gateways: GatewayDeploymentSettings = field(default_factory=GatewayDeploymentSettings)
    channel: Annotated[ChannelSettings, ADVANCED] = field(default_factory=ChannelSettings)
    state_uri: str | None = None
    state_interval_s: Annotated[float, POSITIVE, ADVANCED] = 30.0

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models must not be empty: an application serves at least one model")
        uri = self.state_uri
        if uri is not None and "://" not in uri and not Path(uri).is_absolute():
            raise ValueError(
                f"state_uri must be an absolute path or a URI, got {uri!r}, because actors have "
                "different working directories"
            )


@settings
class ApplicationSettings(ApplicationConfig):
    """Complete settings of a whole application."""

    models: tuple[ModelSettings, ...]
    gateway: GatewaySettings

    def check_secrets(self) -> None:
        """Raise `ServeAppError` if a secret cannot be read in this environment."""
        metrics_key = self.gateway.metrics_key
        for secret in (*self.gateway.keys, *(() if metrics_key is None else (metrics_key,))):
            secret.secret()
        for model in self.models:
            for pool in model.pools:
                if pool.engine.remote is not None:
                    pool.engine.remote.key()

    def served_names(self) -> Iterator[str]:
        """Yield every name that clients may request, routes first."""
        names = [route.name for route in self.gateway.routes]
        names += [name for model in self.models for name in model.names]
        yield from dict.fromkeys(names)


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
    remote = [pool.engine.remote for pool in model.pools if pool.engine.remote is not None]
    endpoints = [text for each in remote for text in each.endpoints]
    for name in model.names:
        yield ServedModel(
            name=name,
            max_model_len=longest,
            starts_on_demand=on_demand,
            price=model.price,
            targets=model.tuner.targets,
            resume_streams=model.resume_streams,
            inference_pools=tuple(text for text in endpoints if text.startswith("inferencepool+")),
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


def load_settings(path: Path) -> ApplicationSettings:
    """Load the settings of this project's application in a Ray Serve configuration file.

    Raises:
        SettingsError: the file is not such a configuration, or has an unknown key or an invalid value.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as exc:
        raise SettingsError(f"cannot read {path}: {exc}") from exc
    try:
        _, application = find_application(content)
    except SettingsError as exc:
        raise SettingsError(f"{path} {exc}") from exc
    return settings_of(application.get("args", {}))


def find_application(content: object) -> tuple[int, Mapping[str, Any]]:
    """Return the index and content of this project's application in a Ray Serve configuration.

    It is the one with this project's import path, or the only one, which may extend it.

    Raises:
        SettingsError: there is none, or several have that import path.
    """
    applications = content.get("applications") if isinstance(content, Mapping) else None
    entries = applications if isinstance(applications, list) else []
    found = [
        (number, entry)
        for number, entry in enumerate(entries)
        if isinstance(entry, Mapping) and (len(entries) == 1 or entry.get("import_path") == IMPORT_PATH)
    ]
    if len(found) != 1:
        raise SettingsError(
            f"must have exactly one application with import_path {IMPORT_PATH}, got {len(found)}"
        )
    return found[0]


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
    return read(ApplicationConfig, args, as_file=True)

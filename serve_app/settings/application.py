"""The settings of a whole application, and the only place where YAML becomes typed settings.

Every component owns its settings class; here they are put together, and what one component cannot see by
itself is checked: names that must differ, pools in the order of their context, a token budget that its pool
can hold, engines that take priorities where they are told one.
A key that nobody knows is refused by its full name, with the nearest known one as advice.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator

from serve_app.engine_model import SchedulingPolicy
from serve_app.engine_model.profiles import load_profile
from serve_app.engines.emulated.engine import EmulatedEngineSettings
from serve_app.engines.remote.engine import RemoteEngineSettings
from serve_app.engines.vllm.engine import VllmEngineSettings
from serve_app.errors import SettingsError
from serve_app.scheduling.policies import learns_queues
from serve_app.scheduling.settings import SchedulerSettings
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.gateway.settings import GatewaySettings
from serve_app.serving.pool.autoscaling import AutoscalingSettings
from serve_app.serving.pool.server import ReplicaServerSettings
from serve_app.serving.scheduler.decision_log import DecisionLogSettings
from serve_app.serving.tuner.actor import TunerSettings
from serve_app.settings.errors import settings_error
from serve_app.settings.inheritance import with_inherited_keys
from serve_app.settings_base import NOT_NEGATIVE, POSITIVE, at_least, settings


def _located(value: Any, handler: Callable[[Any], Any]) -> Any:
    """Let pydantic add the path to what a component says about its settings."""
    try:
        return handler(value)
    except SettingsError as exc:
        raise ValueError(str(exc)) from exc


Located = WrapValidator(_located)


@settings
class EngineSettings:
    """Which engine a pool runs: exactly one of the three, under its name."""

    emulated: Annotated[EmulatedEngineSettings, Located] | None = None
    vllm: Annotated[VllmEngineSettings, Located] | None = None
    remote: Annotated[RemoteEngineSettings, Located] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("emulated", "vllm", "remote") if getattr(self, name) is not None]
        if len(given) != 1:
            named = ", ".join(given) or "none"
            raise ValueError(f"give exactly one engine (emulated, vllm or remote), got {named}")
        if self.emulated is not None:
            # Limits that do not go together, or not with the profile, are refused here and not by a replica.
            self.emulated.model_settings(load_profile(self.emulated.profile))

    @property
    def chosen(self) -> EmulatedEngineSettings | VllmEngineSettings | RemoteEngineSettings:
        """The one that was given."""
        chosen = self.emulated or self.vllm or self.remote
        assert chosen is not None, "checked when the settings were made"
        return chosen

    @property
    def max_model_len(self) -> int | None:
        """Context limit in tokens as far as the settings tell; an engine may know better once it runs."""
        if self.emulated is not None:
            return self.emulated.max_model_len or load_profile(self.emulated.profile).max_model_len
        if self.remote is not None:
            return self.remote.max_model_len
        stated = self.vllm.args.get("max_model_len") if self.vllm is not None else None
        return stated if isinstance(stated, int) else None

    @property
    def schedules_by_priority(self) -> bool | None:
        """Whether the engine orders its queue by the priority of requests; None if only it knows."""
        if self.emulated is not None:
            return self.emulated.scheduling_policy is SchedulingPolicy.PRIORITY
        if self.vllm is not None:
            return bool(self.vllm.args.get("scheduling_policy") == SchedulingPolicy.PRIORITY)
        return None


@settings(block="resources")
class ResourceSettings:
    """What one replica of a pool asks Ray for."""

    # CPU cores that Ray sets aside for a replica: a reservation, no limit.
    num_cpus: Annotated[float, NOT_NEGATIVE] = 1.0
    # Whole GPUs for one engine (tensor parallelism within a node), or a fraction where engines share one and
    # `gpu_memory_utilization` divides its memory.
    num_gpus: Annotated[float, NOT_NEGATIVE] = 0.0
    # A GPU type in Ray's words, such as H100; any type when not given.
    accelerator_type: str | None = None
    # Custom resources of Ray, by name.
    custom: Mapping[str, float] = field(default_factory=dict)
    # Only for an engine that spreads over nodes (`distributed_executor_backend: ray`): one bundle per worker,
    # the first also holds the replica itself.
    placement_bundles: tuple[Mapping[str, float], ...] = ()
    # How Ray places the bundles, in its own words: together where possible, or spread over nodes.
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"

    def __post_init__(self) -> None:
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError(f"resources.num_gpus above 1 must be a whole number, got {self.num_gpus}")


@settings
class PoolSettings:
    """One pool: replicas with the same engine and the same limits.

    Attributes:
        replicas: a fixed number of replicas; or give `autoscaling`.
        drain_timeout_s: how long a replica that is told to stop lets its open answers go on.
    """

    # Unique in its model; it labels metrics and stands in the header `x-pool`.
    name: str
    engine: Annotated[EngineSettings, Located]
    replicas: Annotated[int | None, at_least(1)] = None
    autoscaling: AutoscalingSettings | None = None
    resources: ResourceSettings = field(default_factory=ResourceSettings)
    server: ReplicaServerSettings = field(default_factory=ReplicaServerSettings)
    # Longer than nearly every answer: cutting one costs its client all of it, waiting costs only a late
    # scale-down.
    drain_timeout_s: Annotated[float, POSITIVE] = 600.0
    # An engine whose loop is blocked for so long is taken for dead and replaced.
    health_check_timeout_s: Annotated[float, POSITIVE] = 30.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty: call a pool short or long")
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError(f"pool {self.name}: give replicas or autoscaling, not both")


@settings
class ModelSettings:
    """One model: its names, its pools, its scheduler.

    Attributes:
        pools: one or two, the one with the shorter context first.
        scheduler: everything but the names, which come from here.
        tuner: what is learned for the scheduler while it runs.
        decision_log: record what the scheduler decides, for replays; costs a tenth of its speed.
    """

    # The name that clients ask for.
    name: str
    # Other names for the same model, such as LoRA adapters and old names.
    aliases: tuple[str, ...] = ()
    pools: tuple[PoolSettings, ...]
    scheduler: Annotated[SchedulerSettings, Located]
    tuner: Annotated[TunerSettings, Located] = field(default_factory=TunerSettings)
    decision_log: Annotated[DecisionLogSettings, Located] | None = None

    @property
    def is_tuned(self) -> bool:
        """Whether a tuner runs beside the scheduler."""
        mode = self.tuner.mode
        if mode == "auto":
            return learns_queues(self.scheduler.policy) or self.tuner.parameters is not None
        return mode


@settings(block="gateways")
class GatewayDeploymentSettings:
    """How many gateways run. Each holds only its own clients' requests, so more may be added any time."""

    # One gateway carries some thousand requests/s; two or more keep the endpoint up when one dies.
    replicas: Annotated[int, at_least(1)] = 1
    # CPU cores that Ray sets aside for each gateway: a reservation, no limit.
    num_cpus: Annotated[float, NOT_NEGATIVE] = 0.5
    # Connections held open by one gateway, waiting requests included. Past it Serve itself answers 503.
    max_ongoing_requests: Annotated[int, at_least(1)] = 10_000
    # Answers still open when a gateway is replaced get so long to end.
    drain_timeout_s: Annotated[float, POSITIVE] = 600.0


class AppSettings(BaseModel):
    """A whole application, as `applications[].args` of a Ray Serve configuration gives it.

    Attributes:
        state_uri: a folder for what schedulers and tuners learn, so that a restart does not begin from
            nothing: an absolute path, or a URI that fsspec knows (`s3://bucket/folder`, with the package
            that it needs). On several nodes it must be the same from each of them. None keeps nothing.
        state_interval_s: between two writes; a scheduler that is killed loses so much of its learning.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: tuple[ModelSettings, ...]
    gateway: Annotated[GatewaySettings, Located]
    gateways: GatewayDeploymentSettings = Field(default_factory=GatewayDeploymentSettings)
    channel: Annotated[ChannelSettings, Located] = Field(default_factory=ChannelSettings)
    state_uri: str | None = None
    state_interval_s: float = 30.0

    @model_validator(mode="wrap")
    @classmethod
    def _from_yaml(cls, raw: Any, handler: Any) -> Self:
        """Parse, and say what is wrong in the file's own words."""
        try:
            settings = cast("Self", handler(with_inherited_keys(raw) if isinstance(raw, Mapping) else raw))
        except ValidationError as exc:
            raise settings_error(exc, cls) from exc
        _check(settings)
        return settings

    def served_names(self) -> Iterator[str]:
        """Every name that clients may ask for."""
        for model in self.models:
            yield model.name
            yield from model.aliases


def load_settings(path: Path) -> AppSettings:
    """The settings of the one application in a Ray Serve configuration file.

    Raises:
        SettingsError: the file is no such configuration, or something in it is unknown or out of range.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as exc:
        raise SettingsError(f"cannot read {path}: {exc}") from exc
    applications = content.get("applications", []) if isinstance(content, Mapping) else []
    ours = [entry for entry in applications if entry.get("import_path") == "serve_app.app:build_app"]
    if len(ours) != 1:
        raise SettingsError(f"{path} must hold one application of serve_app.app:build_app, got {len(ours)}")
    return AppSettings.model_validate(ours[0].get("args", {}))


# What no component can see by itself.


def _check(settings: AppSettings) -> None:
    if not settings.models:
        raise SettingsError("models must not be empty: an application serves at least one model")
    _check_state(settings)
    names = list(settings.served_names())
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingsError(
            f"two models answer to the same name: {', '.join(twice)}; names and aliases must differ"
        )
    for index, model in enumerate(settings.models):
        if len(model.pools) == 2:
            _check_pools(f"models[{index}]", model)
        if model.scheduler.engine_priority.enabled:
            _check_engine_priority(f"models[{index}]", model)


def _check_state(settings: AppSettings) -> None:
    uri = settings.state_uri
    if uri is not None and "://" not in uri and not Path(uri).is_absolute():
        raise SettingsError(
            f"state_uri must be an absolute path or a URI, got {uri!r}: every actor has a working directory "
            "of its own"
        )
    if not settings.state_interval_s > 0:
        raise SettingsError(f"state_interval_s must be positive, got {settings.state_interval_s}")


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


def _check_engine_priority(where: str, model: ModelSettings) -> None:
    """An engine that keeps to the order of arrival refuses every request that comes with a priority."""
    for number, pool in enumerate(model.pools):
        if pool.engine.schedules_by_priority is False:
            key = f"engine.{'emulated' if pool.engine.emulated else 'vllm.args'}.scheduling_policy"
            raise SettingsError(
                f"{where}.scheduler.engine_priority is enabled, but the engine of pool {pool.name} does not "
                f"schedule by priority: set {where}.pools[{number}].{key} to priority"
            )

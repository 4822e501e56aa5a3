"""Settings of a whole application: as a file gives them, and completed by what follows from its models.

A file says each thing once: a model's names, its pools. The `Written` classes are what stands in the file;
`resolve` makes the complete settings of them, in which every component finds what it needs.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from serve_app.core.policies import learns_queues
from serve_app.core.scaling import AutoscalingSettings, ScaledPool, ScalingSettings
from serve_app.core.settings import SchedulerSettings, WrittenScheduler
from serve_app.core.settings_base import (
    ADVANCED,
    FINITE_POSITIVE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    at_least,
    settings,
)
from serve_app.engines.emulated.engine import EmulatedEngineSettings
from serve_app.engines.model import SchedulingPolicy
from serve_app.engines.model.profiles import load_profile
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.engines.vllm.engine import VllmEngineSettings
from serve_app.serving.autoscaling import GatewayScaling
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.gateway.settings import GatewaySettings, WrittenGateway
from serve_app.serving.pool.replica import ReplicaServerSettings
from serve_app.serving.remote.settings import RemoteSettings
from serve_app.serving.scheduler.decision_log import DecisionLogSettings
from serve_app.tuning.settings import TunerSettings

# Settings of one pool: its engine, its resources, its replicas.


# A few engines cost their watcher next to nothing, and two hundred less than half a core.
_WATCHER_CPUS = 0.1


HostedEngineSettings = EmulatedEngineSettings | VllmEngineSettings


@settings
class EngineSettings:
    """Which engine a pool runs: exactly one of the three, under its name."""

    emulated: EmulatedEngineSettings | None = None
    vllm: VllmEngineSettings | None = None
    remote: RemoteSettings | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("emulated", "vllm", "remote") if getattr(self, name) is not None]
        if len(given) != 1:
            named = ", ".join(given) or "none"
            raise ValueError(f"give exactly one engine (emulated, vllm or remote), got {named}")
        if self.emulated is not None:
            # Limits that do not go together, or not with the profile, are refused here and not by a replica.
            self.emulated.model_settings(load_profile(self.emulated.profile))

    @property
    def hosted(self) -> HostedEngineSettings | None:
        """The engine that each pool replica hosts; None for servers that run elsewhere."""
        return self.emulated or self.vllm

    @property
    def chosen(self) -> EmulatedEngineSettings | VllmEngineSettings | RemoteSettings:
        """The one that was given."""
        chosen = self.emulated or self.vllm or self.remote
        assert chosen is not None, "checked when the settings were made"
        return chosen

    def serving(self, names: tuple[str, ...]) -> "EngineSettings":
        """The same engine; it answers under these names, unless it has names of its own."""
        if self.chosen.served_model_names is not None:
            return self
        named = replace(self.chosen, served_model_names=names)
        given: dict[str, Any] = {
            each.name: named for each in fields(self) if getattr(self, each.name) is not None
        }
        return replace(self, **given)

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
    placement_bundles: Annotated[tuple[Mapping[str, float], ...], ADVANCED] = ()
    # How Ray places the bundles, in its own words: together where possible, or spread over nodes.
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
                f"resources.placement_strategy {self.placement_strategy} places nothing by itself: give "
                "resources.placement_bundles, one for each worker of an engine"
            )

    def _check_bundles(self) -> None:
        """Refuse what Ray Serve refuses when it deploys, or what would wait for ever."""
        for number, bundle in enumerate(self.placement_bundles):
            if not bundle or min(bundle.values()) <= 0:
                raise ValueError(
                    f"resources.placement_bundles[{number}] must name resources with amounts above 0, got "
                    f"{dict(bundle)}"
                )
        first = self.placement_bundles[0]
        for name, amount in self._of_replica().items():
            if amount > first.get(name, 0.0):
                raise ValueError(
                    f"resources.placement_bundles[0] holds the replica, which asks for {name}: {amount:g}, "
                    f"and has {name}: {first.get(name, 0.0):g}: raise it, or ask for less in resources"
                )

    def _of_replica(self) -> dict[str, float]:
        """What the process of a replica itself asks for, in Ray's words."""
        asked = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.custom}
        if self.accelerator_type is not None:
            # The share that Ray lets everything of a type take.
            asked[f"accelerator_type:{self.accelerator_type}"] = 0.001
        return asked


@settings
class PoolSettings:
    """One pool: replicas with the same engine and the same limits.

    Attributes:
        replicas: a fixed number of replicas; or give `autoscaling`.
        drain_timeout_s: how long a replica that is told to stop lets its open answers go on.
    """

    # Unique in its model; it labels metrics and stands in the header `x-pool`.
    name: str
    engine: EngineSettings
    replicas: Annotated[int | None, at_least(1)] = None
    autoscaling: AutoscalingSettings | None = None
    # Relative price of one replica, such as dollars per hour. Of pools with the same context, requests are at
    # home in the cheapest, and spill into the others.
    cost: Annotated[float, FINITE_POSITIVE, ADVANCED] = 1.0
    # Of a pool between the first and the last: the token budget up to which a request is at home in it. Null
    # is what its context holds. The first pool has `routing.b_short_tokens` in its place.
    boundary_tokens: Annotated[int | None, at_least(1), ADVANCED] = None
    resources: ResourceSettings = field(default_factory=ResourceSettings)
    server: Annotated[ReplicaServerSettings, ADVANCED] = field(default_factory=ReplicaServerSettings)
    # Longer than nearly every answer: cutting one costs its client all of it, waiting costs only a late
    # scale-down.
    drain_timeout_s: Annotated[float, POSITIVE] = 600.0
    # Replicas that may be there beside the others while a new engine replaces an old one, as a share of them,
    # and at least one. It needs free GPUs: without any, such a change waits until there are some. 0 stops an
    # old replica first, and requests that no other can take are refused until the new one serves.
    surge_ratio: Annotated[float, SHARE, ADVANCED] = 0.25
    # An engine whose loop is blocked for so long is taken for dead and replaced.
    health_check_timeout_s: Annotated[float, POSITIVE] = 30.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty: call a pool short or long")
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError(f"pool {self.name}: give replicas or autoscaling, not both")
        if self.engine.remote is not None and (self.replicas is not None or self.autoscaling is not None):
            raise ValueError(
                f"pool {self.name}: its engines run elsewhere, so leave out replicas and autoscaling: each "
                "of engine.remote.endpoints is a replica"
            )

    @property
    def surge_percent(self) -> int:
        """Ray Serve's `max_surge_percent`."""
        return math.ceil(100 * self.surge_ratio)

    @property
    def gpus_of_a_replica(self) -> float:
        """GPUs that one replica takes, its workers on other nodes included."""
        bundles = sum(bundle.get("GPU", 0.0) for bundle in self.resources.placement_bundles)
        return max(self.resources.num_gpus, bundles)

    @property
    def fixed_replicas(self) -> int | None:
        """Replicas that it has at any time; None where it is scaled, here or by others."""
        scaled = self.autoscaling is not None or self.engine.remote is not None
        return None if scaled else self.replicas or 1

    @property
    def starts_on_demand(self) -> bool:
        """Whether it may be without any replica until a request waits for one."""
        return self.autoscaling is not None and self.autoscaling.min_replicas == 0

    @property
    def num_cpus(self) -> float:
        """CPU cores that each of its Serve replicas sets aside; a watcher of endpoints needs next to none."""
        asked = self.resources.num_cpus
        return asked if self.engine.remote is None else min(asked, _WATCHER_CPUS)


# Settings of a whole application: as a file gives them, and complete.
#
# A file says each thing once: a model's names, its pools. The `Written` classes are what stands in the file;
# `resolve` makes the complete settings of them, in which every component finds what it needs.


@settings
class WrittenModel:
    """One model: its names, its pools, its scheduler.

    Attributes:
        name: what clients ask for.
        aliases: other names for the same model (LoRA adapters, old names).
        pools: any number, those with shorter contexts first.
        scheduler: how its requests are queued and spread over the pools.
        tuner: what is learned for the scheduler while it runs.
        decision_log: record what the scheduler decides, for replays; costs a tenth of its speed.
        gpu_budget: GPUs that all its pools may use together, however many each may have; None is no limit.
            The pool with the most work per replica gets the next one.
    """

    name: str
    aliases: tuple[str, ...] = ()
    pools: tuple[PoolSettings, ...]
    scheduler: WrittenScheduler = field(default_factory=WrittenScheduler)
    tuner: TunerSettings = field(default_factory=TunerSettings)
    decision_log: DecisionLogSettings | None = None
    gpu_budget: Annotated[float | None, POSITIVE, ADVANCED] = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty: give the name that clients send")
        # Refuses a budget below what the pools need at least.
        _ = self.scaling

    @property
    def scaling(self) -> ScalingSettings:
        """What is known of its pools for autoscaling."""
        pools = {
            pool.name: ScaledPool(
                autoscaling=pool.autoscaling, replicas=pool.fixed_replicas, gpus=pool.gpus_of_a_replica
            )
            for pool in self.pools
        }
        return ScalingSettings(pools=pools, gpu_budget=self.gpu_budget)

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that clients may call it."""
        return (self.name, *self.aliases)


@settings
class ModelSettings(WrittenModel):
    """One model, complete."""

    scheduler: SchedulerSettings

    @property
    def is_tuned(self) -> bool:
        """Whether a tuner runs beside the scheduler."""
        mode = self.tuner.mode
        return learns_queues(self.scheduler.policy) if mode == "auto" else mode is not False


@settings(block="gateways")
class GatewayDeploymentSettings:
    """How many gateways run. Each holds only its own clients' requests, so more may be added any time."""

    # A fixed number, 1 when not given; or give `autoscaling`. One gateway carries some thousand requests/s;
    # two or more keep the endpoint up when one dies.
    replicas: Annotated[int | None, at_least(1)] = None
    # As many as their processor time needs.
    autoscaling: GatewayScaling | None = None
    # CPU cores that Ray sets aside for each gateway: a reservation, no limit.
    num_cpus: Annotated[float, NOT_NEGATIVE] = 0.5
    # Answers still open when a gateway is replaced get so long to end.
    drain_timeout_s: Annotated[float, POSITIVE] = 600.0
    # How long a gateway that stops fails `/-/healthz` before it stops listening: as long as a load balancer
    # in front takes to notice. 0 suits gateways that share one node, where a successor listens on the same
    # port.
    deregister_s: Annotated[float, NOT_NEGATIVE, ADVANCED] = 0.0

    def __post_init__(self) -> None:
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError("gateways: give replicas or autoscaling, not both")

    @property
    def first_replicas(self) -> int:
        """Gateways at deployment."""
        return self.autoscaling.min_replicas if self.autoscaling is not None else self.replicas or 1


@settings
class WrittenApplication:
    """The arguments of an application: `applications[].args` of a Ray Serve configuration.

    Attributes:
        models: at least one.
        gateway: who may call, and within which limits.
        gateways: how many gateways run.
        channel: the connections between gateways, scheduler and replicas.
        state_uri: a folder for what schedulers and tuners learn, so that a restart does not begin from
            nothing: an absolute path, or a URI that fsspec knows (`s3://bucket/folder`, with the package
            that it needs). On several nodes it must be the same from each of them. None keeps nothing.
        state_interval_s: between two writes; a scheduler that is killed loses so much of its learning.
    """

    models: tuple[WrittenModel, ...]
    gateway: WrittenGateway = field(default_factory=WrittenGateway)
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
                f"state_uri must be an absolute path or a URI, got {uri!r}: every actor has a working "
                "directory of its own"
            )


@settings
class AppSettings(WrittenApplication):
    """A whole application, complete."""

    models: tuple[ModelSettings, ...]
    gateway: GatewaySettings

    def served_names(self) -> Iterator[str]:
        """Every name that clients may ask for."""
        for model in self.models:
            yield from model.names


def step_times_of(model: ModelSettings) -> dict[str, StepTimeModel]:
    """By pool: of emulated engines, and of others where the tuner is given a profile.

    Raises:
        SettingsError: there is no such profile.
    """
    return dict(_known(model))


def _known(model: ModelSettings) -> Iterator[tuple[str, StepTimeModel]]:
    profile = model.tuner.profile
    for pool in model.pools:
        emulated = pool.engine.emulated
        if emulated is not None:
            yield pool.name, load_profile(emulated.profile).step_time.scaled(1.0 / emulated.speed_up)
        elif profile is not None:
            yield pool.name, load_profile(profile).step_time

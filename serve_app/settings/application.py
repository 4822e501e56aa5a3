"""Settings of a whole application: as a file gives them, and complete.

A file says each thing once: a model's names, its pools. The `Written` classes are what stands in the file;
`resolve` makes the complete settings of them, in which every component finds what it needs.
"""

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated

from serve_app.scaling import ScaledPool, ScalingSettings
from serve_app.scheduling.policies import learns_queues
from serve_app.scheduling.settings import SchedulerSettings, WrittenScheduler
from serve_app.serving.autoscaling import GatewayScaling
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.gateway.settings import GatewaySettings, WrittenGateway
from serve_app.serving.scheduler.decision_log import DecisionLogSettings
from serve_app.settings.pools import PoolSettings
from serve_app.settings_base import ADVANCED, NOT_NEGATIVE, POSITIVE, at_least, settings
from serve_app.tuning.settings import TunerSettings


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
    gpu_budget: Annotated[float | None, POSITIVE] = None

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
    # Connections held open by one gateway, waiting requests included. Past it Serve itself answers 503.
    max_ongoing_requests: Annotated[int, at_least(1), ADVANCED] = 10_000
    # Answers still open when a gateway is replaced get so long to end.
    drain_timeout_s: Annotated[float, POSITIVE] = 600.0

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

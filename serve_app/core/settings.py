"""Settings of one model's scheduler, including those of admission, programs and the EWSJF policies."""

import enum
from dataclasses import field, replace
from typing import Annotated

from serve_app.core.admission.key_limits import TokenPrices
from serve_app.core.dispatch.backfill import BackfillSettings
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.dispatch.promotion import ClassFloorSettings, EnginePrioritySettings, PromotionSettings
from serve_app.core.isolation import IsolationSettings
from serve_app.core.latency_targets import LatencyTargetSettings
from serve_app.core.queueing.delay_bound import DelayBoundSettings
from serve_app.core.queueing.fairness import FairnessMode, FairnessSettings
from serve_app.core.queueing.floors import FloorSettings
from serve_app.core.routing.estimation.estimate import EstimatorSettings
from serve_app.core.routing.pools import RoutingConfig, RoutingSettings
from serve_app.core.routing.prefix import AffinitySettings
from serve_app.core.settings_base import (
    ADVANCED,
    FINITE,
    INTERNAL,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    SHARE,
    at_least,
    settings,
)
from serve_app.request import PriorityClass


class ProgramOrder(enum.StrEnum):
    """Order among the waiting programs of a tenant."""

    FCFS = "fcfs"
    """The program that started first."""
    LEAST_SERVICE = "least-service"
    """The program with the least attained service."""


@settings(block="programs")
class ProgramsSettings:
    """Scheduling of agent programs: conversations of many turns, with their sub-agents."""

    # Disable it to schedule each request by itself.
    enabled: bool = True
    # Order among programs that wait for KV cache. `least-service` lets programs that have used little pass
    # those that have used much.
    order: ProgramOrder = ProgramOrder.FCFS
    # Whether turns wait for room in the KV cache.
    residency: Annotated[bool, INTERNAL] = True
    # Whether a turn waits for the replica of its context.
    stay: Annotated[bool, INTERNAL] = True
    # Whether the last open sub-agent of a program is served first.
    joins: Annotated[bool, INTERNAL] = True
    # Factor on the learned time for which contexts are retained; 0 retains none.
    retention: Annotated[float, NOT_NEGATIVE, INTERNAL] = 1.0


@settings(block="admission")
class AdmissionSettings:
    """Limits on queued requests, in addition to `max_waiting`.

    Attributes:
        tenant_share: share of `max_waiting` that a single active tenant may fill.
    """

    # The default leaves a fifth for tenants that arrive later. Two heavy tenants get 44 % each, and a ninth
    # is left.
    tenant_share: Annotated[float, POSITIVE_SHARE, ADVANCED] = 0.8


@settings(block="ewsjf.weights")
class ScoreWeights:
    """Weights of the density-weighted score, Eq 1 and Eq 4; names and values as in the paper.

    `w_urg(b) = a_u * b + b_u` weighs waiting, `w_fair(b) = a_f * b + b_f` weighs length, where b is the mean
    length of the queue. Both are clamped to `floor`, because long queues could otherwise have a negative
    urgency.
    """

    # Constant term of the score.
    w_base: Annotated[float, NOT_NEGATIVE, INTERNAL] = 1.0
    # Part of the weight of waiting that grows with the mean length of the queue, per token.
    a_u: Annotated[float, FINITE] = 1e-4
    # Part of the weight of waiting that is the same for all queues.
    b_u: Annotated[float, FINITE] = 1.0
    # Part of the weight of length that grows with the mean length of the queue, per token.
    a_f: Annotated[float, FINITE] = -5e-5
    # Part of the weight of length that is the same for all queues.
    b_f: Annotated[float, FINITE] = 0.5
    # Lower bound of both weights.
    floor: Annotated[float, POSITIVE, INTERNAL] = 1e-3


@settings(block="ewsjf")
class EwsjfSettings:
    """Settings of the EWSJF policies."""

    weights: ScoreWeights = field(default_factory=ScoreWeights)


@settings(block="queue_timeout_s")
class QueueTimeouts:
    """Queue timeouts by class, in seconds, for requests whose client sets none."""

    # Users leave long before a minute has passed.
    interactive: Annotated[float, POSITIVE] = 60.0
    # Below ten minutes, the default timeout of the OpenAI SDK and of many programs, so that the client
    # receives a 504.
    default: Annotated[float, POSITIVE] = 300.0
    # Batch work waits for idle capacity, which may only be available at night.
    batch: Annotated[float, POSITIVE] = 43_200.0

    def of(self, priority: PriorityClass) -> float:
        """Return the timeout of one class, in seconds."""
        timeout: float = getattr(self, priority.value)
        return timeout


# The part that is written in a file. `SchedulerSettings` adds model and pools, which are configured elsewhere
# in the file.
@settings
class SchedulerConfig:
    """Admission, ordering and dispatch of one model's requests.

    Attributes:
        policy: name of the ordering policy, a key of `POLICIES` in `serve_app.core.policies`.
    """

    policy: str = "ewsjf"
    # Share of the requests that are scheduled. The others go directly to the replica with the fewest
    # requests: with 0, the scheduler only observes. `ewsjf mode` changes the share at run time.
    active_share: Annotated[float, SHARE] = 1.0
    # Maximum number of queued requests, which bounds memory and the wait of the last one. The default is
    # nearly two minutes of work at 20 requests/s. Beyond that a rejection with `Retry-After` serves clients
    # better than a longer queue.
    max_waiting: Annotated[int, at_least(1)] = 2_000
    queue_timeout_s: QueueTimeouts = field(default_factory=QueueTimeouts)
    # Number of replicas lost under a request after which it fails. After the first loss it is quarantined
    # from other suspects, so it most likely caused the second loss itself. Each loss costs an engine.
    max_attempts: Annotated[int, at_least(1), INTERNAL] = 2
    # Number of put-backs, for any reason but revocations, after which a request fails. With backoff, 16 take
    # about four minutes, and the queue timeout usually ends the request earlier.
    max_put_backs: Annotated[int, at_least(1), INTERNAL] = 16
    # Seconds that a request waits while no replica that could serve it is alive, before it is rejected with
    # 503. This covers a replica that reconnects or reports late. It does not cover the start of an engine, so
    # that clients can fail over early.
    no_replica_grace_s: Annotated[float, NOT_NEGATIVE, ADVANCED] = 5.0
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    estimator: Annotated[EstimatorSettings, INTERNAL] = field(default_factory=EstimatorSettings)
    backpressure: BackpressureSettings = field(default_factory=BackpressureSettings)
    backfill: Annotated[BackfillSettings, ADVANCED] = field(default_factory=BackfillSettings)
    fairness: FairnessSettings = field(default_factory=FairnessSettings)
    floors: FloorSettings = field(default_factory=FloorSettings)
    class_floors: Annotated[ClassFloorSettings, ADVANCED] = field(default_factory=ClassFloorSettings)
    engine_priority: EnginePrioritySettings = field(default_factory=EnginePrioritySettings)
    affinity: Annotated[AffinitySettings, ADVANCED] = field(default_factory=AffinitySettings)
    isolation: Annotated[IsolationSettings, ADVANCED] = field(default_factory=IsolationSettings)
    delay_bound: Annotated[DelayBoundSettings, ADVANCED] = field(default_factory=DelayBoundSettings)
    promotion: Annotated[PromotionSettings, INTERNAL] = field(default_factory=PromotionSettings)
    programs: ProgramsSettings = field(default_factory=ProgramsSettings)
    latency_targets: LatencyTargetSettings = field(default_factory=LatencyTargetSettings)
    ewsjf: Annotated[EwsjfSettings, ADVANCED] = field(default_factory=EwsjfSettings)


@settings
class SchedulerSettings(SchedulerConfig):
    """All settings of one model's scheduler.

    Attributes:
        model: the model name that clients send.
        aliases: other names for the same model (LoRA adapters, old names).
        on_demand_pools: pools whose first replica starts when a request waits for them.
        price, budget_per_hour: see `Spending`; without a budget, nothing is limited.
    """

    model: str
    aliases: tuple[str, ...] = ()
    on_demand_pools: tuple[str, ...] = ()
    price: TokenPrices | None = None
    budget_per_hour: float | None = None
    routing: RoutingSettings = field(default_factory=RoutingSettings)

    @property
    def effective_backpressure(self) -> BackpressureSettings:
        """The effective settings: an engine that orders its own queue may have a longer one."""
        mode = self.engine_priority
        if not mode.enabled:
            return self.backpressure
        return replace(
            self.backpressure,
            target_waiting=mode.target_waiting,
            max_prefill_backlog_s=mode.max_prefill_backlog_s,
        )

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model must not be empty: give the name that clients send")
        if self.fairness.mode is not FairnessMode.TOKENS and (self.floors.tenants or self.floors.classes):
            raise ValueError(
                f"floors are tokens per second, but fairness.mode is {self.fairness.mode.value}: "
                "set it to tokens, or remove floors"
            )

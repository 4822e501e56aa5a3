"""Settings of one model's scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from serve_app.request import PriorityClass
from serve_app.routing.estimation.estimate import EstimatorSettings
from serve_app.routing.pools import RoutingSettings
from serve_app.routing.prefill_cost import PrefillCostSettings
from serve_app.routing.prefix.affinity import AffinitySettings
from serve_app.scheduling.admission.settings import AdmissionSettings
from serve_app.scheduling.dispatch.backpressure import BackpressureSettings
from serve_app.scheduling.dispatch.class_floors import ClassFloorSettings
from serve_app.scheduling.dispatch.engine_priority import EnginePrioritySettings
from serve_app.scheduling.dispatch.promotion import PromotionSettings
from serve_app.scheduling.isolation.prefill_isolation import IsolationSettings
from serve_app.scheduling.policies.settings import EwsjfSettings
from serve_app.scheduling.queueing.fairness import FairnessSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTimeouts:
    """How long a request of each class may wait in the queue when its client names no time, in seconds."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    # People leave long before a minute is over; a program's own timeout is often ten minutes (the OpenAI
    # SDK's default), so the default class ends well inside that and the client hears a clear 504.
    interactive: float = 60.0
    default: float = 300.0
    # Batch work waits for idle capacity, which may come only at night.
    batch: float = 43_200.0

    def __post_init__(self) -> None:
        for priority in PriorityClass:
            if not self.of(priority) > 0:
                raise ValueError(f"queue_timeout_s.{priority} must be positive, got {self.of(priority)}")

    def of(self, priority: PriorityClass) -> float:
        """The time for one class, in seconds."""
        timeout: float = getattr(self, priority.value)
        return timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Everything that one model's scheduler is told.

    Attributes:
        model: name that clients ask for.
        aliases: other names for the same model (LoRA adapters, old names).
        policy: name of the ordering policy, a key of `scheduling.policies.POLICIES`.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    model: str
    aliases: tuple[str, ...] = ()
    policy: str = "ewsjf"
    # A bound on memory and on the wait of the last in the queue. At 20 requests/s it is nearly two minutes
    # of work: past that, a refusal with Retry-After serves the client better than a place in the queue.
    max_waiting: int = 2_000
    queue_timeout_s: QueueTimeouts = field(default_factory=QueueTimeouts)
    # Replicas that a request may be lost on before it is given up: one may die by chance, three in a row
    # under the same request point at the request.
    max_attempts: int = 3
    # A pool that starts or restarts has no replica for a while (vLLM takes 40-80 s); requests that come in
    # after this long without any replica are refused with 503 instead of queued.
    no_replica_grace_s: float = 30.0
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    # Upper end of the Retry-After that clients are given; the OpenAI SDK obeys up to 120 s.
    retry_after_cap_s: float = 60.0
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    estimator: EstimatorSettings = field(default_factory=EstimatorSettings)
    backpressure: BackpressureSettings = field(default_factory=BackpressureSettings)
    fairness: FairnessSettings = field(default_factory=FairnessSettings)
    class_floors: ClassFloorSettings = field(default_factory=ClassFloorSettings)
    engine_priority: EnginePrioritySettings = field(default_factory=EnginePrioritySettings)
    affinity: AffinitySettings = field(default_factory=AffinitySettings)
    isolation: IsolationSettings = field(default_factory=IsolationSettings)
    prefill_cost: PrefillCostSettings = field(default_factory=PrefillCostSettings)
    promotion: PromotionSettings = field(default_factory=PromotionSettings)
    ewsjf: EwsjfSettings = field(default_factory=EwsjfSettings)

    @property
    def backpressure_in_force(self) -> BackpressureSettings:
        """Limits on what an engine is sent: one that orders its own queue may have a longer one."""
        mode = self.engine_priority
        if not mode.enabled:
            return self.backpressure
        return replace(
            self.backpressure,
            target_waiting=mode.target_waiting,
            batch_target_waiting=int(mode.batch_share * mode.target_waiting),
            max_prefill_backlog_s=mode.max_prefill_backlog_s,
        )

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model must not be empty: give the name that clients send")
        for name in ("max_waiting", "max_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("no_replica_grace_s", "retry_after_cap_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

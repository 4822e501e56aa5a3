"""Settings of one model's scheduler, with those of admission and of the EWSJF policies."""

from dataclasses import asdict, field, fields, replace
from typing import Annotated

from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.dispatch.engine_priority import EnginePrioritySettings
from serve_app.core.dispatch.starvation import ClassFloorSettings, PromotionSettings
from serve_app.core.isolation import IsolationSettings
from serve_app.core.queueing.delay_bound import DelayBoundSettings
from serve_app.core.queueing.fairness import FairnessSettings
from serve_app.core.routing.estimation.bytes_per_token import EstimatorSettings
from serve_app.core.routing.pools import RoutingSettings, WrittenRouting
from serve_app.core.routing.prefix import AffinitySettings
from serve_app.core.settings_base import (
    ADVANCED,
    INTERNAL,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    SHARE,
    at_least,
    settings,
)
from serve_app.request import PriorityClass


@settings(block="admission")
class AdmissionSettings:
    """Who may wait, besides the bound `max_waiting` on all of them.

    Attributes:
        tenant_share: share of `max_waiting` that one tenant can fill when it is alone.
    """

    # A fifth is left for tenants that arrive later; two heavy tenants get 44 % each, and a ninth is left.
    tenant_share: Annotated[float, POSITIVE_SHARE, ADVANCED] = 0.8


# Settings of EWSJF: the score's weights and the life of queues.


@settings(block="ewsjf.weights")
class ScoreWeights:
    """Weights of the density-weighted score, Eq 1 and Eq 4; names as in the paper.

    `w_urg(b) = a_u * b + b_u` weighs waiting, `w_fair(b) = a_f * b + b_f` weighs length, b being the mean
    length of the queue. Both are clamped to `floor`, or long queues could end up with a negative urgency.
    """

    w_base: Annotated[float, NOT_NEGATIVE] = 1.0
    a_u: float = 1e-4
    b_u: float = 1.0
    a_f: float = -5e-5
    b_f: float = 0.5
    floor: Annotated[float, POSITIVE] = 1e-3


PAPER_WEIGHTS = ScoreWeights()

OWN_WEIGHTS = ScoreWeights(a_u=0.0, b_u=0.1)
"""Ours. With the paper's weights a request that has waited a hundred times its own prefill outscores a fresh
request of a tenth of its length. After a burst that holds for all long ones, which then delay the short ones.
The bound on waiting is not the score's task: `promotion` sets it. `experiments/policies` compares both."""


@settings
class GivenWeights:
    """Weights that were set; the policy uses its own for those that are None."""

    # Constant term of the score.
    w_base: Annotated[float | None, INTERNAL] = None
    # The part of the weight of waiting that grows with the mean length of the queue, per token.
    a_u: float | None = None
    # The part of the weight of waiting that is the same for all queues.
    b_u: float | None = None
    # The part of the weight of length that grows with the mean length of the queue, per token.
    a_f: float | None = None
    # The part of the weight of length that is the same for all queues.
    b_f: float | None = None
    # Lower bound of both weights.
    floor: Annotated[float | None, INTERNAL] = None

    def __post_init__(self) -> None:
        self.over(PAPER_WEIGHTS)

    @classmethod
    def all_of(cls, weights: ScoreWeights) -> "GivenWeights":
        """Every weight set explicitly."""
        return cls(**asdict(weights))

    def over(self, others: ScoreWeights) -> ScoreWeights:
        """These weights, and `others` where one is None."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return ScoreWeights(
            **{name: getattr(others, name) if value is None else value for name, value in given.items()}
        )


@settings(block="ewsjf")
class EwsjfSettings:
    """How the EWSJF policies queue and score."""

    # By default the paper's policy has the paper's weights, and ours ages less (`OWN_WEIGHTS`).
    weights: GivenWeights = field(default_factory=GivenWeights)


@settings(block="queue_timeout_s")
class QueueTimeouts:
    """Seconds that a request of each class may wait in the queue, when its client states no timeout."""

    # People leave long before a minute is over. A program's own timeout is often ten minutes (the default of
    # the OpenAI SDK), so the default class ends well before that, and the client gets a 504.
    interactive: Annotated[float, POSITIVE] = 60.0
    # Inside the ten minutes after which programs give up.
    default: Annotated[float, POSITIVE] = 300.0
    # Batch work waits for idle capacity, which may come only at night.
    batch: Annotated[float, POSITIVE] = 43_200.0

    def of(self, priority: PriorityClass) -> float:
        """The time for one class, in seconds."""
        timeout: float = getattr(self, priority.value)
        return timeout


# As a file has it: `SchedulerSettings` adds the names of model and pools, which stand elsewhere in the file.
@settings
class WrittenScheduler:
    """How one model's requests are admitted, ordered and sent to engines.

    Attributes:
        policy: name of the ordering policy, a key of `POLICIES` in `serve_app.core.policies`.
    """

    policy: str = "ewsjf"
    # Share of the requests that are scheduled. The others go straight to the replica with the fewest: 0 only
    # observes what scheduling would do, and `python -m serve_app mode` changes it while it runs.
    active_share: Annotated[float, SHARE] = 1.0
    # A bound on memory and on the wait of the last request. At 20 requests/s it is nearly two minutes of
    # work; beyond that a refusal with Retry-After serves the client better than a longer queue.
    max_waiting: Annotated[int, at_least(1)] = 2_000
    queue_timeout_s: QueueTimeouts = field(default_factory=QueueTimeouts)
    # Replicas that a request may be lost on before it fails. After the first it goes where no other suspect
    # is, so the second loss is its own doing, or rare bad luck. Each costs everybody an engine.
    max_attempts: Annotated[int, at_least(1), ADVANCED] = 2
    # Times that a request may come back from replicas, for whatever reason, before it fails. With the
    # backoff between them, 16 take about four minutes; its queue timeout usually ends it before.
    max_put_backs: Annotated[int, at_least(1), INTERNAL] = 16
    # How long a request waits while no replica that could take it is alive, before it is refused with 503.
    # It covers a replica that reconnects or whose report is late. It is not meant to cover the start of an
    # engine: a client that is told so at once may go elsewhere.
    no_replica_grace_s: Annotated[float, NOT_NEGATIVE, ADVANCED] = 5.0
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    routing: WrittenRouting = field(default_factory=WrittenRouting)
    estimator: Annotated[EstimatorSettings, INTERNAL] = field(default_factory=EstimatorSettings)
    backpressure: BackpressureSettings = field(default_factory=BackpressureSettings)
    fairness: FairnessSettings = field(default_factory=FairnessSettings)
    class_floors: Annotated[ClassFloorSettings, ADVANCED] = field(default_factory=ClassFloorSettings)
    engine_priority: EnginePrioritySettings = field(default_factory=EnginePrioritySettings)
    affinity: Annotated[AffinitySettings, ADVANCED] = field(default_factory=AffinitySettings)
    isolation: Annotated[IsolationSettings, ADVANCED] = field(default_factory=IsolationSettings)
    delay_bound: Annotated[DelayBoundSettings, INTERNAL] = field(default_factory=DelayBoundSettings)
    promotion: Annotated[PromotionSettings, INTERNAL] = field(default_factory=PromotionSettings)
    ewsjf: Annotated[EwsjfSettings, ADVANCED] = field(default_factory=EwsjfSettings)


@settings
class SchedulerSettings(WrittenScheduler):
    """All settings of one model's scheduler.

    Attributes:
        model: name that clients request.
        aliases: other names for the same model (LoRA adapters, old names).
        on_demand_pools: pools whose first replica starts when a request waits for them.
    """

    model: str
    aliases: tuple[str, ...] = ()
    on_demand_pools: tuple[str, ...] = ()
    routing: RoutingSettings = field(default_factory=RoutingSettings)

    @property
    def backpressure_in_force(self) -> BackpressureSettings:
        """Backpressure as it applies: an engine that orders its own queue may have a longer one."""
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

"""One simulated run: a policy, a fleet, a trace at a rate and a seed give raw records and figures.

The same settings give byte-identical decisions. Every policy serves the same requests to their end, and the
same ones are measured: all but the first tenth by arrival, during which queues fill and estimators learn. The
last arrivals are measured as well, and the run continues until the last one is done, because excluding them
would hide the requests that a policy has delayed.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Protocol

from serve_app.core import SchedulerSettings
from serve_app.core.decision_log import Decision, RunHeader
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import SHORT_AT_TOKENS, Slo, Summary, SummaryRules, summarise
from serve_app.core.policies import learns_queues, make_policy
from serve_app.core.policies.length_queues import Partition
from serve_app.core.routing.estimation.estimate import EstimatorSettings, TokenEstimator
from serve_app.core.settings_base import POSITIVE, at_least, settings, share_below
from serve_app.errors import SettingsError
from serve_app.lab.simulation.baselines import SIMULATED_POLICIES
from serve_app.lab.simulation.direct import DirectSimulation
from serve_app.lab.simulation.fleet import FleetSettings
from serve_app.lab.simulation.partitions import PartitionSource
from serve_app.lab.simulation.scheduler_settings import scheduler_settings
from serve_app.lab.simulation.simulation import ReplicaPlan, SimulatedRequest, Simulation, SimulationSettings
from serve_app.lab.simulation.workload import (
    Disclosure,
    FittedTrace,
    TraceChoice,
    at_rate,
    choose_trace,
    fit,
    requests_of,
)


class EstimatorSource(Protocol):
    """Factory of estimators that replace the scheduler's; a plain value that can be sent to processes."""

    def estimator(
        self, settings: EstimatorSettings, requests: Sequence[SimulatedRequest], seed: int
    ) -> TokenEstimator:
        """Return the estimator of one run."""
        ...


DIRECT = "direct"
"""The baseline without a gateway."""
ORACLE = "oracle"
"""The policy that knows the length of each output, which cannot be deployed."""
# Surplus of created over freed objects that triggers a collection. A few events create Python's default of
# 700.
_YOUNG_OBJECTS = 50_000


@settings(block="slo")
class SloByLength(Slo):
    """An SLO whose TTFT limit depends on the length of the prompt.

    Attributes:
        ttft_s: for short prompts.
        long_ttft_s: for all others.
        short_at_tokens: longest short prompt.
    """

    ttft_s: float | None = 1.0
    tpot_s: float | None = 0.1
    long_ttft_s: Annotated[float | None, POSITIVE] = 10.0
    short_at_tokens: Annotated[int, at_least(1)] = SHORT_AT_TOKENS

    def met_by(self, record: RequestRecord) -> bool:
        """Return whether the request completed within every limit of its class."""
        is_short = record.prompt_tokens <= self.short_at_tokens
        return self.met_with(record, self.ttft_s if is_short else self.long_ttft_s)


@settings
class RunSettings:
    """All inputs of a run.

    Attributes:
        rate_per_s: mean arrival rate; None for the trace's own.
        load: the rate as a share of the saturated one, for readers of results; None if unknown.
        estimator: replaces the scheduler's estimates of lengths; None for those of production.
        scheduler: settings that differ from the defaults, by dotted path (`backpressure.target_waiting`).
        partition: source of the queues for a policy that learns them; None for the prior.
        warm_up_ratio: share of requests, by arrival, that is excluded from measurement.
        label: name of the policy in results; by default that of the policy.
    """

    policy: str
    fleet: FleetSettings
    trace: TraceChoice
    seed: int = 0
    rate_per_s: float | None = None
    load: float | None = None
    disclosure: Disclosure = field(default_factory=Disclosure)
    estimator: EstimatorSource | None = None
    simulation: SimulationSettings = field(default_factory=SimulationSettings)
    scheduler: Mapping[str, object] = field(default_factory=dict)
    partition: PartitionSource | None = None
    slo: Slo = field(default_factory=SloByLength)
    short_at_tokens: int = SHORT_AT_TOKENS
    warm_up_ratio: Annotated[float, share_below(1)] = 0.1
    label: str = ""

    def __post_init__(self) -> None:
        if self.policy not in policy_names():
            raise SettingsError(f"no policy {self.policy!r}: choose one of {', '.join(policy_names())}")

    @property
    def isolates(self) -> bool:
        """True if the policy isolates long prefills, so that engines get a chunk limit for them."""
        return self.policy != DIRECT and make_policy(self.policy, table=SIMULATED_POLICIES).isolates

    @property
    def name(self) -> str:
        """Name of the policy in results."""
        return self.label or self.policy


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of a run.

    Attributes:
        workload: the requests that were played, and how many were left out.
        records: every request, by arrival.
        measured: those after the warm-up.
        summary: figures of the measured requests.
        whole: figures of all requests, for total work and time.
        partitions: the learned partitions that were applied, each with its time.
        wall_s: real time of the run.
    """

    settings: RunSettings
    workload: FittedTrace
    records: list[RequestRecord]
    measured: list[RequestRecord]
    summary: Summary
    whole: Summary
    wall_s: float
    partitions: tuple[tuple[float, Partition], ...] = ()


def policy_names() -> list[str]:
    """Return all policies that can be simulated."""
    return [DIRECT, *SIMULATED_POLICIES]


def simulate(settings: RunSettings, on_decision: Callable[[Decision], None] | None = None) -> RunResult:
    """Play one run to its end.

    Args:
        on_decision: called with every decision of the scheduler.

    Raises:
        TraceError: there is no such trace, or none of its requests fits the engines.
        SettingsError: a setting is unknown or out of range.
    """
    began = time.perf_counter()
    with _few_collections():
        workload = fitted_trace(settings)
        played, partitions = _play(settings, workload, on_decision)
    records = sorted(played, key=lambda record: (record.arrived_at, record.request_id))
    measured = records[round(settings.warm_up_ratio * len(records)) :]
    rules = SummaryRules(slo=settings.slo, short_at_tokens=settings.short_at_tokens)
    return RunResult(
        settings=settings,
        workload=workload,
        records=records,
        measured=measured,
        summary=summarise(measured, rules),
        whole=summarise(records, rules),
        wall_s=time.perf_counter() - began,
        partitions=partitions,
    )


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Collect garbage less often: a run creates many objects that live until its end, and hardly a cycle."""
    before = gc.get_threshold()
    gc.set_threshold(_YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def run_header(settings: RunSettings) -> RunHeader:
    """Return the header of a run's decision log. A `direct` run has no scheduler, and so no log.

    Raises:
        SettingsError: a setting is unknown or out of range.
    """
    return RunHeader(
        settings=_scheduler_settings(settings),
        run={"policy": settings.policy, "label": settings.name, "seed": settings.seed},
    )


def _scheduler_settings(settings: RunSettings) -> SchedulerSettings:
    return scheduler_settings(settings.policy, settings.fleet.routing, settings.scheduler)


def fitted_trace(settings: RunSettings) -> FittedTrace:
    """Return the requests of a run at their rate, without those that fit no engine."""
    longest = max(plan.engine.max_model_len for plan in settings.fleet.plans())
    fitted = fit(choose_trace(settings.trace, settings.seed), longest)
    return replace(fitted, trace=at_rate(fitted.trace, settings.rate_per_s))


def _play(
    settings: RunSettings, workload: FittedTrace, on_decision: Callable[[Decision], None] | None
) -> tuple[list[RequestRecord], tuple[tuple[float, Partition], ...]]:
    plans = settings.fleet.plans(isolated=settings.isolates)
    requests = _requests(settings, workload, plans)
    if settings.policy == DIRECT:
        return DirectSimulation(plans).run(requests), ()
    scheduler = _scheduler_settings(settings)
    learner = None
    if settings.partition is not None and learns_queues(settings.policy, SIMULATED_POLICIES):
        learner = settings.partition.learner(settings.policy)
    estimator = None
    if settings.estimator is not None:
        estimator = settings.estimator.estimator(scheduler.estimator, requests, settings.seed)
    simulation = Simulation(scheduler, plans, settings.simulation, on_decision, learner, estimator)
    return simulation.run(requests), tuple(simulation.partitions)


def _requests(
    settings: RunSettings, workload: FittedTrace, plans: Sequence[ReplicaPlan]
) -> list[SimulatedRequest]:
    disclosure = settings.disclosure
    if settings.policy == ORACLE:
        disclosure = replace(disclosure, output_known=True)
    return list(requests_of(workload.trace, disclosure, plans[0].engine.block_size))

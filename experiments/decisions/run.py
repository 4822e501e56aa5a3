"""What do the scheduler's decisions earn, each against the variant that lacks only that decision?

Simulated, at rates in requests per second. Every variant of a case gets the same requests at the same times.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from experiments.common.config import as_json
from experiments.common.experiment import Cell, Context, Experiment, Measurement, play_cells
from experiments.common.provenance import generated
from experiments.decisions.workloads import WORKLOADS, Workload, retried
from serve_app.core.admission.admission import RetryReservations
from serve_app.core.commands import Conclude
from serve_app.core.decision_log import Decision
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import Distribution
from serve_app.core.policies import MakePolicy, make_policy
from serve_app.core.policies.ewsjf import Ewsjf
from serve_app.core.policies.protocol import PolicyInputs
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.estimation.estimate import EstimatorSettings, TokenEstimate, TokenEstimator
from serve_app.core.routing.estimation.output_length import OutputEstimate, OutputLengthEstimator
from serve_app.core.settings_base import settings
from serve_app.errors import Outcome, SettingsError
from serve_app.lab.simulation.baselines import SIMULATED_POLICIES
from serve_app.lab.simulation.run import Disclosure, SloByLength, requests_of, scheduler_settings
from serve_app.lab.simulation.simulation import ReplicaPlan, SimulatedRequest, Simulation
from serve_app.lab.workloads import stream
from serve_app.request import Request, Usage


@settings
class Variant:
    """One way to decide.

    Attributes:
        scheduler: settings by dotted path.
        lengths: knowledge of output lengths: `learned`, `true`, or `none` (nothing is ever learned).
        order: knowledge of output lengths that the order uses: `none`, `learned`, or the log sigma of the
            error of predictions; 0 is the truth.
        forecast: whether the peak of the KV cache is forecast; otherwise requests hold their final size.
        headroom: whether tenants beyond their share leave headroom.
        reservations: whether capacity is reserved for the retries of rejected requests.
        chunks: whether engines compute long prefills in chunks; by default under a policy that isolates.
    """

    policy: str = "ewsjf"
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    lengths: str = "learned"
    order: float | Literal["none", "learned"] = "none"
    forecast: bool = True
    headroom: bool = True
    reservations: bool = True
    chunks: bool | None = None


@settings
class Case:
    """A workload at some rates, with its variants.

    Attributes:
        queue_timeout_s: of all requests; None for no limit. A request that is rejected, because it could not
            be served in time, retries after its `Retry-After`, three times at most.
    """

    workload: str
    requests: int
    rates_per_s: tuple[float, ...]
    variants: Mapping[str, Variant]
    queue_timeout_s: float | None = None


@settings
class DecisionsExperiment:
    """Settings of the experiment.

    Attributes:
        first_seed: seeds are counted from here, because others were used during development.
    """

    cases: Mapping[str, Case]
    seeds: int
    first_seed: int = 1_000


class _Known(OutputEstimate):
    """An answer of known length."""

    def ends(self, age: float) -> tuple[float, ...]:
        return (max(self.expected, age),)


class _TrueLengths(TokenEstimator):
    """Estimator that knows how long each answer will be."""

    def __init__(self, estimator: EstimatorSettings, lengths: Mapping[str, int]) -> None:
        super().__init__(estimator)
        self._lengths = lengths

    def estimate(self, request: Request) -> TokenEstimate:
        made, length = super().estimate(request), self._lengths[request.request_id]
        output = _Known(made.output.limit, float(length), float(length), longest=float(length))
        return replace(made, expected_output_tokens=length, least_output_tokens=length, output=output)


class _UnlearnedLengths(TokenEstimator):
    """Estimator that learns no output lengths."""

    def observe(self, request: Request, usage: Usage) -> None:
        super().observe(request, usage)
        self._output = OutputLengthEstimator()


class _OutputOrder(Ewsjf):
    """EWSJF that prefers short predicted answers: within a queue, and by the density of its score.

    Args:
        predictions: output tokens by request; None for the estimator's.
    """

    def __init__(self, inputs: PolicyInputs, predictions: Mapping[str, float] | None) -> None:
        super().__init__(inputs)
        self._predictions = predictions

    def key(self, scheduled: ScheduledRequest) -> float:
        if self._predictions is None:
            return float(scheduled.estimate.expected_output_tokens)
        return self._predictions[scheduled.request.request_id]

    def score(self, head: ScheduledRequest, now: float) -> float:
        tokens = head.prefill_tokens + 1
        work = tokens + _PREFILL_TOKENS_PER_OUTPUT_TOKEN * self.key(head)
        return super().score(head, now) * tokens / work


# As the oracle of the simulator.
_PREFILL_TOKENS_PER_OUTPUT_TOKEN = 10.0


class _NoReservations(RetryReservations):
    """Reserves nothing."""

    def reserve(self, *_: object, **_named: object) -> bool:
        return False


class _Clients:
    """Clients that retry rejected requests after their `Retry-After`."""

    def __init__(self, requests: list[SimulatedRequest]) -> None:
        self.simulation: Simulation | None = None
        self.served = 0
        self._requests = {each.request.request_id: each for each in requests}
        self._left = dict.fromkeys(self._requests, _RETRIES)

    def on_decision(self, decision: Decision) -> None:
        """Retry the requests that were rejected."""
        for command in decision.commands:
            if not isinstance(command, Conclude):
                continue
            self.served += command.conclusion.outcome is Outcome.COMPLETED
            left, delay_s = self._left[command.request_id], command.conclusion.retry_after_s
            if delay_s is not None and left:
                self._retry(self._requests[command.request_id], decision.now + delay_s, left - 1)

    def _retry(self, simulated: SimulatedRequest, at: float, left: int) -> None:
        assert self.simulation is not None
        retry = retried(simulated, at)
        request_id = retry.request.request_id
        self._requests[request_id], self._left[request_id] = retry, left
        self.simulation.submit(retry)


_RETRIES = 3


@dataclass(frozen=True, slots=True)
class _Run:
    case: Case
    variant: Variant
    rate_per_s: float
    seed: int

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.case.workload]

    def play(self) -> Mapping[str, float | None]:
        """Run all requests to their end, and return the figures."""
        workload, variant = self.workload, self.variant
        plans = self._plans()
        trace = workload.draw(self.seed, self.rate_per_s, self.case.requests)
        disclosure = Disclosure(queue_timeout_s=self.case.queue_timeout_s or math.inf)
        requests = list(requests_of(trace, disclosure, plans[0].engine.block_size))
        scheduler = scheduler_settings(variant.policy, workload.fleet.routing, variant.scheduler)
        estimator: TokenEstimator | None = None
        if variant.lengths == "true":
            lengths = {each.request.request_id: each.output_tokens for each in requests}
            estimator = _TrueLengths(scheduler.estimator, lengths)
        elif variant.lengths == "none":
            estimator = _UnlearnedLengths(scheduler.estimator)
        clients = _Clients(requests)
        simulation = clients.simulation = Simulation(
            scheduler,
            plans,
            on_decision=clients.on_decision,
            estimator=estimator,
            policies=self._policies(requests),
        )
        if not variant.reservations:
            simulation.scheduler.admission.retry_reservations = _NoReservations()
        simulation.scheduler.ledger.forecasts_peak = variant.forecast
        simulation.scheduler.headroom.is_enabled &= variant.headroom
        records = sorted(simulation.run(requests), key=lambda one: (one.arrived_at, one.request_id))
        served = {"served": clients.served / len(requests)}
        return _figures(records, workload.short_at_tokens) | served

    def _policies(self, requests: list[SimulatedRequest]) -> Mapping[str, MakePolicy]:
        order, predictions = self.variant.order, None
        if order == "none":
            return SIMULATED_POLICIES
        if order != "learned":
            rng = stream(self.seed, "decisions predictions")
            errors = np.exp(rng.normal(0, float(order), len(requests)))
            predictions = {
                each.request.request_id: each.output_tokens * float(error)
                for each, error in zip(requests, errors, strict=True)
            }
        return {**SIMULATED_POLICIES, "ewsjf": lambda inputs: _OutputOrder(inputs, predictions)}

    def _plans(self) -> list[ReplicaPlan]:
        isolated = self.variant.chunks
        if isolated is None:
            isolated = make_policy(self.variant.policy, table=SIMULATED_POLICIES).isolates
        return self.workload.fleet.plans(isolated=isolated)


def _figures(records: list[RequestRecord], short_at_tokens: int) -> dict[str, float | None]:
    measured = records[len(records) // 10 :]
    slo = SloByLength(short_at_tokens=short_at_tokens)
    by_kind = {
        "short": [one for one in measured if one.prompt_tokens <= short_at_tokens],
        "long": [one for one in measured if one.prompt_tokens > short_at_tokens],
        "light": [one for one in measured if one.tenant.startswith("light")],
        "heavy": [one for one in measured if one.tenant.startswith("heavy")],
        "people": [one for one in measured if one.tenant == "people"],
        "program": [one for one in measured if one.tenant == "program"],
    }
    figures: dict[str, float | None] = {}
    for kind, some in by_kind.items():
        ttft = Distribution.of(one.ttft_s for one in some if one.ttft_s is not None)
        figures |= {f"{kind}_mean_s": ttft.mean, f"{kind}_p99_s": ttft.p99, f"{kind}_max_s": ttft.max}
    last = max(one.finished_at for one in records)
    paces = Distribution.of(one.tpot_s for one in measured if one.tpot_s is not None)
    return figures | {
        "goodput": sum(slo.met_by(one) for one in measured) / len(measured),
        "tpot_s": paces.mean,
        "tokens_per_s": sum(one.prompt_tokens + one.output_tokens for one in records) / last,
        "attempts": len(records),
        "preemptions": sum(one.preemptions for one in records),
    }


def play(experiment: DecisionsExperiment, context: Context) -> Iterator[Measurement]:
    """Measure every variant of every case at every rate."""
    if unknown := [each.workload for each in experiment.cases.values() if each.workload not in WORKLOADS]:
        raise SettingsError(f"no workload {', '.join(unknown)}: there are {', '.join(WORKLOADS)}")
    seeds = range(experiment.first_seed, experiment.first_seed + experiment.seeds)
    cells = [
        Cell(
            key={"case": name, "rate": rate, "variant": label},
            runs=[_Run(case, variant, rate, seed) for seed in seeds],
            seeds=seeds,
            traces=generated(case.workload),
            settings=as_json(replace(case, variants={label: variant})),
        )
        for name, case in experiment.cases.items()
        for rate in case.rates_per_s
        for label, variant in case.variants.items()
    ]
    return play_cells("decisions", cells, _Run.play, context)


EXPERIMENT = Experiment(settings=DecisionsExperiment, play=play)

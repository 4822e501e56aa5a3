"""How many latency targets are met, at what price for other requests, and are the refusals right?

Simulated. A share of the requests has a target, and asks to be refused if it is expected to miss it. Every
variant gets the same requests at the same times.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from experiments.common.config import as_json
from experiments.common.experiment import Cell, Context, Experiment, Measurement, play_cells
from experiments.common.provenance import generated
from experiments.common.rows import Key
from experiments.decisions.workloads import WORKLOADS, Workload, retried
from experiments.targets import live
from experiments.targets.figures import Judgement, figures_of, measured_of
from serve_app.cli.command import progress_bar
from serve_app.core.commands import Conclude
from serve_app.core.decision_log import Decision
from serve_app.core.metrics.summary import Distribution
from serve_app.core.policies.protocol import OrderingPolicy
from serve_app.core.request import ScheduledRequest
from serve_app.core.settings_base import settings
from serve_app.errors import Conclusion, SettingsError
from serve_app.lab.simulation.baselines import SIMULATED_POLICIES
from serve_app.lab.simulation.run import (
    ONE_POOL,
    DirectSimulation,
    Disclosure,
    EngineChanges,
    FleetSettings,
    requests_of,
    scheduler_settings,
)
from serve_app.lab.simulation.simulation import ReplicaPlan, SimulatedReplica, SimulatedRequest, Simulation
from serve_app.lab.workloads import Trace, TraceRequest, stream
from serve_app.request import LatencyTarget

# Targets for the time per output token, beside prompts of 64,000 tokens


STATED, NOT_STATED = "targets", "without targets"


@settings
class PaceSettings:
    """The case.

    Attributes:
        chunks: most tokens of one prompt in an iteration, one case each.
        share: of the short requests that state the target.
    """

    chunks: tuple[int, ...] = (2_048, 8_192)
    tpot_s: float = 0.03
    share: float = 0.3
    short_per_s: float = 12.0
    long_per_s: float = 0.12
    long_tokens: int = 64_000
    replicas: int = 4
    requests: int = 3_000


@dataclass(frozen=True, slots=True)
class PaceRun:
    """One run."""

    settings: PaceSettings
    chunk: int
    variant: str
    seed: int

    def play(self) -> Mapping[str, float | None]:
        """Run all requests, and return the figures of those with a target and of the others."""
        case = self.settings
        engine = EngineChanges(
            max_model_len=131_072,
            long_prefill_token_threshold=self.chunk,
            max_num_batched_tokens=max(8_192, self.chunk),
        )
        fleet = FleetSettings(
            profile="llama31-8b-h100-tp1", replicas={ONE_POOL: case.replicas}, engine=engine
        )
        plans = fleet.plans()
        rng = stream(self.seed, "targets pace")
        requests = list(requests_of(self._trace(rng), Disclosure(), plans[0].engine.block_size))
        short = [each for each in requests if each.prompt_tokens < case.long_tokens]
        chosen = {each.request.request_id for each in short if rng.random() < case.share}
        if self.variant == STATED:
            target = LatencyTarget(tpot_s=case.tpot_s)
            requests = [
                with_target(each, target) if each.request.request_id in chosen else each for each in requests
            ]
        simulation = Simulation(scheduler_settings("ewsjf", fleet.routing, {}), plans)
        records = simulation.run(requests)[len(requests) // 10 :]
        paces = [one.tpot_s for one in records if one.request_id in chosen and one.tpot_s is not None]
        short_ones = [one for one in records if one.prompt_tokens < case.long_tokens]
        others = [one for one in short_ones if one.request_id not in chosen]
        long = [one for one in records if one.prompt_tokens >= case.long_tokens]
        pace = Distribution.of(paces)
        return {
            "met": sum(each <= case.tpot_s for each in paces) / len(paces),
            "tpot_mean_s": pace.mean,
            "tpot_p99_s": pace.p99,
            "others_tpot_s": Distribution.of(one.tpot_s for one in others if one.tpot_s is not None).mean,
            "others_ttft_p99_s": Distribution.of(one.ttft_s for one in others if one.ttft_s is not None).p99,
            "long_ttft_s": Distribution.of(one.ttft_s for one in long if one.ttft_s is not None).mean,
        }

    def _trace(self, rng: np.random.Generator) -> Trace:
        case = self.settings
        rate_per_s = case.short_per_s + case.long_per_s
        requests = []
        for at in np.cumsum(rng.exponential(1 / rate_per_s, case.requests)):
            is_long = rng.random() < case.long_per_s / rate_per_s
            requests.append(
                TraceRequest(
                    arrival_s=float(at),
                    prompt_tokens=case.long_tokens if is_long else int(rng.integers(50, 400)),
                    output_tokens=int(rng.integers(100, 400)),
                )
            )
        return Trace(name="pace", source="generated", requests=tuple(requests))


def with_target(simulated: SimulatedRequest, target: LatencyTarget) -> SimulatedRequest:
    """Return the request with a target."""
    request = simulated.request
    submission = msgspec.structs.replace(request.submission, target=target)
    return replace(simulated, request=replace(request, submission=submission))


CAUTIOUS = "targets, refused above 0.2"
_CAUTIOUS_CHANCE = 0.2
OURS, UNREFUSED, WITHOUT = "targets", "targets, none refused", "without targets"
FCFS, EDF, SCORED = "fcfs", "edf", "least loaded, target as a score"
VARIANTS = (OURS, CAUTIOUS, UNREFUSED, WITHOUT, FCFS, EDF, SCORED)
HONEST, IMPOSSIBLE, STRICT = "no claims", "1 ms for everything", "strictest for everything"
CLAIMS = (HONEST, IMPOSSIBLE, STRICT)
"""What one heavy tenant claims; all others state no target."""
SIMULATED = ", simulated"
"""Ending of the variants of the case `live` that are simulated."""


@settings
class Case:
    """A workload at some rates; the share of requests with a target, and its possible seconds.

    Attributes:
        replicas: None for those of the workload.
    """

    workload: str
    rates_per_s: tuple[float, ...]
    share: float = 0.5
    targets_s: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    replicas: int | None = None


@settings
class TargetsExperiment:
    """Settings of the experiment.

    Attributes:
        requests: of each run.
        first_seed: seeds are counted from here, because others were used during development.
        shadow_share: share of the refusals that are admitted nevertheless, to see whether they were right.
        variants: those to play.
        claims: the case in which one tenant claims too much.
        pace: the case of targets for the time per output token.
        live: the case that is also served by an application, for `live_s` at each rate.
    """

    cases: Mapping[str, Case]
    claims: Case
    live: Case
    live_s: float
    pace: PaceSettings = field(default_factory=PaceSettings)
    requests: int = 3_000
    seeds: int = 5
    first_seed: int = 3_000
    shadow_share: float = 0.1
    variants: tuple[str, ...] = VARIANTS


class _Edf(OrderingPolicy):
    """Earliest deadline first; requests without a target come last, in order of arrival."""

    def __init__(self, due_at: Mapping[str, float]) -> None:
        self._due_at = due_at

    def key(self, scheduled: ScheduledRequest) -> float:
        return self._due_at.get(scheduled.request.request_id, 1e9 + scheduled.request.arrived_at)

    def score(self, head: ScheduledRequest, now: float) -> float:  # noqa: ARG002 - as in the contract
        return -self.key(head)


@dataclass(slots=True)
class _Scored(DirectSimulation):
    """Least loaded by pending prefill; of engines that meet the target, the one that just meets it.

    It knows all engines exactly and at once. Requests without a target go to the least loaded engine.
    """

    targets_s: Mapping[str, float] = field(default_factory=dict)
    token_s: float = 0.0
    pending: dict[str, dict[str, int]] = field(default_factory=dict)

    def choose(self, able: Sequence[SimulatedReplica], simulated: SimulatedRequest) -> SimulatedReplica:
        for replica in able:
            pending = self.pending.setdefault(replica.spec.replica_id, {})
            for request_id in list(pending):
                live = self.live.get(request_id)
                if live is None or (live[0].sequence and live[0].sequence.first_token_at is not None):
                    del pending[request_id]
        load = {each: sum(self.pending[each.spec.replica_id].values()) for each in able}
        target_s = self.targets_s.get(simulated.request.request_id, -1.0)
        meeting = [each for each in able if self.token_s * (load[each] + simulated.prompt_tokens) <= target_s]
        chosen = (
            max(meeting, key=lambda each: load[each])
            if meeting
            else min(
                self.in_turn(able), key=lambda each: (load[each], self.outstanding[each.spec.replica_id])
            )
        )
        self.pending[chosen.spec.replica_id][simulated.request.request_id] = simulated.prompt_tokens
        return chosen


@dataclass(frozen=True, slots=True)
class _Run:
    case: Case
    requests: int
    seed: int
    rate_per_s: float
    variant: str
    shadow_share: float

    @property
    def workload(self) -> Workload:
        workload, replicas = WORKLOADS[self.case.workload], self.case.replicas
        if replicas is None:
            return workload
        return replace(workload, fleet=replace(workload.fleet, replicas={ONE_POOL: replicas}))

    @property
    def live_key(self) -> Key:
        """The key of its row in the case `live`."""
        return {"case": "live", "rate": self.rate_per_s, "variant": self.variant}

    def plans(self) -> list[ReplicaPlan]:
        """Return the replicas."""
        return self.workload.fleet.plans(isolated=True)

    def trace(self) -> Trace:
        """Return the requests."""
        return self.workload.draw(self.seed, self.rate_per_s, self.requests)

    def _drawn(self) -> tuple[list[ReplicaPlan], list[SimulatedRequest]]:
        plans = self.plans()
        return plans, list(requests_of(self.trace(), Disclosure(), plans[0].engine.block_size))

    def targets_s(self, prompt_tokens: Sequence[int], token_s: float) -> list[float | None]:
        """Return the target of each request, in seconds; None for those without."""
        rng, drawn = stream(self.seed, "targets"), list[float | None]()
        for tokens in prompt_tokens:
            base_s = float(rng.choice(self.case.targets_s))
            drawn.append(base_s + 2 * token_s * tokens if rng.random() < self.case.share else None)
        return drawn

    def play(self) -> Mapping[str, object]:
        """Run all requests, and return the figures."""
        plans, requests = self._drawn()
        token_s = plans[0].step_time.prefill_per_token_s
        drawn = self.targets_s([each.prompt_tokens for each in requests], token_s)
        targets_s = {
            each.request.request_id: target_s
            for each, target_s in zip(requests, drawn, strict=True)
            if target_s is not None
        }
        if self.variant == SCORED:
            scored = _Scored(plans, targets_s=targets_s, token_s=token_s)
            records = scored.run(requests)
            return figures_of(records, {name: Judgement(at) for name, at in targets_s.items()})
        clients = _Clients(requests, targets_s, self.variant, self.shadow_share)
        due_at = {
            each.request.request_id: each.request.arrived_at + targets_s[each.request.request_id]
            for each in requests
            if each.request.request_id in targets_s
        }
        changes = {"latency_targets.refuse_above": _CAUTIOUS_CHANCE} if self.variant == CAUTIOUS else {}
        policy = "fcfs" if self.variant == FCFS else "edf" if self.variant == EDF else "ewsjf"
        simulation = Simulation(
            scheduler_settings(policy, self.workload.fleet.routing, changes),
            plans,
            on_decision=clients.on_decision,
            policies={**SIMULATED_POLICIES, "edf": lambda _: _Edf(due_at)},
        )
        clients.watch(simulation)
        records = simulation.run(clients.requests)
        return figures_of(records, clients.judged)

    def claim(self) -> Mapping[str, object]:
        """Run the requests of tenants of which one claims targets; return the figures of both sides."""
        plans, requests = self._drawn()
        token_s = plans[0].step_time.prefill_per_token_s
        wanted = []
        for each in requests:
            strict_s = 0.001 if self.variant == IMPOSSIBLE else 0.2 + 2 * token_s * each.prompt_tokens
            is_claimed = self.variant != HONEST and each.request.tenant == _CLAIMANT
            wanted.append(with_target(each, LatencyTarget(ttft_s=strict_s)) if is_claimed else each)
        simulation = Simulation(scheduler_settings("ewsjf", self.workload.fleet.routing, {}), plans)
        records = measured_of(simulation.run(wanted))
        figures: dict[str, object] = {}
        last = max(one.finished_at for one in records)
        for side, mine in (("claimant", True), ("others", False)):
            some = [one for one in records if (one.tenant == _CLAIMANT) is mine]
            ttft = Distribution.of(one.ttft_s for one in some if one.ttft_s is not None)
            figures |= {f"{side}_mean_s": ttft.mean, f"{side}_p99_s": ttft.p99}
            figures[f"{side}_tokens_per_s"] = (
                sum(one.prompt_tokens + one.output_tokens for one in some) / last
            )
        return figures


_CLAIMANT = "heavy 0"


class _Clients:
    """Clients that state targets, and retry a refused request once after its `Retry-After`."""

    def __init__(
        self,
        requests: list[SimulatedRequest],
        targets_s: Mapping[str, float],
        variant: str,
        shadow_share: float,
    ) -> None:
        self.judged = {name: Judgement(seconds) for name, seconds in targets_s.items()}
        refuses = variant in (OURS, CAUTIOUS)
        self.requests = [
            with_target(each, LatencyTarget(ttft_s=targets_s[name], refuse=refuses))
            if (refuses or variant == UNREFUSED) and (name := each.request.request_id) in targets_s
            else each
            for each in requests
        ]
        self._by_id = {each.request.request_id: each for each in self.requests}
        self._shadow_share = shadow_share if refuses else 0.0
        self._simulation: Simulation | None = None

    def watch(self, simulation: Simulation) -> None:
        """Record the predictions of a simulation, and admit a share of the refused requests."""
        self._simulation = simulation
        admission = simulation.scheduler.admission
        decide = admission.target_rejection

        def target_rejection(scheduled: ScheduledRequest, now: float, *, waits: bool) -> Conclusion | None:
            rejection = decide(scheduled, now, waits=waits)
            judged = self.judged[scheduled.request.request_id]
            judged.chance = None if scheduled.target is None else scheduled.target.chance
            if rejection is None:
                return None
            judged.refused = True
            draw = zlib.crc32(scheduled.request.request_id.encode()) / 2**32
            judged.is_shadow = not judged.retry_of and draw < self._shadow_share
            return None if judged.is_shadow else rejection

        admission.target_rejection = target_rejection  # type: ignore[method-assign]

    def on_decision(self, decision: Decision) -> None:
        """Retry the requests that were refused."""
        for command in decision.commands:
            judged = self.judged.get(command.request_id) if isinstance(command, Conclude) else None
            if isinstance(command, Conclude) and judged and judged.refused and not judged.is_shadow:
                delay_s = command.conclusion.retry_after_s
                if delay_s is not None and not judged.retry_of:
                    self._retry(self._by_id[command.request_id], decision.now + delay_s)

    def _retry(self, simulated: SimulatedRequest, at: float) -> None:
        assert self._simulation is not None
        retry, name = retried(simulated, at), simulated.request.request_id
        self.judged[retry.request.request_id] = Judgement(self.judged[name].target_s, retry_of=name)
        self._simulation.submit(retry)


def play(experiment: TargetsExperiment, context: Context) -> Iterator[Measurement]:
    """Measure every variant of every case at every rate, and the claims of one tenant."""
    cases = {**experiment.cases, "claims": experiment.claims}
    if unknown := [each.workload for each in cases.values() if each.workload not in WORKLOADS]:
        raise SettingsError(f"no workload {', '.join(unknown)}: there are {', '.join(WORKLOADS)}")
    requests = experiment.requests
    seeds = range(experiment.first_seed, experiment.first_seed + experiment.seeds)
    cells: list[Cell[_Run | PaceRun]] = [
        Cell(
            key={"case": name, "rate": rate, "variant": variant},
            runs=[_Run(case, requests, seed, rate, variant, experiment.shadow_share) for seed in seeds],
            seeds=seeds,
            traces=generated(case.workload),
            settings=as_json(case),
        )
        for name, case in cases.items()
        for rate in case.rates_per_s
        for variant in (CLAIMS if name == "claims" else experiment.variants)
    ]
    cells += [
        Cell(
            key={"case": "pace", "chunk": chunk, "variant": variant},
            runs=[PaceRun(experiment.pace, chunk, variant, seed) for seed in seeds],
            seeds=seeds,
            traces=generated("pace"),
            settings=as_json(experiment.pace),
        )
        for chunk in experiment.pace.chunks
        for variant in (NOT_STATED, STATED)
    ]
    yield from play_cells("targets", cells, _played, context)
    yield from _play_live(experiment, context)


def _played(run: _Run | PaceRun) -> Mapping[str, object]:
    return run.claim() if isinstance(run, _Run) and run.variant in CLAIMS else run.play()


def _play_live(experiment: TargetsExperiment, context: Context) -> Iterator[Measurement]:
    """Measure an application, and simulate the same requests."""
    case, seed = experiment.live, experiment.first_seed
    runs = [
        _Run(case, round(rate * experiment.live_s), seed, rate, variant, shadow_share=0.0)
        for rate in case.rates_per_s
        for variant in (OURS, CAUTIOUS, WITHOUT)
    ]
    missing = [run for run in runs if not context.has(run.live_key)]
    if not missing:
        return
    plans = runs[0].plans()
    with (
        live.served_engines(runs[0].workload.fleet.profile, plans, _CAUTIOUS_CHANCE) as served,
        progress_bar("targets, live", len(missing)) as advance,
    ):
        for run in missing:
            trace = run.trace()
            prompts = [one.prompt_tokens for one in trace.requests]
            targets_s = run.targets_s(prompts, plans[0].step_time.prefill_per_token_s)
            model = live.CAUTIOUS if run.variant == CAUTIOUS else live.USUAL
            over_http = live.live_figures(
                served, model, trace, targets_s, states_targets=run.variant != WITHOUT
            )
            simulated = {**run.live_key, "variant": f"{run.variant}{SIMULATED}"}
            for row_key, figures in ((run.live_key, over_http), (simulated, run.play())):
                yield Measurement(
                    key=row_key,
                    figures={name: [value] for name, value in figures.items()},
                    seeds=(seed,),
                    traces=generated(case.workload),
                    settings=as_json(case),
                )
            advance()


EXPERIMENT = Experiment(settings=TargetsExperiment, play=play)

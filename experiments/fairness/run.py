"""How is capacity shared among tenants and classes in overload?

The scenes are: tenants of different weight, a heavy tenant beside light ones, and queues in the engines. Each
is simulated with the paper's mix of lengths. Load 1.0 is the rate that saturates the same replicas under
FCFS. Times are TTFT from arrival.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import call
from typing import Annotated, Any

from experiments.common.config import as_json
from experiments.common.experiment import Cell, Context, Experiment, Measurement, play_cells
from experiments.common.provenance import generated
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import Distribution, jain_index, jain_of_tenants
from serve_app.core.routing.replica import ReplicaSpec
from serve_app.core.settings_base import at_least, settings
from serve_app.errors import SettingsError
from serve_app.lab.simulation.run import (
    ONE_POOL,
    DirectSimulation,
    Disclosure,
    EngineChanges,
    FleetSettings,
    SloByLength,
    choose_trace,
    requests_of,
    saturated_rate_per_s,
    scheduler_settings,
)
from serve_app.lab.simulation.simulation import ReplicaPlan, Simulation, SimulationSettings
from serve_app.lab.workloads import (
    LognormalLengths,
    OnOffArrivals,
    Trace,
    TraceChoice,
    TraceRequest,
    merge,
    scale_to_rate,
    stream,
    zipf_shares,
)
from serve_app.request import PriorityClass


@settings
class Variant:
    """Configuration of a scene's run.

    Attributes:
        policy: of the gateway's queue; None for no gateway.
        scheduler: settings by dotted path.
        engine: changes to every engine.
        simulation: delay of reports.
        limits: in the scenes of silent engines, whether their limits are configured.
        load: in the scene `silent`, the load of the engines with configured limits; in `bursts`, the load.
        profile: in the scene `bursts` and those of silent engines, the profile of the engines.
        replicas: their number.
        burst: in the scene `silent-burst`, the number of requests.
    """

    policy: str | None = None
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    engine: EngineChanges = field(default_factory=EngineChanges)
    simulation: SimulationSettings = field(default_factory=SimulationSettings)
    limits: bool = True
    load: float = 1.0
    profile: str = "llama31-8b-rtx4090-tp1"
    replicas: int = 2
    burst: int = 200


@settings
class FairnessSettings:
    """Settings of the experiment.

    Attributes:
        scenes: variants of each scene, by their names in the tables.
        seeds: runs of each variant by scene, with the seeds 0, 1, ...
        weights: of the tenants in the scene `weights`.
        weights_window_s: span of that scene in which service is counted.
        light_s: duration of arrivals in the scene `light`.
        span_s: the same for the other scenes.
        light_tenants: beside the heavy one, which sends as much as all of them; in `bursts`, one less than
            all tenants.
    """

    profile: str
    replicas: int
    seeds: Mapping[str, int]
    scenes: Mapping[str, Mapping[str, Variant]]
    weights: Mapping[str, float]
    weights_window_s: tuple[float, float] = (40.0, 100.0)
    light_s: float = 100.0
    span_s: Annotated[float, at_least(10).hint("users come after 5 s")] = 30.0
    light_tenants: int = 26

    def fleet(self, engine: EngineChanges, replicas: int | None = None) -> FleetSettings:
        """Return a fleet of one pool, by default with all replicas."""
        count = self.replicas if replicas is None else replicas
        return FleetSettings(profile=self.profile, replicas={ONE_POOL: count}, engine=engine)


Figures = Mapping[str, float]

# As in `queueing.fairness`.
_DECODE_WEIGHT = 2.0
# Separate seed for a scene's second kind of requests.
_OTHER_SEED = 1_000
_BATCH_LOAD, _INTERACTIVE_LOAD = 1.5, 0.3
# The scene `bursts`: the mean burst, the duration in spans, and the tenants that are not light.
_BURST_S, _BURSTS_SPANS = 5.0, 10
_LARGEST = ("tenant-1", "tenant-2", "tenant-3")


@dataclass(frozen=True, slots=True)
class Play:
    """One run.

    Attributes:
        replicas: None for the number in the settings.
    """

    settings: FairnessSettings
    variant: Variant
    seed: int
    replicas: int | None = None

    def serve(self, trace: Trace) -> list[RequestRecord]:
        """Run all requests to their end."""
        variant, fleet = self.variant, self.settings.fleet(self.variant.engine, self.replicas)
        plans = fleet.plans(isolated=variant.policy == "ewsjf")
        requests = list(requests_of(trace, Disclosure(), plans[0].engine.block_size))
        if variant.policy is None:
            return DirectSimulation(plans).run(requests)
        scheduler = scheduler_settings(variant.policy, fleet.routing, variant.scheduler)
        return Simulation(scheduler, plans, variant.simulation).run(requests)

    def mix(self, load: float, duration_s: float, tenants: str | None = None, seed: int = 0) -> Trace:
        """Return the paper's mix for this duration, at this share of the fleet's saturated rate."""
        fleet = self.settings.fleet(type(self.variant.engine)(), self.replicas)
        seed += self.seed
        rate = load * saturated_rate_per_s(fleet, TraceChoice(name="paper-mix", requests=4_000), seed)
        requests = max(2, round(rate * duration_s))
        choice = TraceChoice(name="paper-mix", requests=requests, tenants=tenants)
        return scale_to_rate(choose_trace(choice, seed), rate)


def weights(play: Play) -> Figures:
    """Return the share of its due service that each tenant got, by weight."""
    settings = play.settings
    first_s, last_s = settings.weights_window_s
    trace = play.mix(3.0, last_s + 5, "one=2,two=1,four=1")
    in_requests = play.variant.scheduler.get("fairness.mode") == "requests"
    served = dict.fromkeys(settings.weights, 0.0)
    for record in play.serve(trace):
        if record.dispatched_at is not None and first_s <= record.dispatched_at < last_s:
            served[record.tenant] += 1.0 if in_requests else _cost_tokens(record)
    total, weight = sum(served.values()), sum(settings.weights.values())
    due = {name: served[name] / (total * own / weight) for name, own in settings.weights.items()}
    farthest = max(abs(share - 1) for share in due.values())
    return {**due, "farthest": farthest, "jain": jain_index(due.values()) or 0.0}


def light(play: Play) -> Figures:
    """Run light tenants beside a heavy one."""
    count = play.settings.light_tenants
    others = ",".join(f"t{number}=1" for number in range(1, count + 1))
    records = play.serve(play.mix(1.3, play.settings.light_s, f"heavy={count},{others}"))
    return {
        **_ttft("light", (record for record in records if record.tenant != "heavy"), "mean", "p99"),
        **_ttft("heavy", (record for record in records if record.tenant == "heavy"), "mean", "p99"),
        "jain": jain_of_tenants(records) or 0.0,
        "tokens_per_s": _throughput(records),
    }


def bursts(play: Play) -> Figures:
    """Run tenants with shares by Zipf, each silent but for bursts at ten times its mean rate, on one engine.

    Its light tenants are all but the three largest.
    """
    one = replace(play, settings=replace(play.settings, profile=play.variant.profile), replicas=1)
    span_s = _BURSTS_SPANS * play.settings.span_s
    trace = one.mix(play.variant.load, span_s)
    drawn = iter(trace.requests)
    requests: list[TraceRequest] = []
    for tenant, share in zipf_shares(play.settings.light_tenants + 1).items():
        rng = stream(play.seed, f"bursts of {tenant}")
        own = list(itertools.islice(drawn, max(1, round(share * len(trace.requests)))))
        rate = len(own) / span_s
        times = OnOffArrivals(rate_per_s=rate, on_s=_BURST_S, off_s=9 * _BURST_S).sample(len(own) + 1, rng)
        # Scaled to the mean, and turned so that tenants do not begin together.
        places = (times[:-1] * span_s / times[-1] + rng.uniform(0, span_s)) % span_s
        requests += [
            replace(each, arrival_s=float(at), tenant=tenant) for each, at in zip(own, places, strict=False)
        ]
    requests.sort(key=lambda each: each.arrival_s)
    by_tenant: dict[str, list[RequestRecord]] = {}
    for record in one.serve(replace(trace, requests=tuple(requests))):
        by_tenant.setdefault(record.tenant, []).append(record)
    lights = [records for tenant, records in by_tenant.items() if tenant not in _LARGEST]
    heavy = [record for tenant in _LARGEST for record in by_tenant.get(tenant, ())]
    worst = max(_ttft("light", records, "p99")["light_p99_s"] for records in lights)
    return {
        **_ttft("light", itertools.chain.from_iterable(lights), "mean", "p99"),
        "light_worst_p99_s": worst,
        **_ttft("heavy", heavy, "mean", "p99"),
    }


def targets(play: Play) -> Figures:
    """Run new users beside a flood: one short question every two seconds, each of another tenant."""
    span_s = play.settings.span_s
    flood = _each(play.mix(1.3, span_s), tenant="flood")
    users = tuple(
        TraceRequest(arrival_s=5.0 + 2.0 * number, prompt_tokens=64, output_tokens=64, tenant=f"u{number}")
        for number in range(int((span_s - 6) / 2))
    )
    records = play.serve(merge([flood, Trace(name="users", source="new users", requests=users)], "both"))
    return {
        **_ttft("new", (record for record in records if record.tenant != "flood"), "mean", "p95", "max"),
        "tokens_per_s": _throughput(records),
    }


def engine_priority(play: Play) -> Figures:
    """Run interactive requests beside a backlog of batch work, on one engine."""
    one = replace(play, replicas=1)
    records = one.serve(merge([_backlog(one), _interactive(one)], "both"))
    span_s = play.settings.span_s
    people = _measured([record for record in records if record.tenant == "people"], span_s)
    return {
        **_ttft("interactive", people, "mean", "p95"),
        "tokens_per_s": _throughput(records),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentReplica(ReplicaPlan):
    """An engine without metrics, whose limits may be configured."""

    limits: bool

    @property
    def spec(self) -> ReplicaSpec:
        """Its registration."""
        engine = self.engine
        return ReplicaSpec(
            replica_id=self.replica_id,
            pool=self.pool,
            max_model_len=engine.max_model_len,
            kv_tokens=engine.kv_blocks * engine.block_size if self.limits else None,
            max_num_seqs=engine.max_num_seqs if self.limits else None,
        )


# Mean rate of the mix `silent` at load 1.0, by measurement: requests per second of one engine.
_MIX_RATE_PER_S = 6.05
_SHORT_TOKENS = 512


def silent(play: Play) -> Figures:
    """Run a mix on engines without metrics: four of five prompts are short, one is long."""
    rng = stream(play.seed, "mix of silent engines")
    count = round(play.variant.load * _MIX_RATE_PER_S * play.variant.replicas * 4 * play.settings.span_s)
    gaps_s = rng.exponential(1 / (play.variant.load * _MIX_RATE_PER_S * play.variant.replicas), count)
    arrivals, is_long = gaps_s.cumsum(), rng.random(count) < 0.2
    prompts = (rng.integers(50, 301, count), rng.integers(2_000, 6_001, count))
    outputs = LognormalLengths(mean=150, cv=0.7, max_tokens=600).sample(count, rng)
    records = _serve_silent(
        play,
        [
            TraceRequest(
                arrival_s=float(arrivals[each]),
                prompt_tokens=int(prompts[int(is_long[each])][each]),
                output_tokens=int(outputs[each]),
                tenant=f"t{each % 8}",
            )
            for each in range(count)
        ],
    )
    records = [one for one in records if one.arrived_at >= arrivals[count // 10]]
    slo = SloByLength(short_at_tokens=_SHORT_TOKENS)
    span_s = max(one.finished_at for one in records) - min(one.arrived_at for one in records)
    return {
        **_ttft("short", (one for one in records if one.prompt_tokens <= _SHORT_TOKENS), "mean", "p99"),
        **_ttft("long", (one for one in records if one.prompt_tokens > _SHORT_TOKENS), "mean", "p99"),
        "goodput_per_s": sum(slo.met_by(one) for one in records) / span_s,
        "met_ratio": sum(slo.met_by(one) for one in records) / len(records),
    }


def silent_burst(play: Play) -> Figures:
    """Run a burst of one user on engines without metrics, and one request of a later user."""
    rng = stream(play.seed, "burst on silent engines")
    count = play.variant.burst
    prompts = rng.integers(50, 301, count)
    outputs = LognormalLengths(mean=150, cv=0.7, max_tokens=600).sample(count, rng)
    burst = [
        TraceRequest(
            arrival_s=1.0 + 1e-4 * each,
            prompt_tokens=int(prompts[each]),
            output_tokens=int(outputs[each]),
            tenant="burst",
        )
        for each in range(count)
    ]
    figures: dict[str, float] = {}
    for after_s in (0.5, 1.0, 3.0):
        late = TraceRequest(arrival_s=1.0 + after_s, prompt_tokens=120, output_tokens=100, tenant="late")
        records = _serve_silent(play, sorted([*burst, late], key=lambda one: one.arrival_s))
        (late_s,) = _ttft("late", (one for one in records if one.tenant == "late"), "mean").values()
        figures |= {f"late_{after_s:g}_s": late_s}
        figures |= _ttft("burst", (one for one in records if one.tenant == "burst"), "mean")
    return figures


def _serve_silent(play: Play, requests: Sequence[TraceRequest]) -> list[RequestRecord]:
    variant = play.variant
    fleet = FleetSettings(
        profile=variant.profile, replicas={ONE_POOL: variant.replicas}, engine=variant.engine
    )
    plans = [
        SilentReplica(
            replica_id=plan.replica_id,
            pool=plan.pool,
            engine=plan.engine,
            step_time=plan.step_time,
            reports_load=False,
            limits=variant.limits,
        )
        for plan in fleet.plans(isolated=True)
    ]
    trace = Trace(name="silent", source="silent engines", requests=tuple(requests))
    simulated = list(requests_of(trace, Disclosure(), plans[0].engine.block_size))
    scheduler = scheduler_settings("ewsjf", fleet.routing, variant.scheduler)
    return Simulation(scheduler, plans, variant.simulation).run(simulated)


SCENES: Mapping[str, Callable[[Play], Figures]] = {
    "weights": weights,
    "light": light,
    "bursts": bursts,
    "targets": targets,
    "engine-priority": engine_priority,
    "silent": silent,
    "silent-burst": silent_burst,
}


def _interactive(play: Play) -> Trace:
    trace = play.mix(_INTERACTIVE_LOAD, play.settings.span_s)
    return _each(trace, tenant="people", priority=PriorityClass.INTERACTIVE)


def _backlog(play: Play) -> Trace:
    """Return more batch work than the scene's duration suffices for, all of it arriving at the start."""
    trace = play.mix(_BATCH_LOAD, play.settings.span_s, seed=_OTHER_SEED)
    return _each(trace, arrival_s=0.0, tenant="jobs", priority=PriorityClass.BATCH)


def _each(trace: Trace, **changes: object) -> Trace:
    """Return the trace with every request changed."""
    requests = tuple(replace(one, **changes) for one in trace.requests)  # type: ignore[arg-type]
    return replace(trace, requests=requests)


def _cost_tokens(record: RequestRecord) -> float:
    """Return the cost of a request in fairness by tokens."""
    return record.prompt_tokens + _DECODE_WEIGHT * record.output_tokens


def _ttft(side: str, records: Iterable[RequestRecord], *names: str) -> dict[str, float]:
    """Return figures of TTFT over records with a first token; 0 without any."""
    found = Distribution.of(one.ttft_s for one in records if one.ttft_s is not None)
    return {f"{side}_{name}_s": getattr(found, name) or 0.0 for name in names}


def _measured(records: Iterable[RequestRecord], span_s: float) -> list[RequestRecord]:
    """Return the records that arrived after the first tenth of the scene, in which queues fill."""
    return [record for record in records if record.arrived_at >= span_s / 10]


def _throughput(records: Sequence[RequestRecord]) -> float:
    """Return tokens per second until the last request ends: equal work for every policy.

    The tokens within a fixed time would depend on which requests a policy serves first: prompt tokens are
    computed faster than outputs.
    """
    tokens = sum(record.prompt_tokens + record.output_tokens for record in records)
    return tokens / max(record.finished_at for record in records)


def play(settings: FairnessSettings, context: Context) -> Iterator[Measurement]:
    """Measure every variant of every scene."""
    if unknown := [name for name in settings.scenes if name not in SCENES]:
        raise SettingsError(f"no scene {', '.join(unknown)}: there are {', '.join(SCENES)}")
    cells = [
        Cell(
            key={"scene": scene, "variant": name},
            runs=[
                partial(SCENES[scene], Play(settings, variant, seed)) for seed in range(settings.seeds[scene])
            ],
            seeds=range(settings.seeds[scene]),
            traces=generated("paper-mix" if not scene.startswith("silent") else "short and long"),
            settings=as_json(replace(settings, scenes={scene: {name: variant}})),
        )
        for scene, variants in settings.scenes.items()
        for name, variant in variants.items()
    ]
    return play_cells("fairness", cells, call, context)


EXPERIMENT = Experiment(settings=FairnessSettings, play=play)

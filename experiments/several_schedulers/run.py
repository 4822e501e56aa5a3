"""What do several schedulers of one model lose beside one that sees the whole fleet?

Tenants belong to schedulers by hash. Each scheduler has leases on slices of replicas, which follow the demand
every second. One scheduler with whole replicas is what the product does; one scheduler with slices shows
what cutting alone costs.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Annotated, Any

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import trace_sources
from experiments.several_schedulers.simulation import SharedFleet, SharedRequest, Sharing
from serve_app.metrics.statistics import Distribution
from serve_app.routing.pools import RoutingSettings
from serve_app.settings_base import POSITIVE, at_least, settings
from serve_app.simulation.batch import parallel
from serve_app.simulation.fleet import ONE_POOL, EngineChanges, FleetSettings
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.workload import Disclosure, TraceChoice, at_rate, choose_trace, fit, requests_of

_SHORT_AT_TOKENS = 256
# A tenant with fewer requests has a mean that says little.
_LEAST_REQUESTS = 10


@settings
class Cell:
    """A fleet and its load.

    Attributes:
        duration_s: seconds in which requests arrive; the run goes on until the last one has ended.
        schedulers: how many, each number in a run of its own.
        slices: cuts of a replica, likewise.
    """

    replicas: int
    per_replica_per_s: Annotated[float, POSITIVE]
    duration_s: Annotated[float, POSITIVE] = 12.0
    schedulers: tuple[int, ...] = (1, 2, 4, 8)
    slices: tuple[int, ...] = (1, 3)


@settings
class SeveralSchedulersSettings:
    """What is played.

    Attributes:
        tenants: how many, by Zipf's law.
        target_waiting: places in an engine's queue, which slices divide.
    """

    cells: tuple[Cell, ...]
    seeds: Annotated[int, at_least(1)] = 2
    tenants: Annotated[int, at_least(1)] = 60
    trace: str = "azure-conv"
    profile: str = "llama31-8b-h100-tp1"
    max_model_len: int = 16_384
    target_waiting: int = 3
    policy: str = "ewsjf"


Run = tuple[SeveralSchedulersSettings, Cell, Sharing, int]


def play(settings: SeveralSchedulersSettings, context: Context) -> Iterator[Measurement]:
    """Cell by cell, each with every number of schedulers and every cut."""
    for cell in settings.cells:
        for schedulers in cell.schedulers:
            for slices in cell.slices:
                sharing = Sharing(schedulers=schedulers, slices_per_replica=slices)
                key = _key(cell, sharing)
                if context.has(key):
                    continue
                seeds = range(settings.seeds)
                runs: list[Run] = [(settings, cell, sharing, seed) for seed in seeds]
                figures = list(parallel(_play, runs, context.jobs))
                yield Measurement(
                    key=key,
                    figures={name: [each[name] for each in figures] for name in figures[0]},
                    seeds=tuple(seeds),
                    traces=trace_sources(settings.trace),
                )


def _key(cell: Cell, sharing: Sharing) -> dict[str, Any]:
    return {
        "replicas": cell.replicas,
        "per_replica_per_s": cell.per_replica_per_s,
        "schedulers": sharing.schedulers,
        "slices": sharing.slices_per_replica,
    }


def _play(run: Run) -> dict[str, Any]:
    settings, cell, sharing, seed = run
    engine = EngineChanges(max_model_len=settings.max_model_len)
    plans = FleetSettings(profile=settings.profile, replicas={ONE_POOL: cell.replicas}, engine=engine).plans(
        isolated=True
    )
    rate = cell.replicas * cell.per_replica_per_s
    choice = TraceChoice(
        name=settings.trace, requests=round(rate * cell.duration_s), tenants=str(settings.tenants)
    )
    trace = at_rate(fit(choose_trace(choice, seed), settings.max_model_len).trace, rate)
    requests = list(requests_of(trace, Disclosure(), plans[0].engine.block_size))
    target = max(1, settings.target_waiting // sharing.slices_per_replica)
    routing = RoutingSettings(pools=(ONE_POOL,))
    scheduling = scheduler_settings(settings.policy, routing, {"backpressure.target_waiting": target})
    fleet = SharedFleet(scheduling, plans, sharing)
    fleet.run(requests)
    return _figures(fleet)


def _figures(fleet: SharedFleet) -> dict[str, Any]:
    done = [one for one in fleet.done if one.sequence is not None and one.sequence.finished_at is not None]
    # The first fifth arrives while engines fill.
    done.sort(key=lambda one: one.simulated.request.arrived_at)
    measured = done[len(done) // 5 :]
    short = [one for one in measured if _prompt_tokens(one) <= _SHORT_AT_TOKENS]
    long = [one for one in measured if _prompt_tokens(one) > _SHORT_AT_TOKENS]
    ends = [one.sequence.finished_at for one in done if one.sequence and one.sequence.finished_at]
    last_arrival = done[-1].simulated.request.arrived_at
    output = sum(one.simulated.output_tokens for one in done)
    return {
        "ttft_short_s": _ttft(short),
        "ttft_long_s": _ttft(long),
        "ttft_s": _ttft(measured),
        **_tenants(measured),
        "drained_s": max(ends) - last_arrival,
        "tokens_per_s": output / max(ends),
        "completed": len(done),
        "moved": fleet.moved,
        "most_over": fleet.most_over,
    }


def _ttft(requests: Sequence[SharedRequest]) -> dict[str, float | None]:
    return Distribution.of(_ttft_s(one) for one in requests).as_json()


def _tenants(requests: Sequence[SharedRequest]) -> dict[str, float]:
    """The mean TTFT of the tenant that fares worst, and of the median one."""
    by_tenant: defaultdict[str, list[float]] = defaultdict(list)
    for one in requests:
        by_tenant[one.simulated.request.tenant].append(_ttft_s(one))
    means = sorted(fmean(each) for each in by_tenant.values() if len(each) >= _LEAST_REQUESTS)
    means = means or [0.0]
    return {"worst_tenant_s": means[-1], "median_tenant_s": means[len(means) // 2]}


def _prompt_tokens(one: SharedRequest) -> int:
    return one.simulated.request.shape.prompt_tokens or 0


def _ttft_s(one: SharedRequest) -> float:
    assert one.sequence is not None
    assert one.sequence.first_token_at is not None
    return one.sequence.first_token_at - one.simulated.request.arrived_at


EXPERIMENT = Experiment(settings=SeveralSchedulersSettings, play=play)

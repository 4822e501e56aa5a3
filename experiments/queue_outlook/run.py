"""How honest are waiting requests told when they will start?

Every client asks, in simulated overload of several kinds: lasting, and in bursts; of one class, and of three
classes and four tenants; in one pool, and in two. Each run begins with nothing learned. Load 1.0 is the
saturated rate of the replicas.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import trace_sources
from experiments.common.rows import Key
from serve_app.command import progress_bar
from serve_app.request import PriorityClass
from serve_app.scheduling.outlook.watched import FIRST, INSIDE, TOLD, VERDICTS, Honesty
from serve_app.settings_base import settings
from serve_app.simulation.batch import at_load, parallel
from serve_app.simulation.fleet import ONE_POOL, FleetSettings
from serve_app.simulation.run import RunSettings
from serve_app.simulation.told import simulate_told
from serve_app.simulation.workload import TraceChoice

# Fewer say nothing of a share.
_FEWEST = 30


@settings
class OutlookCase:
    """One kind of traffic.

    Attributes:
        replicas: by pool.
        arrivals, tenants, priorities: as in `simulation.workload.TraceChoice`.
    """

    trace: str
    load: float
    replicas: Mapping[str, int]
    arrivals: str | None = None
    tenants: str | None = None
    priorities: str | None = None


@settings
class OutlookSettings:
    """What is played.

    Attributes:
        cases: by the name that they have in the table.
        requests: in each run.
        seeds: runs of each, with the seeds 0, 1, ...
    """

    profile: str
    policies: tuple[str, ...]
    cases: Mapping[str, OutlookCase]
    requests: int
    seeds: int


@dataclass(frozen=True, slots=True)
class _Cell:
    """A case under one policy."""

    case: str
    policy: str


def play(settings: OutlookSettings, context: Context) -> Iterator[Measurement]:
    """Every case under every policy."""
    cells = [_Cell(case, policy) for case in settings.cases for policy in settings.policies]
    with progress_bar("queue_outlook", len(cells)) as advance:
        for cell in cells:
            key: Key = {"case": cell.case, "policy": cell.policy}
            if not context.has(key):
                case = settings.cases[cell.case]
                runs = at_load(_runs(settings, case, cell.policy), case.load, jobs=context.jobs)
                yield Measurement(
                    key=key,
                    seeds=range(settings.seeds),
                    traces=trace_sources(case.trace),
                    figures=_figures(list(parallel(simulate_told, runs, context.jobs))),
                )
            advance()


def _runs(settings: OutlookSettings, case: OutlookCase, policy: str) -> list[RunSettings]:
    choice = TraceChoice(
        name=case.trace,
        requests=settings.requests,
        tenants=case.tenants,
        priorities=case.priorities,
        arrivals=case.arrivals,
    )
    # A fleet with one pool is named as the simulator names it.
    pools = case.replicas if len(case.replicas) > 1 else {ONE_POOL: next(iter(case.replicas.values()))}
    fleet = FleetSettings(profile=settings.profile, replicas=pools)
    run = RunSettings(policy=policy, fleet=fleet, trace=choice)
    return [replace(run, seed=seed) for seed in range(settings.seeds)]


def _figures(runs: Sequence[Sequence[Honesty]]) -> dict[str, list[float | None]]:
    """Of each seed: how many started after a wait, shares of the verdicts, and the median error."""
    figures: dict[str, list[float | None]] = {
        "told": [float(sum(one.told == FIRST for one in run)) for run in runs],
        "error_median_s": [_median(abs(one.error_s) for one in run if one.told == FIRST) for run in runs],
    }
    for told in TOLD:
        for verdict in VERDICTS:
            figures[f"{told}_{verdict}"] = [
                _share([one for one in run if one.told == told], verdict) for run in runs
            ]
    for priority in PriorityClass:
        figures[f"inside_{priority.value}"] = [
            _share([one for one in run if one.told == FIRST and one.priority is priority], INSIDE)
            for run in runs
        ]
    return figures


def _share(honesty: Sequence[Honesty], verdict: str) -> float | None:
    if len(honesty) < _FEWEST:
        return None
    return sum(one.verdict == verdict for one in honesty) / len(honesty)


def _median(errors_s: Iterator[float]) -> float | None:
    return statistics.median(found) if (found := list(errors_s)) else None


EXPERIMENT = Experiment(settings=OutlookSettings, play=play)

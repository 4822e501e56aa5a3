"""How fast does a search find better settings, how good are they, and what is the risk for production?

`tpe` and `random` are studies in the digital twin. `live` is the paper's loop: TPE on production itself, here
simulated, one trial after another. Every leading candidate is judged on windows of other traffic of the same
kind, the same for all methods.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import trace_sources
from experiments.common.rows import Key
from experiments.tuner.searches import Search, gains, search
from experiments.tuner.settings import STARTS, Method, SearchGroup, Start, TunerExperiment
from serve_app.cli.command import progress_bar
from serve_app.lab.simulation.batch import parallel, saturated_rate_per_s

# Traffic on which all are judged; no search uses this seed.
_JUDGES_SEED = 90_001
# A search has arrived when its leader has this share of the best gain of any method.
_ARRIVED_RATIO = 0.95


@dataclass(frozen=True, slots=True)
class Race:
    """All methods from one start on one workload with one seed."""

    experiment: TunerExperiment
    workload: str
    start: Start
    methods: tuple[Method, ...]
    rate_per_s: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFigures:
    """Results of a search, compared with the others of its race.

    Attributes:
        gain: in reward, of the final leader.
        best_gain: of any leader of any search at any time.
        arrived_s: seconds until the leader had nearly the best gain; None if it never had, or if there was no
            gain.
    """

    gain: float
    best_gain: float
    arrived_s: float | None
    confident: bool | None
    trials: int
    requests: int
    worst_trial: float | None


def play(experiment: TunerExperiment, context: Context) -> Iterator[Measurement]:
    """Measure race by race; yield a row for each method."""
    groups = [
        (group, workload)
        for group in experiment.groups
        for workload in group.workloads
        if not all(context.has(_key(group, workload, method)) for method in group.methods)
    ]
    rates: dict[str, float] = {}
    with progress_bar("tuner", len(groups)) as advance:
        for group, workload in groups:
            if workload not in rates:
                # One rate for all seeds, because a seed with light requests would otherwise run at another
                # load.
                saturated = saturated_rate_per_s(experiment.fleet, experiment.traffic(workload), 0)
                rates[workload] = experiment.load * saturated
            races = [
                Race(experiment, workload, group.start, group.methods, rates[workload], seed)
                for seed in range(experiment.seeds)
            ]
            found = list(parallel(_raced, races, context.jobs))
            for method in group.methods:
                figures = [of_seed[method] for of_seed in found]
                yield _measurement(races[0], _key(group, workload, method), figures)
            advance()


def _key(group: SearchGroup, workload: str, method: Method) -> Key:
    return {"workload": workload, "start": group.start, "method": method}


def _measurement(race: Race, key: Key, found: Sequence[SearchFigures]) -> Measurement:
    experiment = race.experiment
    columns = [asdict(one) for one in found]
    figures: dict[str, Any] = {name: [one[name] for one in columns] for name in columns[0]}
    shared = ("profile", "replicas", "load", "requests", "search_s", "pace_requests_per_s", "judge_windows")
    return Measurement(
        key=key,
        seeds=range(experiment.seeds),
        traces=trace_sources(experiment.workloads[race.workload]),
        figures={"rate_per_s": race.rate_per_s, **figures},
        settings={
            **{name: getattr(experiment, name) for name in shared},
            "start": dict(STARTS[race.start]),
            **{name: asdict(getattr(experiment, name)) for name in ("live", "twin", "study")},
        },
    )


def _raced(race: Race) -> Mapping[Method, SearchFigures]:
    experiment = race.experiment
    plan = experiment.twin_plan(race.workload, race.start, race.rate_per_s, race.seed)
    searches = [search(experiment, method, plan, race.seed) for method in race.methods]
    judges = experiment.twin_plan(race.workload, race.start, race.rate_per_s, _JUDGES_SEED + race.seed)
    gained = gains(judges, searches, experiment.judge_windows)
    best = max((gain for of_search in gained for gain in of_search), default=0.0)
    return {
        method: _figures(one, of_search, best)
        for method, one, of_search in zip(race.methods, searches, gained, strict=True)
    }


def _figures(one: Search, gained: Sequence[float], best: float) -> SearchFigures:
    arrived = [
        leader.seconds
        for leader, gain in zip(one.leaders, gained, strict=True)
        if best > 0 and gain >= _ARRIVED_RATIO * best
    ]
    return SearchFigures(
        gain=gained[-1] if gained else 0.0,
        best_gain=best,
        arrived_s=min(arrived, default=None),
        confident=one.confident,
        trials=one.trials,
        requests=one.requests,
        worst_trial=one.worst_trial,
    )


EXPERIMENT = Experiment(settings=TunerExperiment, play=play)

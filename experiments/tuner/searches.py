"""Searches: Bayesian search beside a dozen presets.

Both run in the digital twin, from the defaults and from a deliberately bad start. What they
recommend is judged on windows of other traffic of the same kind, the same for both.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

from experiments.common.experiment import Context, Experiment, Measurement, over_seeds
from experiments.common.provenance import trace_sources
from experiments.common.rows import Key
from experiments.common.tuned_simulation import CountingPlayer
from experiments.tuner.start import POLICY, STARTS, Start, TunedFleet
from serve_app.cli.command import progress_bar
from serve_app.core.settings_base import settings
from serve_app.lab.simulation.run import (
    RunSettings,
    fitted_trace,
    parallel,
    saturated_rate_per_s,
)
from serve_app.lab.workloads import TraceChoice
from serve_app.tuning.digital_twin import DigitalTwin, SearchKind, TwinPlan, TwinSettings, search_twin
from serve_app.tuning.search_space import Values, space_of
from serve_app.tuning.study import Budget, StudySettings

SEARCHES: tuple[SearchKind, ...] = ("presets", "tpe")

_FIRST_SEED = 1_000
# Traffic on which all are judged; no search uses these seeds.
_JUDGES_SEED = 90_000


@settings
class SearchesSettings(TunedFleet):
    """Settings of the part.

    Attributes:
        mixes: traffic by its name in the table.
        starts: kinds of start by name of the traffic.
        requests: in the traffic from which windows are drawn.
        search_s: CPU seconds of a search by TPE, counted at `pace_requests_per_s`.
        judge_windows: windows of other traffic on which results are judged.
    """

    mixes: Mapping[str, TraceChoice]
    starts: Mapping[str, tuple[Start, ...]]
    requests: int
    search_s: float
    judge_windows: int
    twin: TwinSettings = field(default_factory=TwinSettings)
    study: StudySettings = field(default_factory=StudySettings)

    def __post_init__(self) -> None:
        if unknown := set(self.starts) - set(self.mixes):
            raise ValueError(
                f"there is no mix {', '.join(sorted(unknown))}: there are {', '.join(self.mixes)}"
            )

    def traffic(self, mix: str) -> TraceChoice:
        """Return the requests of a mix."""
        return replace(self.mixes[mix], requests=self.requests)

    def twin_plan(self, mix: str, start: Start, rate_per_s: float, seed: int) -> TwinPlan:
        """Return the twin of a mix with a start's values."""
        tunable = self.tunable(start)
        run = RunSettings(
            policy=POLICY, fleet=self.fleet, trace=self.traffic(mix), seed=seed, rate_per_s=rate_per_s
        )
        return TwinPlan(
            tunable=tunable,
            space=space_of(tunable),
            engines=tuple(self.fleet.plans(isolated=True)),
            traffic=fitted_trace(run).trace,
            settings=replace(self.twin, seed=seed),
        )


@dataclass(frozen=True, slots=True)
class SearchPair:
    """Both searches on one mix, from one start, with one seed."""

    experiment: SearchesSettings
    mix: str
    start: Start
    rate_per_s: float
    seed: int


Figures = Mapping[str, float | bool]


def play(experiment: SearchesSettings, context: Context) -> Iterator[Measurement]:
    """Measure mix by mix; yield a row for each search."""
    groups = [
        (mix, start)
        for mix, starts in experiment.starts.items()
        for start in starts
        if not all(context.has(_key(mix, start, search)) for search in SEARCHES)
    ]
    with progress_bar("searches", len(groups)) as advance:
        for mix, start in groups:
            # One rate for all seeds, because a seed with light requests would otherwise run at another load.
            saturated = saturated_rate_per_s(experiment.fleet, experiment.traffic(mix), _FIRST_SEED)
            pairs = [
                SearchPair(experiment, mix, start, experiment.load * saturated, _FIRST_SEED + seed)
                for seed in range(experiment.seeds)
            ]
            found = list(parallel(searched, pairs, context.jobs))
            for search in SEARCHES:
                yield _measurement(pairs[0], search, [of_seed[search] for of_seed in found])
            advance()


def searched(pair: SearchPair) -> Mapping[SearchKind, Figures]:
    """Run both searches, and judge what they found."""
    experiment = pair.experiment
    plan = experiment.twin_plan(pair.mix, pair.start, pair.rate_per_s, pair.seed)
    judge = DigitalTwin(experiment.twin_plan(pair.mix, pair.start, pair.rate_per_s, _JUDGES_SEED + pair.seed))

    def mean_reward(values: Values) -> float:
        played = [judge.play(values, window) for window in range(experiment.judge_windows)]
        return statistics.fmean(result.reward.value or 0.0 for result in played)

    base = mean_reward(plan.space.current)
    figures: dict[SearchKind, Figures] = {}
    for search in SEARCHES:
        player = CountingPlayer(plan, experiment.pace_requests_per_s)
        budget = Budget(clock=player.clock, seconds=experiment.search_s)
        finding = search_twin(plan, experiment.study, player.play, budget, search)
        gain = 0.0 if finding.best is None else mean_reward(finding.best) - base
        figures[search] = {
            # In reward on other traffic, of the best candidate, recommended or not.
            "best_gain": gain,
            "applied_gain": gain if finding.confident else 0.0,
            "is_recommended": finding.confident,
            "candidates": finding.candidates,
            "requests": player.requests,
        }
    return figures


def _key(mix: str, start: Start, search: SearchKind) -> Key:
    return {"mix": mix, "start": start, "search": search}


def _measurement(pair: SearchPair, search: SearchKind, found: list[Figures]) -> Measurement:
    experiment = pair.experiment
    shared = ("profile", "replicas", "load", "requests", "search_s", "pace_requests_per_s", "judge_windows")
    return Measurement(
        key=_key(pair.mix, pair.start, search),
        seeds=range(_FIRST_SEED, _FIRST_SEED + experiment.seeds),
        traces=trace_sources(experiment.mixes[pair.mix].name),
        figures={"rate_per_s": pair.rate_per_s, **over_seeds(found)},
        settings={
            **{name: getattr(experiment, name) for name in shared},
            "start": dict(STARTS[pair.start]),
            **{name: asdict(getattr(experiment, name)) for name in ("twin", "study")},
        },
    )


EXPERIMENT = Experiment(settings=SearchesSettings, play=play)

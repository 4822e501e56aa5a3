"""Settings of the experiment: workloads, starts, methods and their budgets."""

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Literal

from experiments.common.tuning_starts import BAD_START, DEFAULTS, begun_from
from serve_app.core.settings_base import settings
from serve_app.lab.simulation.fleet import ONE_POOL, FleetSettings
from serve_app.lab.simulation.run import RunSettings, fitted_trace
from serve_app.lab.simulation.scheduler_settings import scheduler_settings
from serve_app.lab.simulation.workload import TraceChoice
from serve_app.tuning.digital_twin import TwinPlan, TwinSettings
from serve_app.tuning.search_space import space_of
from serve_app.tuning.study import StudySettings

Method = Literal["tpe", "random", "live"]
Start = Literal["good", "bad"]

STARTS: Mapping[Start, Mapping[str, object]] = {"good": DEFAULTS, "bad": BAD_START}

_POLICY = "ewsjf"


@settings
class SearchGroup:
    """Methods that search from one start, judged together, because the best of all is the measure."""

    start: Start
    workloads: tuple[str, ...]
    methods: tuple[Method, ...]


@settings
class LiveSearch:
    """The paper's loop on production itself.

    Attributes:
        trial_s: seconds of traffic for each candidate.
    """

    trials: int = 6
    trial_s: float = 600.0


@settings
class TunerExperiment:
    """Settings of the experiment.

    Attributes:
        workloads: traces, by their names in the table.
        load: 1.0 is the rate at which the same replicas finish the workload under FCFS.
        requests: in the traffic from which windows are drawn.
        search_s: CPU seconds of a search in the twin, counted at `pace_requests_per_s`.
        pace_requests_per_s: assumed requests that a core simulates per second, so that a search takes the
            same course on every machine.
        judge_windows: windows of other traffic, the same for all, on which leaders are judged.
    """

    workloads: Mapping[str, str]
    groups: tuple[SearchGroup, ...]
    profile: str
    replicas: int
    load: float
    seeds: int
    requests: int
    search_s: float
    judge_windows: int
    pace_requests_per_s: float = 2_000.0
    live: LiveSearch = field(default_factory=LiveSearch)
    twin: TwinSettings = field(default_factory=TwinSettings)
    study: StudySettings = field(default_factory=StudySettings)

    def __post_init__(self) -> None:
        for group in self.groups:
            for name in group.workloads:
                if name not in self.workloads:
                    raise ValueError(f"there is no workload {name!r}: there are {', '.join(self.workloads)}")

    @property
    def fleet(self) -> FleetSettings:
        """Return a fleet with all replicas in one pool."""
        return FleetSettings(profile=self.profile, replicas={ONE_POOL: self.replicas})

    def traffic(self, workload: str) -> TraceChoice:
        """Return the requests of a workload."""
        return TraceChoice(name=self.workloads[workload], requests=self.requests)

    def twin_plan(self, workload: str, start: Start, rate_per_s: float, seed: int) -> TwinPlan:
        """Return the twin of a workload with a start's values."""
        scheduler = scheduler_settings(_POLICY, self.fleet.routing, {})
        tunable = begun_from(scheduler, STARTS[start])
        run = RunSettings(
            policy=_POLICY,
            fleet=self.fleet,
            trace=self.traffic(workload),
            seed=seed,
            rate_per_s=rate_per_s,
        )
        return TwinPlan(
            tunable=tunable,
            space=space_of(tunable),
            engines=tuple(self.fleet.plans(isolated=True)),
            traffic=fitted_trace(run).trace,
            settings=replace(self.twin, seed=seed),
        )

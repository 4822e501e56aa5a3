"""One search by each method, and the judgement of its results."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.common.tuned_simulation import CountingPlayer
from experiments.tuner.settings import LiveSearch, Method, TunerExperiment
from serve_app.tuning.digital_twin import TwinPlan, TwinProcesses
from serve_app.tuning.optimiser import TpeOptimiser
from serve_app.tuning.search_space import Values
from serve_app.tuning.study import INCUMBENT, Budget, WindowTask, run_study

# Trials of the live loop use windows that no study plays.
_FIRST_LIVE_WINDOW = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The leading candidate of a search at some time.

    Attributes:
        seconds: of searching in the twin, or of live traffic.
    """

    seconds: float
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Result of a search.

    Attributes:
        trials: number of candidates.
        requests: simulated by the search itself.
        confident: whether a study recommends its result; None for a method without a verdict.
        worst_trial: reward of the worst candidate in production, less that of the start; None for a method
            without candidates in production.
    """

    trials: int
    requests: int
    leaders: Sequence[Leader]
    confident: bool | None = None
    worst_trial: float | None = None


def search(experiment: TunerExperiment, method: Method, plan: TwinPlan, seed: int) -> Search:
    """Run one search."""
    if method == "live":
        return live_search(experiment.live, plan, seed)
    return twin_search(experiment, method, plan, seed)


def twin_search(experiment: TunerExperiment, method: Method, plan: TwinPlan, seed: int) -> Search:
    """Run a study in the digital twin, as `python -m serve_app tune` does.

    The defaults are not among its candidates: from a bad start they would win the race at once.
    """
    optimiser = TpeOptimiser(plan.space, seed=seed)
    if method == "random":
        # Start-up trials that never end: random search from the prior.
        optimiser = TpeOptimiser(plan.space, seed=seed, startup=experiment.study.trials)
    player = CountingPlayer(plan, experiment.pace_requests_per_s)
    course = run_study(
        optimiser,
        experiment.study,
        player,
        Budget(clock=player.clock, seconds=experiment.search_s),
        independent_windows=plan.independent_windows,
    )
    return Search(
        trials=course.finding.trials,
        requests=course.requests,
        confident=course.finding.confident,
        leaders=[
            Leader(seconds=step.seconds, values=course.proposals[step.leader].values)
            for step in course.rounds
        ],
    )


def live_search(live: LiveSearch, plan: TwinPlan, seed: int) -> Search:
    """Run the paper's loop: trials on consecutive minutes of traffic, without a comparison."""
    assert plan.traffic.rate_per_s is not None
    window = max(1, round(live.trial_s * plan.traffic.rate_per_s))
    twin = replace(plan.settings, window_requests=window, warm_up_ratio=0.0)
    player = CountingPlayer(replace(plan, settings=twin))
    optimiser = TpeOptimiser(plan.space, seed=seed)
    seen: list[tuple[float, Values]] = []
    leaders = []
    for trial in range(live.trials):
        proposal = optimiser.ask()
        ((_, result),) = player.play(
            [WindowTask(proposal.number, _FIRST_LIVE_WINDOW + trial, proposal.values)]
        )
        optimiser.tell(proposal, result.reward.value)
        if result.reward.value is not None:
            seen.append((result.reward.value, proposal.values))
        best = max(seen, key=lambda each: each[0])[1] if seen else plan.space.current
        leaders.append(Leader(seconds=(trial + 1) * live.trial_s, values=best))
    # The first proposal is the start itself.
    first = seen[0][0] if seen else 0.0
    return Search(
        trials=live.trials,
        requests=player.requests,
        leaders=leaders,
        worst_trial=min((reward - first for reward, _ in seen), default=0.0),
    )


def gains(plan: TwinPlan, searches: Sequence[Search], windows: int) -> list[list[float]]:
    """Return each leader's gain over the start, on windows of traffic that no search has used."""
    different: list[Values] = [plan.space.current]
    for leader in (leader for one in searches for leader in one.leaders):
        if leader.values not in different:
            different.append(leader.values)
    jobs = [
        WindowTask(number, window, values)
        for number, values in enumerate(different)
        for window in range(windows)
    ]
    rewards: list[list[float]] = [[] for _ in different]
    for job, result in TwinProcesses(plan).play(jobs):
        rewards[job.candidate].append(result.reward.value or 0.0)
    means = [statistics.fmean(each) for each in rewards]
    return [
        [means[different.index(leader.values)] - means[INCUMBENT] for leader in one.leaders]
        for one in searches
    ]

from dataclasses import replace

import pytest

from experiments.common.catalogue import Catalogue
from experiments.common.config import read_settings
from experiments.common.tuning_starts import BAD_START, DEFAULTS, begun_from
from experiments.tuner.run import _figures
from experiments.tuner.searches import Leader, Search, gains, live_search, twin_search
from experiments.tuner.settings import TunerExperiment
from serve_app.lab.simulation.fleet import FleetSettings
from serve_app.lab.simulation.scheduler_settings import scheduler_settings


def experiment() -> TunerExperiment:
    return read_settings(Catalogue().config("tuner"), TunerExperiment, quick=True)


def test_the_bad_start_differs_from_the_defaults_in_every_value() -> None:
    settings = scheduler_settings("ewsjf", FleetSettings(profile="laptop").routing, {})
    good, bad = (begun_from(settings, start) for start in (DEFAULTS, BAD_START))
    assert bad.scheduler.backpressure.target_waiting == 16
    assert bad.scheduler.isolation.max_long_prefills == 8
    assert good.scheduler.isolation != bad.scheduler.isolation
    assert good.scheduler.ewsjf.weights != bad.scheduler.ewsjf.weights


def test_a_search_in_the_twin_stays_within_its_counted_seconds_and_repeats_itself() -> None:
    small = replace(experiment(), search_s=0.7)
    plan = small.twin_plan("paper-mix", "bad", 5.0, 0)
    first, again = (twin_search(small, "random", plan, 0) for _ in range(2))
    assert first == again
    assert first.worst_trial is None
    assert first.trials > 1
    assert 0 < first.requests <= small.search_s * small.pace_requests_per_s * 1.3


def test_the_live_loop_begins_with_the_start_and_exposes_production_to_every_trial() -> None:
    small = experiment()
    plan = small.twin_plan("paper-mix", "bad", 5.0, 0)
    found = live_search(small.live, plan, 0)
    assert found.trials == len(found.leaders) == small.live.trials
    assert found.leaders[0].values == plan.space.current
    assert found.worst_trial is not None
    assert found.worst_trial <= 0
    assert found.confident is None


def test_the_start_gains_nothing_over_itself() -> None:
    plan = experiment().twin_plan("paper-mix", "bad", 5.0, 1)
    start = Search(trials=1, requests=0, leaders=[Leader(seconds=1.0, values=plan.space.current)])
    assert gains(plan, [start], 2) == [[0.0]]


def _search(*seconds: float) -> Search:
    return Search(trials=4, requests=9, leaders=[Leader(seconds=at, values={}) for at in seconds])


@pytest.mark.parametrize(
    ("gained", "best", "arrived_s"),
    [([0.0, 0.19, 0.2], 0.2, 2.0), ([0.0, 0.1, 0.1], 0.2, None), ([0.0, 0.0, 0.0], 0.0, None)],
)
def test_a_search_arrives_when_its_leader_has_nearly_the_best_gain_of_all(
    gained: list[float], best: float, arrived_s: float | None
) -> None:
    figures = _figures(_search(1.0, 2.0, 3.0), gained, best)
    assert figures.arrived_s == arrived_s
    assert figures.gain == gained[-1]


def test_a_group_of_a_workload_that_there_is_not_is_rejected() -> None:
    small = experiment()
    with pytest.raises(ValueError, match="no workload 'chats': there are paper-mix, azure"):
        replace(small, groups=(replace(small.groups[0], workloads=("chats",)),))

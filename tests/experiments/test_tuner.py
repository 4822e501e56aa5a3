"""Experiments on the tuner: searches, drifting traffic, and simulated production."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from experiments.common.catalogue import Catalogue
from experiments.common.config import read_settings
from experiments.common.tuned_simulation import TunedSimulation, counting_worker
from experiments.tuner.drift import DriftSettings, mixed, seconds_of, traffic
from experiments.tuner.run import EXPERIMENT
from experiments.tuner.searches import SearchesSettings, SearchPair, searched
from serve_app.core.decision_log import Decision
from serve_app.core.events import Retuned
from serve_app.lab.simulation.run import (
    ONE_POOL,
    Disclosure,
    FleetSettings,
    choose_trace,
    requests_of,
    scheduler_settings,
)
from serve_app.lab.simulation.simulation import SimulatedRequest
from serve_app.lab.workloads import TraceChoice, TraceRequest, scale_to_rate
from serve_app.tuning.digital_twin import TwinSettings
from serve_app.tuning.objective import ObjectiveSettings
from serve_app.tuning.parameter_loop import Result, SearchTask, Work
from serve_app.tuning.rollout import DecisionKind
from serve_app.tuning.search_space import Values
from serve_app.tuning.settings import ParameterTuningSettings
from serve_app.tuning.study import RolloutSettings, StudySettings
from tests.tuning.rewards import found


def experiment() -> SearchesSettings:
    read = read_settings(Catalogue().config("tuner"), EXPERIMENT.settings, quick=True)
    found: SearchesSettings = read.searches
    return found


def test_the_bad_start_differs_from_the_defaults_in_every_value() -> None:
    good, bad = experiment().tunable("good"), experiment().tunable("bad")
    assert bad.scheduler.backpressure.target_waiting == 16
    assert bad.scheduler.isolation.max_long_prefills == 8
    assert good.scheduler.isolation != bad.scheduler.isolation
    assert good.scheduler.ewsjf.weights != bad.scheduler.ewsjf.weights


@pytest.mark.slow
def test_both_searches_stay_within_their_seconds_and_repeat_themselves() -> None:
    small = experiment()
    pair = SearchPair(small, "paper-mix", "bad", 5.0, 0)
    first, again = (searched(pair) for _ in range(2))
    assert first == again
    assert first["tpe"]["candidates"] >= first["presets"]["candidates"]
    for figures in first.values():
        assert 0 < figures["requests"] <= small.search_s * small.pace_requests_per_s * 1.3
        assert figures["applied_gain"] in (0.0, figures["best_gain"])


def test_a_start_of_a_mix_that_does_not_exist_is_rejected() -> None:
    with pytest.raises(ValueError, match="no mix chats: there are paper-mix, bursts"):
        replace(experiment(), starts={"chats": ("good",)})


# -- drifting traffic -------------------------------------------------------------------------------------


def drift_experiment() -> DriftSettings:
    found: DriftSettings = read_settings(Catalogue().config("tuner"), EXPERIMENT.settings).drift
    return found


def test_lengths_are_of_the_papers_mix_by_kind() -> None:
    arrivals = [(float(place), place % 2 == 1) for place in range(400)]
    drawn = mixed(arrivals, 3)
    for request, (at, is_long) in zip(drawn.requests, arrivals, strict=True):
        least, most = (1_024, 4_096) if is_long else (32, 256)
        assert least <= request.prompt_tokens <= most
        assert 1 <= request.output_tokens <= 512
        assert request.arrival_s == at
    assert drawn == mixed(arrivals, 3)
    assert drawn.requests != mixed(arrivals, 4).requests


def test_the_rate_falls_where_requests_are_long_so_that_the_load_stays() -> None:
    arrived = traffic((0.1, 0.6), (0.1, 0.4), 0.5, 4_000.0, 1).requests
    for half, share, seconds in ((arrived_in(arrived, 0), 0.1, 0.1), (arrived_in(arrived, 2_000), 0.6, 0.4)):
        assert len(half) / 2_000 == pytest.approx(0.5 / seconds, rel=0.08)
        assert sum(one.prompt_tokens > 256 for one in half) / len(half) == pytest.approx(share, abs=0.04)
    assert all(one.arrival_s < other.arrival_s for one, other in pairwise(arrived))


def arrived_in(requests: Sequence[TraceRequest], begin_s: float) -> list[TraceRequest]:
    return [one for one in requests if begin_s <= one.arrival_s < begin_s + 2_000]


@pytest.mark.slow
def test_a_longer_mix_takes_more_of_the_fleet() -> None:
    before_s, after_s = seconds_of((0.1, 0.6), FleetSettings(profile="laptop", replicas={ONE_POOL: 1}))
    assert 0 < before_s < after_s


def test_only_tuned_variants_try_anything_and_they_begin_where_the_fixed_ones_do() -> None:
    played = drift_experiment()
    modes = {name: played.tuner(variant).rollout.mode for name, variant in played.variants.items()}
    assert modes == {
        "the defaults, fixed": "off",
        "the defaults, tuned": "on",
        "a bad start, fixed": "off",
        "the same start, tuned": "on",
    }
    good, good_tuned, bad, bad_tuned = (played.scheduler(variant) for variant in played.variants.values())
    assert (good, bad) == (good_tuned, bad_tuned)
    assert good.backpressure.target_waiting < bad.backpressure.target_waiting


# -- simulated production with its tuner; `tests/parity` compares it with the live one --------------------

FLEET = FleetSettings(profile="laptop", replicas={"all": 1})
RATE_PER_S = 20.0
TUNING = ParameterTuningSettings(
    profile="laptop",
    every_s=5.0,
    min_requests=100,
    search_cpu_s=1.0,
    core_share=0.5,
    objective=ObjectiveSettings(min_requests=10),
    twin=TwinSettings(window_requests=40, block_requests=20, learned_requests=20),
    study=StudySettings(search_windows=1, confirm_windows=4),
    rollout=RolloutSettings(mode="on", slice_s=8.0, settle_s=2.0, pairs=2, cool_down_s=0.0),
)


def requests(seconds: float) -> list[SimulatedRequest]:
    count = round(seconds * RATE_PER_S)
    trace = scale_to_rate(choose_trace(TraceChoice(name="paper-mix", requests=count), 0), RATE_PER_S)
    return list(requests_of(trace, Disclosure(), 16))


def production(
    tuning: ParameterTuningSettings = TUNING,
    *,
    certain: Values | None = None,
    seen: list[Decision] | None = None,
) -> TunedSimulation:
    """Return a production whose searches find these values, if any are given."""
    usual = counting_worker(1_000.0)

    def worker(work: Work) -> tuple[Result, float]:
        if certain is not None and isinstance(work, SearchTask):
            return found({**work.plan.space.current, **certain}), 1.0
        return usual(work)

    scheduler = scheduler_settings("ewsjf", FLEET.routing, {})
    return TunedSimulation(
        scheduler,
        FLEET.plans(isolated=True),
        tuning,
        worker,
        on_decision=None if seen is None else seen.append,
    )


@pytest.mark.application
def test_the_same_run_has_the_same_result() -> None:
    first, second = production(), production()
    assert first.run(requests(40)) == second.run(requests(40))
    assert first.loop.rollout.audit == second.loop.rollout.audit
    assert len(first.loop.document()["studies"]) >= 2
    # The engines match the profile, so it stays.
    error = first.loop.calibration.error
    assert error is not None
    assert error.max_abs < 0.03


def test_values_on_trial_expire_when_no_order_follows() -> None:
    seen: list[Decision] = []
    made = production(certain={"target_waiting": 5}, seen=seen)
    # The tuner ends with the last arrival, in the middle of the candidate's first slice.
    made.run(requests(19))
    retuned = [
        (each.now, each.event.settings.backpressure.target_waiting)
        for each in seen
        if isinstance(each.event, Retuned)
    ]
    assert made.loop.rollout.audit[0].kind is DecisionKind.STARTED
    (begun, tried), (ended, back) = retuned
    assert (tried, back) == (5, 3)
    assert ended - begun == pytest.approx(1.5 * 8.0)

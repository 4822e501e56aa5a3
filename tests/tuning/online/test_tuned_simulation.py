"""A simulated production with its tuner; that it does what the live one does is shown in `tests/parity`."""

from dataclasses import replace

import pytest
from serve_app.tuning.search.history import Proposal
from serve_app.tuning.search.study_settings import StudySettings

from serve_app.scheduling.decision_log import Decision
from serve_app.scheduling.events import Retuned
from serve_app.simulation.fleet import FleetSettings
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.simulation import SimulatedRequest
from serve_app.simulation.workload import Disclosure, TraceChoice, choose_trace, requests_of
from serve_app.tuning.objective.objective import ObjectiveSettings
from serve_app.tuning.online.parameter_search import ParameterTuningSettings, Searched, SearchTask
from serve_app.tuning.online.replay import Replayed, ReplayTask
from serve_app.tuning.online.rollout_settings import Act, RolloutSettings
from serve_app.tuning.online.tuned_simulation import TunedSimulation, counting_replay, counting_search
from serve_app.tuning.search.comparison import Comparison
from serve_app.tuning.search.study import Finding
from serve_app.tuning.twin.digital_twin import TwinSettings
from serve_app.workloads.transform import scale_to_rate

FLEET = FleetSettings(profile="laptop", replicas={"all": 1})
RATE_PER_S = 20.0
TUNING = ParameterTuningSettings(
    profile="laptop",
    every_s=5.0,
    min_requests=100,
    search_cpu_s=1.0,
    core_share=0.5,
    search="random",
    objective=ObjectiveSettings(min_requests=10),
    twin=TwinSettings(window_requests=40, block_requests=20, learned_requests=20),
    study=StudySettings(trials=3, rungs=(1, 2), batch=2, confirm_windows=2, finalists=1),
    rollout=RolloutSettings(mode="on", slice_s=8.0, settle_s=2.0, pairs=2, cool_down_s=0.0),
)


def requests(count: int) -> list[SimulatedRequest]:
    trace = scale_to_rate(choose_trace(TraceChoice(name="paper-mix", requests=count), 0), RATE_PER_S)
    return list(requests_of(trace, Disclosure(), 16))


def world(tuning: ParameterTuningSettings = TUNING, **changes: object) -> TunedSimulation:
    given = {"searcher": counting_search(tuning, 1_000.0)} | changes
    scheduler = scheduler_settings("ewsjf", FLEET.routing, {})
    return TunedSimulation(scheduler, FLEET.plans(isolated=True), tuning, **given)  # type: ignore[arg-type]


def certain(task: SearchTask) -> Searched:
    """A finding whatever the traffic."""
    comparison = Comparison(mean=0.1, low=0.1, high=0.1, windows=2)
    values = {**task.plan.space.current, "target_waiting": 5}
    finding = Finding(
        best=Proposal(1, values),
        search=comparison,
        confirmation=comparison,
        confident=True,
        reason="for the test",
        trials=2,
    )
    return Searched(finding=finding, speed_factor=1.0, seconds=1.0)


def test_a_search_ends_as_much_later_as_it_would_have_taken() -> None:
    results: list[Searched] = []
    tasks: list[SearchTask] = []
    search = counting_search(TUNING, 1_000.0)

    def searcher(task: SearchTask) -> Searched:
        tasks.append(task)
        results.append(search(task))
        return results[-1]

    made = world(replace(TUNING, every_s=1_000.0), searcher=searcher)
    records = made.run(requests(300))
    assert len(records) == 300
    assert made.searches == len(results) == 1
    # 40 requests a window, a thousand to the second.
    windows = results[0].seconds * 1_000.0 / 40
    assert windows == pytest.approx(round(windows))
    assert windows >= 4
    # The engines are those of the profile.
    assert results[0].speed_factor == pytest.approx(1.0, abs=0.15)
    assert len(tasks[0].plan.traffic.requests) >= TUNING.min_requests
    assert made.loop.document()["studies"][0]["trials"] == results[0].finding.trials


def test_the_same_run_comes_to_the_same_end() -> None:
    first, second = world(), world()
    assert first.run(requests(400)) == second.run(requests(400))
    assert first.loop.rollout.audit == second.loop.rollout.audit
    assert first.searches == second.searches >= 2


def test_pairs_are_weighed_when_their_replay_would_have_ended() -> None:
    replays: list[tuple[float, Replayed]] = []
    plain = counting_replay(1_000.0)

    def replayer(task: ReplayTask) -> Replayed:
        replays.append((made.world.timeline.now, plain(task)))
        return replays[-1][1]

    made = world(searcher=certain, replayer=replayer)
    made.run(requests(100 + 20 * 60))
    audit = made.loop.rollout.audit
    verdicts = [each for each in audit if each.act in (Act.ADOPTED, Act.ROLLED_BACK)]
    assert verdicts
    assert all("uncleared_difference" in each.figures for each in verdicts)
    at, last = max(each for each in replays if each[0] <= verdicts[0].at)
    assert last.task.numbers[-1] % 2 == 1
    # At the first look after it.
    assert 0.0 <= verdicts[0].at - (at + last.seconds / TUNING.core_share) <= 1.0


def test_values_on_trial_run_out_when_the_tuner_says_no_more() -> None:
    seen: list[tuple[float, int]] = []

    def note(decision: Decision) -> None:
        if isinstance(decision.event, Retuned):
            seen.append((decision.now, decision.event.settings.backpressure.target_waiting))

    made = world(searcher=certain, on_decision=note)
    # The tuner looks no more after the last arrival, in the middle of the candidate's first slice.
    made.run(requests(100 + 20 * 12))
    assert made.loop.rollout.audit[0].act is Act.STARTED
    (begun, tried), (ended, back) = seen
    assert (tried, back) == (5, 3)
    assert ended - begun == pytest.approx(1.5 * 8.0)


def test_a_pace_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="pace_requests_per_s"):
        counting_search(TUNING, 0.0)

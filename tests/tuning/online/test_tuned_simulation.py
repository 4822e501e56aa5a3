"""A simulated production with its tuner; that it does what the live one does is shown in `tests/parity`."""

from dataclasses import replace

import pytest

from serve_app.scheduling.decision_log import Decision
from serve_app.scheduling.events import Retuned
from serve_app.simulation.fleet import FleetSettings
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.simulation import SimulatedRequest
from serve_app.simulation.workload import Disclosure, TraceChoice, choose_trace, requests_of
from serve_app.tuning.objective.objective import ObjectiveSettings
from serve_app.tuning.online.parameter_search import ParameterTuningSettings, SearchResult, SearchTask
from serve_app.tuning.online.replay import ReplayResult, ReplayTask
from serve_app.tuning.online.rollout_settings import Act, RolloutSettings
from serve_app.tuning.online.tuned_simulation import TunedSimulation, counting_replay, counting_search
from serve_app.tuning.search.study import StudySettings
from serve_app.tuning.twin.digital_twin import TwinSettings
from serve_app.workloads.trace import scale_to_rate
from tests.tuning.rewards import search_result

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


def production(tuning: ParameterTuningSettings = TUNING, **changes: object) -> TunedSimulation:
    given = {"searcher": counting_search(tuning, 1_000.0)} | changes
    scheduler = scheduler_settings("ewsjf", FLEET.routing, {})
    return TunedSimulation(scheduler, FLEET.plans(isolated=True), tuning, **given)  # type: ignore[arg-type]


def certain(task: SearchTask) -> SearchResult:
    """A finding whatever the traffic."""
    return search_result({**task.plan.space.current, "target_waiting": 5})


def test_a_search_ends_as_much_later_as_it_would_have_taken() -> None:
    results: list[SearchResult] = []
    tasks: list[SearchTask] = []
    search = counting_search(TUNING, 1_000.0)

    def searcher(task: SearchTask) -> SearchResult:
        tasks.append(task)
        results.append(search(task))
        return results[-1]

    made = production(replace(TUNING, every_s=1_000.0), searcher=searcher)
    records = made.run(requests(300))
    assert len(records) == 300
    assert made.searches == len(results) == 1
    # 40 requests a window, a thousand to the second.
    windows = results[0].seconds * 1_000.0 / 40
    assert windows == pytest.approx(round(windows))
    assert windows >= 4
    # The engines are those of the profile, which stays.
    error = made.loop.calibration.error
    assert error is not None
    assert error.largest < 0.03
    assert made.loop.calibration.source() == "those of profile laptop"
    assert len(tasks[0].plan.traffic.requests) >= TUNING.min_requests
    assert made.loop.document()["studies"][0]["trials"] == results[0].finding.trials


def test_the_same_run_comes_to_the_same_end() -> None:
    first, second = production(), production()
    assert first.run(requests(400)) == second.run(requests(400))
    assert first.loop.rollout.audit == second.loop.rollout.audit
    assert first.searches == second.searches >= 2


def test_pairs_are_weighed_when_their_replay_would_have_ended() -> None:
    replays: list[tuple[float, ReplayResult]] = []
    plain = counting_replay(1_000.0)

    def replayer(task: ReplayTask) -> ReplayResult:
        replays.append((made.simulation.timeline.now, plain(task)))
        return replays[-1][1]

    made = production(searcher=certain, replayer=replayer)
    made.run(requests(100 + 20 * 60))
    audit = made.loop.rollout.audit
    verdicts = [each for each in audit if each.act in (Act.ADOPTED, Act.ROLLED_BACK)]
    assert verdicts
    assert all("uncleared_difference" in each.figures for each in verdicts)
    at, last = max(each for each in replays if each[0] <= verdicts[0].at)
    assert last.task.numbers[-1] % 2 == 1
    # At the first look after it.
    assert 0.0 <= verdicts[0].at - (at + last.seconds / TUNING.core_share) <= 1.0


def test_values_on_trial_expire_when_no_order_follows() -> None:
    seen: list[tuple[float, int]] = []

    def note(decision: Decision) -> None:
        if isinstance(decision.event, Retuned):
            seen.append((decision.now, decision.event.settings.backpressure.target_waiting))

    made = production(searcher=certain, on_decision=note)
    # The tuner ends with the last arrival, in the middle of the candidate's first slice.
    made.run(requests(100 + 20 * 12))
    assert made.loop.rollout.audit[0].act is Act.STARTED
    (begun, tried), (ended, back) = seen
    assert (tried, back) == (5, 3)
    assert ended - begun == pytest.approx(1.5 * 8.0)


def test_a_pace_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="pace_requests_per_s"):
        counting_search(TUNING, 0.0)

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from serve_app.core.policies.length_queues import LengthInterval, Partition
from serve_app.core.settings import ScoreWeights
from serve_app.errors import ChannelError, SettingsError
from serve_app.serving.scheduler import tuning_endpoint
from serve_app.serving.scheduler.tuning_endpoint import LearnedQueues, PartitionUpdate
from serve_app.tuning.rollout import NO_OUTCOMES, Retune
from tests.serving.channel.harness import FAST, PATIENCE_S, ControlPlane, scheduler_settings, wait_until

TARGET = "backpressure.target_waiting"


@pytest_asyncio.fixture
async def control_plane() -> AsyncIterator[ControlPlane]:
    control_plane = ControlPlane(scheduler_settings(policy="ewsjf"), FAST)
    await control_plane.begin()
    yield control_plane
    await control_plane.close()


def target(control_plane: ControlPlane) -> int:
    return control_plane.live.core.settings.backpressure.target_waiting


async def test_values_are_applied_permanently_logged_and_shown(
    control_plane: ControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ray.serve"):
        control_plane.live.tuner.retune(Retune(values={TARGET: 7, "ewsjf.weights.b_u": 0.3}, reason="better"))
    assert target(control_plane) == 7
    weights = control_plane.live.core.settings.ewsjf.weights
    # Weights that are not named keep their values.
    assert (weights.b_u, weights.a_u) == (0.3, ScoreWeights().a_u)
    assert "event=retuned model=m incarnation=1 reason='better' backpressure.target_waiting=7" in caplog.text
    assert (
        'ewsjf_tuned_value{model="m",setting="backpressure.target_waiting"} 7.0'
        in await control_plane.live.exposition()
    )
    assert control_plane.live.status()["tuner"]["values"] == {TARGET: 7, "ewsjf.weights.b_u": 0.3}


async def test_the_error_of_the_twin_is_a_metric_once_it_is_known(control_plane: ControlPlane) -> None:
    control_plane.live.tuner.store_document({"twin": {"error": None}})
    page = await control_plane.live.exposition()
    assert "ewsjf_twin_error_ratio{" not in page
    # Without a tuner that counts, it is unknown.
    assert "ewsjf_tuner_frozen{" not in page
    control_plane.live.tuner.store_document({"twin": {"error": {"ttft_ratio": 0.25, "tpot_ratio": -0.5}}})
    async with asyncio.timeout(PATIENCE_S):
        # Metrics pages are cached briefly.
        while "ewsjf_twin_error_ratio{" not in (page := await control_plane.live.exposition()):  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.01)
    assert 'ewsjf_twin_error_ratio{latency="ttft",model="m"} 0.25' in page
    assert 'ewsjf_twin_error_ratio{latency="tpot",model="m"} -0.5' in page


async def test_the_status_has_the_tuners_counts_and_whether_it_is_frozen(control_plane: ControlPlane) -> None:
    counts = {"searches": 2, "candidates": 30, "decisions": {"adopted": 1}}
    control_plane.live.tuner.store_document({"counts": counts})
    control_plane.live.tuner.freeze("an incident")
    text = await control_plane.live.exposition()
    for line in (
        'ewsjf_tuner_searches_total{model="m"} 2.0',
        'ewsjf_tuner_candidates_total{model="m"} 30.0',
        'ewsjf_tuner_decisions_total{decision="adopted",model="m"} 1.0',
        'ewsjf_tuner_frozen{model="m"} 1.0',
    ):
        assert line in text, line


async def test_values_on_trial_run_out_when_the_tuner_is_silent(control_plane: ControlPlane) -> None:
    before = target(control_plane)
    control_plane.live.tuner.retune(Retune(values={TARGET: 9}, valid_s=0.05))
    assert target(control_plane) == 9
    await wait_until(lambda: target(control_plane) == before)


async def test_a_renewed_trial_lasts_and_a_verdict_ends_it(control_plane: ControlPlane) -> None:
    desk = control_plane.live.tuner
    desk.retune(Retune(values={TARGET: 9}, valid_s=0.05))
    desk.retune(Retune(values={TARGET: 9}, valid_s=60.0))
    await asyncio.sleep(0.1)
    assert target(control_plane) == 9
    desk.retune(Retune(values={TARGET: 4}))
    assert target(control_plane) == 4


async def test_freezing_ends_a_trial_at_once_and_prevents_others(control_plane: ControlPlane) -> None:
    desk, before = control_plane.live.tuner, target(control_plane)
    desk.retune(Retune(values={TARGET: 9}, valid_s=60.0))
    desk.freeze("an incident")
    assert target(control_plane) == before
    assert desk.observed().frozen == "an incident"
    with pytest.raises(ChannelError, match="an incident"):
        desk.retune(Retune(values={TARGET: 9}, valid_s=60.0))
    # A return to the permanent value is always allowed.
    desk.retune(Retune(values={TARGET: before}))
    desk.thaw()
    desk.retune(Retune(values={TARGET: 9}, valid_s=60.0))
    assert target(control_plane) == 9


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backpressure.nonsense": 1}, "unknown setting"),
        ({TARGET: 0}, "target_waiting must be at least 1"),
        ({"max_waiting": 5}, "max_waiting cannot change"),
    ],
)
async def test_an_impossible_order_changes_nothing_and_harms_no_request(
    control_plane: ControlPlane, values: dict[str, float], message: str
) -> None:
    before = control_plane.live.core.settings
    with pytest.raises(SettingsError, match=message):
        control_plane.live.tuner.retune(Retune(values=values))
    assert control_plane.live.core.settings == before
    assert not control_plane.live.end_reason


async def test_outcomes_are_collected_from_the_first_request_for_them(control_plane: ControlPlane) -> None:
    desk = control_plane.live.tuner
    assert desk.observed().settings is None
    seen = desk.observed(outcomes=True)
    assert seen.settings is not None
    assert (seen.outcomes, seen.replicas) == (NO_OUTCOMES, [])
    assert seen.completed_until == seen.at


ONE = Partition((LengthInterval(min_tokens=1, max_tokens=9, mean_tokens=4.0, count=2),))


def test_lengths_are_taken_once_in_the_order_of_arrival() -> None:
    queues = LearnedQueues()
    for length in (5, 3, 9):
        queues.on_arrival(length)
    assert queues.take() == [5, 3, 9]
    assert queues.take() == []


def test_lengths_that_are_not_pulled_do_not_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_endpoint, "_KEPT", 10)
    queues = LearnedQueues()
    for length in range(15):
        queues.on_arrival(length)
    taken = queues.take()
    assert (len(taken), taken[0]) == (10, 5)


def test_queues_are_as_old_as_when_they_were_learned_elsewhere() -> None:
    queues = LearnedQueues()
    assert (len(queues), queues.age_s(100.0)) == (0, None)
    queues.on_change(
        PartitionUpdate(partition=ONE, reason="restored", lengths=2, distance=0.1, age_s=30.0), 100.0
    )
    assert (len(queues), queues.age_s(107.0)) == (1, 37.0)

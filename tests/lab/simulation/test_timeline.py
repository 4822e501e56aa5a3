import random
from functools import partial

import pytest

from serve_app.lab.simulation.simulation import Rank, Timeline


def test_things_happen_by_time_then_rank_then_the_order_of_planning() -> None:
    timeline = Timeline()
    seen: list[str] = []
    for time, rank, name in [
        (2.0, Rank.ENGINE, "late"),
        (1.0, Rank.ARRIVAL, "arrival"),
        (1.0, Rank.FEEDBACK, "feedback 1"),
        (1.0, Rank.FEEDBACK, "feedback 2"),
        (1.0, Rank.ENGINE, "engine"),
    ]:
        timeline.at(time, rank, lambda name=name: seen.append(name))  # type: ignore[misc]
    timeline.run()
    assert seen == ["engine", "feedback 1", "feedback 2", "arrival", "late"]
    assert timeline.now == 2.0


def test_a_run_until_a_time_leaves_the_rest_planned() -> None:
    timeline = Timeline()
    for time in (1.0, 2.0, 3.0):
        timeline.at(time, Rank.FEEDBACK, lambda: None)
    timeline.run(until=2.0)
    assert (timeline.now, len(timeline)) == (2.0, 1)


def test_the_past_cannot_be_planned() -> None:
    timeline = Timeline()
    timeline.at(1.0, Rank.FEEDBACK, lambda: None)
    timeline.run()
    with pytest.raises(ValueError, match=r"cannot schedule an event at 0\.5: the time is already 1\.0"):
        timeline.at(0.5, Rank.FEEDBACK, lambda: None)
    with pytest.raises(ValueError, match=r"cannot schedule an event at 0\.5: the time is already 1\.0"):
        timeline.at_each(Rank.ARRIVAL, [(2.0, lambda: None), (0.5, lambda: None)])


def test_actions_planned_together_run_as_if_planned_one_by_one() -> None:
    rng = random.Random(3)
    times = [rng.choice([0.0, 1.0, 1.0, 2.0, 3.0]) for _ in range(60)]

    def played(*, at_once: bool) -> list[tuple[float, int]]:
        timeline, seen = Timeline(), list[tuple[float, int]]()
        plans = [(time, partial(_note, timeline, seen, number)) for number, time in enumerate(times)]
        for part, rank in ((plans[:20], Rank.REPORT), (plans[20:40], Rank.ARRIVAL)):
            if at_once:
                timeline.at_each(rank, part)
            else:
                for time, action in part:
                    timeline.at(time, rank, action)
        for number, (time, action) in enumerate(plans[40:]):
            timeline.at(time, list(Rank)[number % len(Rank)], action)
        timeline.run(until=1.0)
        assert len(timeline) == len(times) - len(seen)
        timeline.run()
        return seen

    assert played(at_once=True) == played(at_once=False)
    assert len(played(at_once=True)) == len(times)


def _note(timeline: Timeline, seen: list[tuple[float, int]], number: int) -> None:
    seen.append((timeline.now, number))

import random
from functools import partial

import pytest

from serve_app.lab.simulation.simulation import Phase, Timeline


def test_things_happen_by_time_then_rank_then_the_order_of_planning() -> None:
    timeline = Timeline()
    seen: list[str] = []
    for time, phase, name in [
        (2.0, Phase.ENGINE, "late"),
        (1.0, Phase.ARRIVAL, "arrival"),
        (1.0, Phase.FEEDBACK, "feedback 1"),
        (1.0, Phase.FEEDBACK, "feedback 2"),
        (1.0, Phase.ENGINE, "engine"),
    ]:
        timeline.schedule(time, phase, lambda name=name: seen.append(name))  # type: ignore[misc]
    timeline.run()
    assert seen == ["engine", "feedback 1", "feedback 2", "arrival", "late"]
    assert timeline.now == 2.0


def test_a_run_until_a_time_leaves_the_rest_planned() -> None:
    timeline = Timeline()
    for time in (1.0, 2.0, 3.0):
        timeline.schedule(time, Phase.FEEDBACK, lambda: None)
    timeline.run(until=2.0)
    assert (timeline.now, len(timeline)) == (2.0, 1)


def test_the_past_cannot_be_scheduled() -> None:
    timeline = Timeline()
    timeline.schedule(1.0, Phase.FEEDBACK, lambda: None)
    timeline.run()
    with pytest.raises(ValueError, match=r"cannot schedule an event at 0\.5: the time is already 1\.0"):
        timeline.schedule(0.5, Phase.FEEDBACK, lambda: None)
    with pytest.raises(ValueError, match=r"cannot schedule an event at 0\.5: the time is already 1\.0"):
        timeline.schedule_all(Phase.ARRIVAL, [(2.0, lambda: None), (0.5, lambda: None)])


def test_actions_scheduled_together_run_as_if_scheduled_one_by_one() -> None:
    rng = random.Random(3)
    times = [rng.choice([0.0, 1.0, 1.0, 2.0, 3.0]) for _ in range(60)]

    def run_order(*, at_once: bool) -> list[tuple[float, int]]:
        timeline, seen = Timeline(), list[tuple[float, int]]()
        actions = [(time, partial(_note, timeline, seen, number)) for number, time in enumerate(times)]
        for part, phase in ((actions[:20], Phase.REPORT), (actions[20:40], Phase.ARRIVAL)):
            if at_once:
                timeline.schedule_all(phase, part)
            else:
                for time, action in part:
                    timeline.schedule(time, phase, action)
        for number, (time, action) in enumerate(actions[40:]):
            timeline.schedule(time, list(Phase)[number % len(Phase)], action)
        timeline.run(until=1.0)
        assert len(timeline) == len(times) - len(seen)
        timeline.run()
        return seen

    assert run_order(at_once=True) == run_order(at_once=False)
    assert len(run_order(at_once=True)) == len(times)


def _note(timeline: Timeline, seen: list[tuple[float, int]], number: int) -> None:
    seen.append((timeline.now, number))

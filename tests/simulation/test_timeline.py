import pytest

from serve_app.simulation.timeline import Rank, Timeline


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


def test_what_is_planned_meanwhile_happens_too() -> None:
    timeline = Timeline()
    seen: list[float] = []

    def again() -> None:
        seen.append(timeline.now)
        if timeline.now < 3:
            timeline.at(timeline.now + 1, Rank.FEEDBACK, again)

    timeline.at(0.0, Rank.FEEDBACK, again)
    timeline.run()
    assert seen == [0.0, 1.0, 2.0, 3.0]


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
    with pytest.raises(ValueError, match=r"cannot plan for 0\.5: it is 1\.0 already"):
        timeline.at(0.5, Rank.FEEDBACK, lambda: None)

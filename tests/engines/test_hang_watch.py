"""Stall time of an engine as the hang watch counts it."""

from serve_app.engines.engine import HangWatch


def test_an_engine_with_requests_and_without_steps_stalls() -> None:
    watch = HangWatch()
    assert [watch.update(7, busy=True, now=now) for now in (100.0, 101.0, 103.0)] == [0.0, 1.0, 3.0]


def test_a_step_ends_a_stall() -> None:
    watch = HangWatch()
    watch.update(7, busy=True, now=100.0)
    assert watch.update(7, busy=True, now=104.0) == 4.0
    assert watch.update(8, busy=True, now=105.0) == 0.0
    assert watch.update(8, busy=True, now=106.0) == 1.0


def test_an_engine_without_requests_has_nothing_to_do() -> None:
    watch = HangWatch()
    assert [watch.update(7, busy=False, now=now) for now in (100.0, 200.0)] == [0.0, 0.0]
    # A request arrived between two observations: its time counts from the last one.
    assert watch.update(7, busy=True, now=200.2) < 1.0


def test_time_without_observations_hardly_counts() -> None:
    watch = HangWatch()
    watch.update(7, busy=True, now=100.0)
    assert watch.update(7, busy=True, now=400.0) == 5.0

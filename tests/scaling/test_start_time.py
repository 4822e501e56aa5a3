from serve_app.scaling.start_time import StartTime


def test_the_first_start_replaces_the_guess_and_later_ones_are_averaged() -> None:
    start = StartTime()
    assert start.seconds == 60.0
    start.on_ready(1, 0.0)
    start.on_order(2, 10.0)
    start.on_ready(2, 30.0)
    assert start.seconds == 20.0
    start.on_ready(3, 40.0)
    assert start.seconds == 20.0 + 0.3 * (30.0 - 20.0)


def test_replicas_that_nobody_ordered_teach_nothing() -> None:
    start = StartTime()
    start.on_ready(0, 0.0)
    start.on_ready(3, 1.0)
    assert start.seconds == 60.0


def test_an_order_that_is_taken_back_is_not_waited_for() -> None:
    start = StartTime()
    start.on_ready(1, 0.0)
    start.on_order(2, 10.0)
    start.on_order(-1, 20.0)
    start.on_ready(2, 50.0)
    start.on_ready(3, 500.0)
    assert start.seconds == 40.0

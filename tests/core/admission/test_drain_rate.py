from serve_app.core.admission.wait_prediction import DrainRate


def backlog(rate: DrainRate, begin: float, seconds: int, tokens_per_s: int) -> float:
    """Record one dispatch per second during a backlog; return its end."""
    rate.on_time(0, begin)
    for second in range(1, seconds + 1):
        rate.on_time(3, begin + second)
        rate.on_dispatch(tokens_per_s)
    return begin + seconds


def test_dispatches_without_a_backlog_do_not_count() -> None:
    rate = DrainRate(0.0)
    rate.on_time(0, 10.0)
    rate.on_dispatch(500)
    assert rate.tokens_per_s == 0.0


def test_an_idle_fleet_does_not_count_as_slow() -> None:
    rate = DrainRate(0.0)
    now = backlog(rate, 0.0, 60, 700)
    before = rate.tokens_per_s
    for hour in range(1, 5):
        rate.on_time(0, now + 3_600 * hour)
        rate.on_dispatch(10)
    assert rate.tokens_per_s == before


def test_a_fleet_that_dispatches_nothing_during_a_backlog_becomes_slow() -> None:
    rate = DrainRate(0.0)
    now = backlog(rate, 0.0, 60, 700)
    rate.on_time(3, now + 90.0)
    assert 0 < rate.tokens_per_s < 70

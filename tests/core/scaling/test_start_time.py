from serve_app.core.scaling.pool_scaler import StartTime


def replicas(count: int) -> list[str]:
    return [f"r{number}" for number in range(count)]


def test_the_first_start_replaces_the_guess_and_later_ones_are_averaged() -> None:
    start = StartTime()
    assert (start.seconds, start.learned_s()) == (60.0, None)
    start.on_ready(replicas(1), 0.0)
    start.on_order(2, 10.0)
    start.on_ready(replicas(2), 30.0)
    assert start.seconds == start.learned_s() == 20.0
    start.on_ready(replicas(3), 40.0)
    assert start.seconds == 20.0 + 0.3 * (30.0 - 20.0)


def test_replicas_that_were_not_ordered_do_not_count() -> None:
    start = StartTime()
    start.on_ready((), 0.0)
    start.on_ready(replicas(3), 1.0)
    assert start.seconds == 60.0


def test_a_cancelled_order_is_not_awaited() -> None:
    start = StartTime()
    start.on_ready(replicas(1), 0.0)
    start.on_order(2, 10.0)
    start.on_order(-1, 20.0)
    start.on_ready(replicas(2), 50.0)
    start.on_ready(replicas(3), 500.0)
    assert start.seconds == 40.0


def test_a_brief_disconnection_is_not_a_start() -> None:
    start = StartTime()
    start.on_ready(replicas(2), 0.0)
    start.on_order(1, 10.0)
    start.on_ready(replicas(1), 11.0)
    start.on_ready(replicas(2), 12.0)
    assert start.learned_s() is None
    # A new scheduler: all replicas disappear and return.
    start.on_ready((), 13.0)
    start.on_ready(replicas(2), 14.0)
    assert start.learned_s() is None
    start.on_ready(replicas(3), 50.0)
    assert start.learned_s() == 40.0


def test_a_restored_start_time_is_averaged_with_later_starts() -> None:
    start = StartTime()
    start.restore(100.0)
    start.on_ready((), 0.0)
    start.on_order(1, 0.0)
    start.on_ready(replicas(1), 50.0)
    assert start.seconds == 100.0 + 0.3 * (50.0 - 100.0)


def test_replicas_lost_long_ago_are_removed_and_connected_ones_remain() -> None:
    start = StartTime()
    start.on_ready(("stays",), 0.0)
    for number in range(20_000):
        start.on_ready(("stays", f"comes-and-goes-{number}"), float(number))
    start.on_ready((), 20_000.0)
    start.on_order(2, 20_000.0)
    start.on_ready(("stays", "comes-and-goes-0"), 20_030.0)
    assert start.learned_s() == 30.0
    assert "1 ordered" in repr(start)

from serve_app.core.commands import Command
from serve_app.core.events import Cancelled
from serve_app.core.routing.adaptive_b_short import AdaptiveBShortSettings, BShortChanged
from serve_app.core.routing.pools import RoutingSettings
from tests.builders import ManualDriver, dispatched

ADAPTIVE = AdaptiveBShortSettings(enabled=True, b_short_min=64, memory_s=1.0, dwell_s=0.0)


def saturated(count: int = 60) -> ManualDriver:
    """Return full pools with requests of two lengths, both at home in the short pool."""
    driver = ManualDriver(
        max_waiting=1_000, routing=RoutingSettings(b_short_tokens=500, spill=False, adaptive_b_short=ADAPTIVE)
    )
    driver.join("s1", "short")
    driver.join("l1", "long", max_model_len=4_000)
    for number in range(count):
        driver.arrive(f"a{number}", prompt_tokens=90, max_output_tokens=10)
        driver.arrive(f"b{number}", prompt_tokens=290, max_output_tokens=10)
    return driver


def moves(commands: list[Command]) -> list[BShortChanged]:
    return [command for command in commands if isinstance(command, BShortChanged)]


def test_queued_requests_are_routed_again_when_b_short_moves() -> None:
    driver = saturated()
    assert {scheduled.pools for scheduled in driver.scheduler.queue} == {("short",)}
    commands: list[Command] = []
    for _ in range(4):
        commands += driver.report("l1", after_s=1.0)
        driver.report("s1")
    (move, *_) = moves(commands)
    assert move.was_tokens == 500
    b_short = driver.scheduler.router.b_short_tokens
    assert 100 <= b_short < 300
    assert driver.scheduler.queue_snapshot(driver.now).b_short_tokens == b_short
    for scheduled in driver.scheduler.queue:
        assert scheduled.pools == (("short",) if scheduled.estimate.budget_tokens <= b_short else ("long",))
    assert {replica for _, replica in dispatched(commands)} >= {"l1"}, (
        "they are dispatched where they are at home now"
    )


def test_requests_that_have_ended_are_no_demand() -> None:
    driver = saturated()
    for number in range(60):
        for name in (f"a{number}", f"b{number}"):
            driver.feed(Cancelled(name))
    assert len(driver.scheduler) == 0
    for _ in range(4):
        assert moves(driver.report("l1", after_s=1.0)) == []
    assert "requests=0" in repr(driver.scheduler.router)

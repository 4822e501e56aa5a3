from serve_app.routing.adaptive_b_short import AdaptiveBShortSettings, BShortChanged
from serve_app.routing.pools import RoutingSettings
from serve_app.scheduling.commands import Command
from serve_app.scheduling.events import Cancelled
from tests.builders import Simulation, dispatched

ADAPTIVE = AdaptiveBShortSettings(enabled=True, b_short_min=64, memory_s=1.0, dwell_s=0.0)


def busy_world(count: int = 60) -> Simulation:
    """Full pools, and a crowd of two lengths that are both at home in the short one."""
    world = Simulation(
        max_waiting=1_000, routing=RoutingSettings(b_short_tokens=500, spill=False, adaptive_b_short=ADAPTIVE)
    )
    world.join("s1", "short")
    world.join("l1", "long", max_model_len=4_000)
    for number in range(count):
        world.arrive(f"a{number}", prompt_tokens=90, max_output_tokens=10)
        world.arrive(f"b{number}", prompt_tokens=290, max_output_tokens=10)
    return world


def moves(commands: list[Command]) -> list[BShortChanged]:
    return [command for command in commands if isinstance(command, BShortChanged)]


def test_when_the_border_moves_whoever_waits_is_routed_anew() -> None:
    world = busy_world()
    assert {scheduled.pools for scheduled in world.scheduler.queue} == {("short",)}
    commands: list[Command] = []
    for _ in range(4):
        commands += world.report("l1", after_s=1.0)
        world.report("s1")
    (move, *_) = moves(commands)
    assert move.was_tokens == 500
    border = world.scheduler.router.b_short_tokens
    assert 100 <= border < 300
    assert world.scheduler.queue_snapshot(world.now).b_short_tokens == border
    for scheduled in world.scheduler.queue:
        assert scheduled.pools == (("short",) if scheduled.estimate.budget_tokens <= border else ("long",))
    assert {replica for _, replica in dispatched(commands)} >= {"l1"}, "they go where they are at home now"


def test_requests_that_are_over_weigh_nothing() -> None:
    world = busy_world()
    for number in range(60):
        for name in (f"a{number}", f"b{number}"):
            world.feed(Cancelled(name))
    assert len(world.scheduler) == 0
    for _ in range(4):
        assert moves(world.report("l1", after_s=1.0)) == []
    assert "requests=0" in repr(world.scheduler.router)

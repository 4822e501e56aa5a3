from serve_app.request import PriorityClass
from serve_app.routing.pools import RoutingSettings
from serve_app.scheduling import queue_snapshot as census
from serve_app.scheduling.dispatch.backpressure import BackpressureSettings
from tests.builders import Simulation


def full_world() -> Simulation:
    """Three requests of tenant a run; of those that wait, two are of b and one is c's."""
    world = Simulation(
        routing=RoutingSettings(pools=("only",)), backpressure=BackpressureSettings(lag_factor=0.0)
    )
    world.join("r1", "only")
    for number in range(3):
        world.arrive(f"a{number}", tenant="a")
    world.arrive("b1", tenant="b")
    world.now += 2.0
    world.arrive("b2", tenant="b")
    world.arrive("c1", tenant="c", priority=PriorityClass.BATCH)
    return world


def test_every_lane_is_shown_by_its_head_the_longest_wait_first() -> None:
    world = full_world()
    found = world.scheduler.queue_snapshot(world.now + 1.0)
    first, second = found.sub_queues
    assert (first.tenant, first.head, first.waiting, first.wait_s) == ("b", "b1", 2, 3.0)
    assert (second.priority, second.tenant, second.wait_s) == (PriorityClass.BATCH, "c", 1.0)
    assert first.why == "only: every replica is saturated, too busy, stale or draining"
    assert found.left_out == 0
    assert set(found.served[PriorityClass.DEFAULT]) == {"a", "b"}


def test_a_long_queue_is_cut_where_nobody_would_read_on() -> None:
    world = full_world()
    for number in range(census.MOST_LANES):
        world.arrive(f"t{number}", tenant=f"t{number}")
    found = world.scheduler.queue_snapshot(world.now)
    assert len(found.sub_queues) == census.MOST_LANES
    assert found.left_out == 2
    assert found.sub_queues[0].head == "b1"


def test_looking_changes_nothing() -> None:
    world = full_world()
    before = repr(world.scheduler.queue), world.scheduler.next_wakeup()
    world.scheduler.queue_snapshot(world.now)
    assert (repr(world.scheduler.queue), world.scheduler.next_wakeup()) == before

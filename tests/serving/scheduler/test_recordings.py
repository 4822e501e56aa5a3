"""Recordings around a request, from a real scheduler on a manual clock."""

from dataclasses import replace

from serve_app.core import events as ev
from serve_app.core.policies.length_queues import LengthInterval, Partition
from serve_app.serving.scheduler.journal import Entry
from serve_app.serving.scheduler.recordings import LEARNED_EVERY_S, RecordedSurroundings
from tests.builders import ManualDriver, report, request, spec

PARTITION = Partition((LengthInterval(min_tokens=1, max_tokens=9, mean_tokens=5.0, count=3),))


class Watched:
    """Scheduler whose events are recorded."""

    def __init__(self) -> None:
        self.driver = ManualDriver()
        self.around = RecordedSurroundings(self.driver.scheduler, 100.0)

    def feed(self, event: ev.Event, at: float) -> None:
        self.driver.feed(event, after_s=at - self.driver.now)
        self.around.on_entry(Entry(self.driver.scheduler, at, event, []))


def test_each_time_has_its_fleet_queues_and_settings() -> None:
    watched = Watched()
    before = watched.driver.scheduler.settings
    weighed = replace(before, backpressure=replace(before.backpressure, target_waiting=7))
    watched.feed(ev.ReplicaJoined(spec("s1")), 1.0)
    watched.feed(ev.ReplicaJoined(spec("s2")), 2.0)
    watched.feed(ev.PartitionChanged(PARTITION), 3.0)
    watched.feed(ev.Retuned(weighed), 4.0)
    watched.feed(ev.ReplicaReported("s1", report(draining=True)), 5.0)
    watched.feed(ev.ReplicaLost("s1"), 6.0)

    early, later = watched.around.at(2.5)
    assert list(early.fleet) == ["s1", "s2"]
    assert (early.partition, early.settings) == (None, before)
    # A draining replica leaves when its drain begins, and only once.
    assert [each.left for each in later if each.left is not None] == ["s1"]
    assert [each.at_s for each in later] == [3.0, 4.0, 5.0]
    late, none = watched.around.at(10.0)
    assert (list(late.fleet), late.partition, late.settings) == (["s2"], PARTITION, weighed)
    assert none == []


def test_forgotten_events_are_folded_into_the_start_state() -> None:
    watched = Watched()
    watched.feed(ev.ReplicaJoined(spec("s1")), 1.0)
    watched.feed(ev.ReplicaJoined(spec("s2")), 2.0)
    for number in range(4):
        at = 150.0 + number * LEARNED_EVERY_S
        watched.feed(ev.Arrived(request(f"r{number}", arrived_at=at)), at)

    standing, later = watched.around.at(0.0)
    assert list(standing.fleet) == ["s1", "s2"]
    assert later == []
    assert repr(watched.around) == "<RecordedSurroundings 0 changes, 3 states>"


def test_learned_state_is_that_of_the_requested_time() -> None:
    watched = Watched()
    assert watched.around.learned_at(0.0)["estimator"]
    watched.feed(ev.Arrived(request("r1", arrived_at=5.0)), 5.0)
    watched.feed(ev.Arrived(request("r2", arrived_at=70.0)), 70.0)

    first, second = watched.around.learned_at(6.0), watched.around.learned_at(71.0)
    assert first is watched.around.learned_at(0.0)
    assert first is not second

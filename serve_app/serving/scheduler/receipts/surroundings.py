"""What was around the requests of the last minutes: fleet, length queues, settings, and what was learned.

A replay of these minutes begins with it. Changes are kept as they come. What was learned is noted once a
minute at most, when a request arrives.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from serve_app.counterfactuals.recording import RecordedChange
from serve_app.routing.replica import ReplicaSpec
from serve_app.scheduling import Scheduler, SchedulerSettings
from serve_app.scheduling.events import (
    Arrived,
    Event,
    PartitionChanged,
    ReplicaJoined,
    ReplicaLost,
    ReplicaReported,
    Retuned,
)
from serve_app.scheduling.learned_state import learned_state
from serve_app.scheduling.policies.partition import Partition

# A state has up to some megabytes, with a thousand tenants.
LEARNED_EVERY_S = 60.0


@dataclass(slots=True)
class Standing:
    """What was in force at some time; times of changes are the scheduler's."""

    settings: SchedulerSettings
    partition: Partition | None = None
    fleet: dict[str, ReplicaSpec] = field(default_factory=dict)

    def apply(self, change: RecordedChange) -> None:
        """Fold a change in."""
        if change.joined is not None:
            self.fleet[change.joined.replica_id] = change.joined
        elif change.left is not None:
            self.fleet.pop(change.left, None)
        elif change.partition is not None:
            self.partition = change.partition
        elif change.settings is not None:
            self.settings = change.settings

    def copy(self) -> "Standing":
        """The same, to be changed by itself."""
        return Standing(self.settings, self.partition, dict(self.fleet))


class RecordedSurroundings:
    """The last minutes around one scheduler's requests.

    Args:
        kept_s: for how long changes are kept one by one.
    """

    def __init__(self, core: Scheduler, kept_s: float) -> None:
        self._core, self._kept_s = core, kept_s
        self._oldest = Standing(core.settings)
        self._changes: deque[RecordedChange] = deque()
        self._learned: deque[tuple[float, Mapping[str, Any]]] = deque()
        self._open: set[str] = set()

    def __repr__(self) -> str:
        return f"<RecordedSurroundings {len(self._changes)} changes, {len(self._learned)} states>"

    def note(self, event: Event, now: float) -> None:
        """The core has handled an event."""
        match event:
            case Arrived():
                if not self._learned or now >= self._learned[-1][0] + LEARNED_EVERY_S:
                    self._learned.append((now, learned_state(self._core)))
                    self._forget(now - self._kept_s)
            case ReplicaReported(replica_id=replica_id, report=report):
                # One that drains stays connected until its last answer.
                if report.draining and replica_id in self._open:
                    self._open.discard(replica_id)
                    self._changes.append(RecordedChange(at_s=now, left=replica_id))
            case ReplicaJoined(spec=spec):
                self._open.add(spec.replica_id)
                self._changes.append(RecordedChange(at_s=now, joined=spec))
            case ReplicaLost(replica_id=replica_id):
                if replica_id in self._open:
                    self._open.discard(replica_id)
                    self._changes.append(RecordedChange(at_s=now, left=replica_id))
            case PartitionChanged(partition=partition):
                self._changes.append(RecordedChange(at_s=now, partition=partition))
            case Retuned(settings=settings):
                self._changes.append(RecordedChange(at_s=now, settings=settings))
            case _:
                pass

    def at(self, time: float) -> tuple[Standing, list[RecordedChange]]:
        """What was in force at a time, and the changes since."""
        standing, later = self._oldest.copy(), list[RecordedChange]()
        for change in self._changes:
            if change.at_s <= time:
                standing.apply(change)
            else:
                later.append(change)
        return standing, later

    def learned_at(self, time: float) -> Mapping[str, Any]:
        """What had been learned by then, or the oldest that is known; the present where nothing is."""
        if not self._learned:
            return learned_state(self._core)
        known = [state for at, state in self._learned if at <= time]
        return known[-1] if known else self._learned[0][1]

    def _forget(self, before: float) -> None:
        while self._changes and self._changes[0].at_s < before:
            self._oldest.apply(self._changes.popleft())
        while len(self._learned) > 1 and self._learned[1][0] < before:
            self._learned.popleft()

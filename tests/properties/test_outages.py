"""Outage invariant: past the grace period no request waits for pools without a live replica.

`test_waits` runs its histories.
"""

from hypothesis.stateful import invariant

from serve_app.core import events as ev
from tests.properties.recording_machine import REPORT_LIMIT_S
from tests.properties.test_scheduler_invariants import SchedulerMachine

# Set by the machine.
GRACE_S = 1.0


class OutageMachine(SchedulerMachine):
    """Records for how long each pool has had no live replica."""

    def __init__(self) -> None:
        super().__init__()
        self.without_since: dict[str, float] = dict.fromkeys(self.routing.pools, 0.0)

    def feed(self, event: ev.Event) -> None:
        for pool in self.routing.pools:
            if self.is_alive(pool):
                self.without_since.pop(pool, None)
            else:
                self.without_since.setdefault(pool, self.now)
        super().feed(event)

    def is_alive(self, pool: str) -> bool:
        return any(
            known.reported_at is not None
            and self.now < known.reported_at + REPORT_LIMIT_S
            and not known.draining
            for known in self.replicas.values()
            if known.spec.pool == pool
        )

    @invariant()
    def no_request_waits_without_a_replica(self) -> None:
        for scheduled in self.scheduler.queue:
            lasted_s = [self.now - self.without_since.get(pool, self.now) for pool in scheduled.pools]
            assert min(lasted_s) < GRACE_S, scheduled

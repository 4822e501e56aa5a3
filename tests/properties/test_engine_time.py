"""Engine time in random histories: requests are charged exactly the replicas' busy time.

`test_waits` runs its histories.
"""

import math

from hypothesis.stateful import invariant

from serve_app.core import events as ev
from serve_app.core.commands import Command
from tests.properties.test_outages import OutageMachine


class EngineTimeMachine(OutageMachine):
    """Measures the busy time of replicas beside the scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_at, self.worked_s = self.now, 0.0
        handle = self.scheduler.handle

        def watched(event: ev.Event, now: float) -> list[Command]:
            self.worked_s += (now - self.looked_at) * len(self.at_work())
            self.looked_at = now
            return handle(event, now)

        self.scheduler.handle = watched  # type: ignore[method-assign]

    def at_work(self) -> set[str]:
        running = (self.scheduler.find(request_id) for request_id in self.expires_at)
        return {each.replica_id for each in running if each is not None and each.replica_id is not None}

    @invariant()
    def no_time_is_charged_twice_or_lost(self) -> None:
        charged_s = sum(self.scheduler.in_flight.engine_time.used.values())
        if self.at_work():
            assert charged_s <= self.worked_s + 1e-6
        else:
            assert math.isclose(charged_s, self.worked_s, abs_tol=1e-6)

    @invariant()
    def charges_are_positive(self) -> None:
        assert all(seconds > 0 for seconds in self.scheduler.in_flight.engine_time.used.values())

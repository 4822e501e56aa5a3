"""Initial values, and the replicas that begin with them."""

from collections.abc import Mapping
from typing import Literal

from experiments.common.tuned_simulation import PACE_REQUESTS_PER_S
from serve_app.core.settings_base import settings
from serve_app.lab.simulation.run import ONE_POOL, FleetSettings, scheduler_settings
from serve_app.tuning.search_space import Tunable, parameters_of

Start = Literal["good", "bad"]

STARTS: Mapping[Start, Mapping[str, object]] = {
    "good": {},
    "bad": {
        "a_u": 0.01,
        "b_u": 5.0,
        "max_long_prefills": 8,
        "max_longest_prefills": 8,
        "short_work_share": 0.6,
        "target_waiting": 16,
    },
}
"""Values by parameter that differ from the defaults.

The bad ones have an engine queue so long that no order matters, and urgency that reduces every order to
arrival order.
"""

POLICY = "ewsjf"


@settings
class TunedFleet:
    """Replicas of one pool under load.

    Attributes:
        load: 1.0 is the rate at which the same replicas finish the traffic under FCFS.
        seeds: number of runs.
        pace_requests_per_s: assumed requests that a core simulates per second, so that a search takes the
            same course on every machine.
    """

    profile: str
    replicas: int
    load: float
    seeds: int
    pace_requests_per_s: float = PACE_REQUESTS_PER_S

    @property
    def fleet(self) -> FleetSettings:
        """Return a fleet with all replicas in one pool."""
        return FleetSettings(profile=self.profile, replicas={ONE_POOL: self.replicas})

    def tunable(self, start: Start) -> Tunable:
        """Return the scheduler's settings with the values of a start."""
        scheduler = scheduler_settings(POLICY, self.fleet.routing, {})
        parameters = {each.name: each for each in parameters_of(scheduler)}
        tunable = Tunable(scheduler=scheduler)
        for name, value in STARTS[start].items():
            tunable = tunable.with_setting(parameters[name], value)
        return tunable

"""Values that a tuner can begin with: the product's defaults, and a deliberately bad start."""

from collections.abc import Mapping

from serve_app.scheduling import SchedulerSettings
from serve_app.tuning.search.tunable import Tunable, parameters_of, started_from

DEFAULTS: Mapping[str, object] = {}
"""The product's own."""

BAD_START: Mapping[str, object] = {
    "a_u": 0.01,
    "b_u": 5.0,
    "max_long_prefills": 8,
    "max_longest_prefills": 8,
    "short_work_share": 0.6,
    "target_waiting": 16,
}
"""An engine queue so long that no order matters, and urgency that turns every order into that of arrival."""


def begun_from(settings: SchedulerSettings, start: Mapping[str, object]) -> Tunable:
    """The settings with these values.

    Raises:
        SettingsError: the policy has no such parameter, or it cannot have the value.
    """
    return started_from(Tunable(scheduler=settings), parameters_of(settings), start)

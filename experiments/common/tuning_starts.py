"""Start values of a tuner: the product's defaults, and a deliberately bad start."""

from collections.abc import Mapping

from serve_app.core import SchedulerSettings
from serve_app.errors import SettingsError
from serve_app.tuning.search_space import Tunable, parameters_of

DEFAULTS: Mapping[str, object] = {}
"""The product's own values."""

BAD_START: Mapping[str, object] = {
    "a_u": 0.01,
    "b_u": 5.0,
    "max_long_prefills": 8,
    "max_longest_prefills": 8,
    "short_work_share": 0.6,
    "target_waiting": 16,
}
"""An engine queue so long that no order matters, and urgency that reduces every order to arrival order."""


def begun_from(settings: SchedulerSettings, start: Mapping[str, object]) -> Tunable:
    """Return the settings with these values.

    Raises:
        SettingsError: the policy has no such parameter, or the value is not allowed.
    """
    tunable = Tunable(scheduler=settings)
    parameters = {each.name: each for each in parameters_of(settings)}
    for name, value in start.items():
        if name not in parameters:
            raise SettingsError(f"cannot start from {name}: there are {', '.join(parameters)}")
        tunable = tunable.with_setting(parameters[name], value)
    return tunable

"""Retuning: the settings that may change in a running scheduler, without rebuilding its queues.

They are read for each decision: the weights of the score, the limits of prefill isolation, the bound on
delay, and the targets of backpressure. All others are part of the state of queues, accounts or reservations.
Changing them requires a new scheduler in the same process (`SchedulerActor.reconfigure`), to which gateways
resubmit their requests.
"""

from dataclasses import fields, replace
from operator import attrgetter

from serve_app.core.settings import SchedulerSettings
from serve_app.core.settings_base import changed

RETUNABLE = (
    "ewsjf.weights",
    "isolation",
    "delay_bound",
    "backpressure.target_waiting",
    "backpressure.tpot_gate_s",
    "backpressure.max_prefill_backlog_s",
    "engine_priority.target_waiting",
)
"""Paths of the settings that may change, including everything below them."""


def checked_retuning(current: SchedulerSettings, new: SchedulerSettings) -> SchedulerSettings:
    """Return `new`. Raise `ValueError` if it differs from `current` in other than retunable settings."""
    # A separate event changes it, and a tuner may not know the current value.
    new = replace(new, active_share=current.active_share)
    was, will = current.isolation.max_long_prefills, new.isolation.max_long_prefills
    # Isolation cannot be enabled or disabled, because queued requests have no prefill class, or one that
    # would not be used.
    isolation = new.isolation if (was > 0) is (will > 0) else current.isolation
    allowed = current
    for path in RETUNABLE:
        allowed = changed(allowed, path, attrgetter(path)(new))
    allowed = replace(allowed, isolation=isolation)
    if allowed != new:
        fixed = [each.name for each in fields(new) if getattr(allowed, each.name) != getattr(new, each.name)]
        raise ValueError(
            f"{', '.join(fixed)} cannot change in a running scheduler; "
            f"retunable settings: {', '.join(RETUNABLE)}"
        )
    return new

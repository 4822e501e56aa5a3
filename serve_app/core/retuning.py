"""Retuning: the settings that may change in a running scheduler, without rebuilding its queues.

They are read for each decision: the weights of the score, the limits of prefill isolation, the bound on
delay, and the targets of backpressure. All others are part of the state of queues, accounts or reservations.
Changing them requires a new scheduler in the same process (`SchedulerActor.reconfigure`), to which gateways
resubmit their requests.
"""

from dataclasses import fields, replace

from serve_app.core.settings import SchedulerSettings

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
    allowed = replace(
        current,
        ewsjf=replace(current.ewsjf, weights=new.ewsjf.weights),
        isolation=isolation,
        delay_bound=new.delay_bound,
        backpressure=replace(
            current.backpressure,
            target_waiting=new.backpressure.target_waiting,
            tpot_gate_s=new.backpressure.tpot_gate_s,
            max_prefill_backlog_s=new.backpressure.max_prefill_backlog_s,
        ),
        engine_priority=replace(current.engine_priority, target_waiting=new.engine_priority.target_waiting),
    )
    if allowed != new:
        changed = [
            each.name for each in fields(new) if getattr(allowed, each.name) != getattr(new, each.name)
        ]
        raise ValueError(
            f"{', '.join(changed)} cannot change in a running scheduler; "
            f"retunable settings: {', '.join(RETUNABLE)}"
        )
    return new

"""Which settings may change under a running scheduler, without anybody losing a place in a queue?

Those that are read anew for each decision: the weights of the score, the limits of prefill isolation, and the
targets of backpressure. All others are built into queues, books or promises that have been made, and need a
new scheduler (`user_config`), to which gateways bring their requests along.
"""

from dataclasses import fields, replace

from serve_app.scheduling.settings import SchedulerSettings

RETUNABLE = (
    "ewsjf.weights",
    "isolation",
    "backpressure.target_waiting",
    "backpressure.batch_target_waiting",
    "backpressure.tpot_gate_s",
    "backpressure.max_prefill_backlog_s",
    "engine_priority.target_waiting",
)
"""Paths of the settings that may change, with all that is below them."""


def checked_retuning(current: SchedulerSettings, wanted: SchedulerSettings) -> SchedulerSettings:
    """`wanted`, if nothing but what is retunable differs from `current`.

    Raises:
        ValueError: something else differs; the message names it.
    """
    was, will = current.isolation.max_long_prefills, wanted.isolation.max_long_prefills
    # Switched on or off, it would find requests in lanes that it has not graded.
    isolation = wanted.isolation if (was > 0) is (will > 0) else current.isolation
    allowed = replace(
        current,
        ewsjf=replace(current.ewsjf, weights=wanted.ewsjf.weights),
        isolation=isolation,
        backpressure=replace(
            current.backpressure,
            target_waiting=wanted.backpressure.target_waiting,
            batch_target_waiting=wanted.backpressure.batch_target_waiting,
            tpot_gate_s=wanted.backpressure.tpot_gate_s,
            max_prefill_backlog_s=wanted.backpressure.max_prefill_backlog_s,
        ),
        engine_priority=replace(
            current.engine_priority, target_waiting=wanted.engine_priority.target_waiting
        ),
    )
    if allowed != wanted:
        changed = [
            each.name for each in fields(wanted) if getattr(allowed, each.name) != getattr(wanted, each.name)
        ]
        raise ValueError(
            f"{', '.join(changed)} cannot change so in a running scheduler; what may: {', '.join(RETUNABLE)}"
        )
    return wanted

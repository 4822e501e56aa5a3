"""The learned state of a scheduler, persisted for the next one.

It contains bytes per token, template overhead, output lengths, the cost of a prefill in each pool, the share
of requests that is scheduled, and what the model has spent in the last hour. The tuner persists the learned
length queues. Requests, replicas and their caches are not included: gateways and replicas report them to
every new scheduler.
"""

from collections.abc import Mapping
from typing import Any

from serve_app.core import Scheduler, SchedulerSettings
from serve_app.core.routing.snapshot import number, section

STATE_KIND = "scheduler"


def learned_state(core: Scheduler) -> dict[str, Any]:
    """Return everything to persist, as plain values that later events do not change."""
    return {
        "estimator": core.estimator.state(),
        "prefill_costs": core.prefill_costs.state(),
        "spending": core.admission.spending.state(core.now),
        "active_share": core.pass_through.active_share,
        "configured_active_share": core.settings.active_share,
    }


def restore_state(core: Scheduler, document: Mapping[str, Any]) -> None:
    """Restore a result of `learned_state`.

    Raises:
        ValueError: a value is missing, out of range or of another version. A part may have been restored.
    """
    core.estimator.restore(section(document, "estimator"))
    core.prefill_costs.restore(section(document, "prefill_costs"))
    core.admission.spending.restore(document.get("spending", []), core.now)
    # A share that an operator set at run time applies until the configured share changes.
    if document.get("configured_active_share") == core.settings.active_share:
        core.pass_through.change(number(document, "active_share", at_least=0, at_most=1))


def restore_error(settings: SchedulerSettings, document: Mapping[str, Any]) -> str:
    """Return why a scheduler with these settings cannot restore a state, or an empty string if it can."""
    try:
        restore_state(Scheduler(settings), document)
    except (ValueError, TypeError, OverflowError) as exc:
        return str(exc)
    return ""

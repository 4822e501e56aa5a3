"""The learned state of a scheduler, persisted for the next one.

It contains bytes per token, template overhead, output lengths, the cost of a prefill in each pool, the share
of requests that is scheduled, and what the model has spent in the last hour. The tuner persists the learned
length queues. Requests, replicas and their caches are not included: gateways and replicas report them to
every new scheduler.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from serve_app.core import Scheduler
from serve_app.core.routing.estimation.estimate import EstimatorState
from serve_app.core.routing.prefill_cost import PrefillCostsState
from serve_app.core.routing.snapshot import decoded, encoded

STATE_KIND = "scheduler"


class _State(Struct, kw_only=True):
    estimator: EstimatorState
    prefill_costs: PrefillCostsState
    spending: list[tuple[float, float]] = []
    # States of releases before 0.3.0 have no shares.
    active_share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    configured_active_share: float | None = None


def learned_state(core: Scheduler) -> dict[str, Any]:
    """Return everything to persist, as plain values that later events do not change."""
    state = _State(
        estimator=core.estimator.state(),
        prefill_costs=core.prefill_costs.state(),
        spending=core.admission.spending.state(core.now),
        active_share=core.pass_through.active_share,
        configured_active_share=core.settings.active_share,
    )
    return encoded(state)


def restore_state(core: Scheduler, document: Mapping[str, Any]) -> None:
    """Restore a result of `learned_state`.

    Raises:
        ValueError: a value is missing, out of range or of another version. A part may have been restored.
    """
    state = decoded(document, _State)
    core.estimator.restore(state.estimator)
    core.prefill_costs.restore(state.prefill_costs)
    core.admission.spending.restore(state.spending, core.now)
    # A share that an operator set at run time applies until the configured share changes.
    if state.configured_active_share == core.settings.active_share:
        core.pass_through.change(state.active_share)

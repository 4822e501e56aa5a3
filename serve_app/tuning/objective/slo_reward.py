"""The reward that asks for what clients feel: targets kept, nobody very late, tenants alike. Ours.

    R = attainment - w_tail * tail - w_slowness * slowness - w_unfairness * unfairness

All four terms lie between 0 and 1 and have no unit:

- `attainment`: share of the requests served within the targets of their class: goodput over offered load, so
  that windows of different rates compare.
- `tail`: the worst class's 99th percentile of lateness (`ClassTargets.lateness`): 0.5 is a p99 at its target.
- `slowness`: mean lateness, each class counting alike. It is what still tells settings apart when all targets
  are kept, or none; and as a mean it has far less noise than a percentile.
- `unfairness`: 1 less Jain's index over what tenants got of their fair share (`metrics.fairness`).
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated

from serve_app.metrics.fairness import jain_of_tenants
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.statistics import percentile
from serve_app.settings_base import FINITE_NOT_NEGATIVE, at_least, settings
from serve_app.tuning.objective.service_class import ClassTargets, members_of


@settings(block="objective.slo")
class SloObjective:
    """Weights of the terms."""

    # A p99 that moves from its target to three times that costs as much as 1 request of 16 out of its SLO.
    tail_weight: Annotated[float, FINITE_NOT_NEGATIVE] = 0.25
    # Halving everybody's time to first token, from the target on, is worth 4 requests of 100 within the SLO.
    slowness_weight: Annotated[float, FINITE_NOT_NEGATIVE] = 0.25
    unfairness_weight: Annotated[float, FINITE_NOT_NEGATIVE] = 0.25
    # Below it a class has no p99 to speak of: that of 20 requests is nearly their longest.
    min_class_requests: Annotated[int, at_least(1)] = 20

    def value(self, terms: Mapping[str, float]) -> float:
        """The reward of these terms."""
        return (
            terms["attainment"]
            - self.tail_weight * terms["tail"]
            - self.slowness_weight * terms["slowness"]
            - self.unfairness_weight * terms["unfairness"]
        )


def slo_terms(
    counted: Sequence[RequestRecord], targets: ClassTargets, settings: SloObjective
) -> dict[str, float]:
    """The four terms.

    Args:
        counted: requests that can be judged (`service_class.judged`), at least one.
    """
    late = {
        name: sorted(map(targets.lateness, members)) for name, members in members_of(counted, targets).items()
    }
    large = [each for each in late.values() if len(each) >= settings.min_class_requests] or [
        sorted(value for each in late.values() for value in each)
    ]
    jain = jain_of_tenants(counted)
    return {
        "attainment": sum(map(targets.met_by, counted)) / len(counted),
        "tail": max(percentile(each, 99) for each in large),
        "slowness": statistics.fmean(statistics.fmean(each) for each in large),
        # Nothing served at all says nothing of how evenly.
        "unfairness": 0.0 if jain is None else 1.0 - jain,
    }

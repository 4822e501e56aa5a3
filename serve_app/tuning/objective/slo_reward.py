"""The default reward, from what clients notice: targets kept, no very late answers, tenants treated alike.

    R = attainment - w_tail * tail - w_slowness * slowness - w_unfairness * unfairness

All four terms lie between 0 and 1 and have no unit:

- `attainment`: share of the requests served within the targets of their class. It is goodput over offered
  load, so windows of different rates compare.
- `tail`: the worst class's 99th percentile of lateness (`ClassTargets.lateness`): 0.5 is a p99 at its target.
- `slowness`: mean lateness, each class counting alike. It still tells settings apart when all targets are
  kept, or none, and as a mean it has far less noise than a percentile.
- `unfairness`: 1 less Jain's index over each tenant's part of its fair share (`metrics.fairness`).

The definition is our own.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated

from serve_app.metrics.record import RequestRecord
from serve_app.metrics.summary import jain_of_tenants, percentile
from serve_app.metrics.targets import ClassTargets
from serve_app.settings_base import FINITE_NOT_NEGATIVE, at_least, settings
from serve_app.tuning.objective.service_class import members_of


@settings(block="objective.slo")
class SloObjective:
    """Weights of the terms."""

    # At 0.25, a p99 that grows from its target to three times that costs as much as 1 request of 16 out of
    # its SLO.
    tail_weight: Annotated[float, FINITE_NOT_NEGATIVE] = 0.25
    # At 0.25, halving every time to first token from its target is worth 4 requests of 100 within the SLO.
    slowness_weight: Annotated[float, FINITE_NOT_NEGATIVE] = 0.25
    # At 0.25, one of two tenants getting all service costs as much as 1 request of 8 out of its SLO.
    unfairness_weight: Annotated[float, FINITE_NOT_NEGATIVE] = 0.25
    # A smaller class has no meaningful p99: that of 20 requests is nearly their maximum.
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
        # Without any service, there is no unevenness.
        "unfairness": 0.0 if jain is None else 1.0 - jain,
    }

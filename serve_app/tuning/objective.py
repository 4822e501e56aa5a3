"""Reward: one number for how well the requests of an interval were served.

The digital twin and trials in production call the same function, so a candidate wins in both by the same
measure. A reward that cannot be measured is None, never a number: too few requests, or too few of them with
the necessary timestamps, must not look like an improvement.

The default, `slo` (a definition of this project), consists of what clients notice:

    R = attainment - 0.25 * tail - 0.25 * slowness - 0.25 * unfairness

All four terms are between 0 and 1 and dimensionless:

- `attainment`: share of the requests served within the targets of their class. It is goodput over offered
  load, so windows of different rates are comparable.
- `tail`: the worst class's 99th percentile of lateness (`ClassTargets.lateness`): 0.5 is a p99 at its target.
- `slowness`: mean lateness, with equal weight per class. It distinguishes settings even if all targets are
  met, or none, and as a mean it has far less noise than a percentile.
- `unfairness`: 1 less Jain's index over each tenant's part of its fair share
  (`metrics.summary.jain_of_tenants`).

`paper` is the reward of EWSJF (arXiv 2601.21758), section 4.4: how well the queues fit the lengths, and how
long requests wait.

    R = l1 * C + l2 * L - l3 * S - l4 * U        (Eq 5)

- C, compactness: `1 / (1 + v / v0)`, with v the variance of prompt lengths inside their queue, in tokens
  squared, averaged over requests, and v0 a million, a spread of 1,000 tokens. 0 to 1.
- L, load balance: `1 / (1 + CV)`, with CV the coefficient of variation of the number of requests per queue.
  0 to 1.
- S, queue proliferation: queues that received requests, over 32. From near 0 up; 1 at the limit.
- U, latency: mean queue time over 10 s. From 0 up, unbounded.

The weights 1, 1, 0.5, 1 and the forms of C, L, S and U are those of secondary readings. Averaging v over
requests is this project's choice: the sources name the variance only. Queues are distinguished by the name
under which a request was dispatched, so the partition should not change within the interval.

A service class is a priority class and a prompt size. Size is included because clients accept later responses
to long prompts, and because the method trades short requests against long ones, which a combined value would
hide.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import ClassTargets, jain_of_tenants, percentile
from serve_app.core.settings_base import at_least, settings

# A p99 that grows from its target to three times that costs as much as 1 request of 16 out of its SLO.
# Halving every time to first token from its target is worth 4 requests of 100. If one of two tenants gets all
# service, that costs as much as 1 request of 8.
_SLO_WEIGHTS = {"attainment": 1.0, "tail": -0.25, "slowness": -0.25, "unfairness": -0.25}
_PAPER_WEIGHTS = {"compactness": 1.0, "balance": 1.0, "proliferation": -0.5, "latency": -1.0}
_VARIANCE_SCALE, _MAX_QUEUES, _WAIT_SCALE_S = 1e6, 32, 10.0
_MIN_CLASS_REQUESTS = 20
"""Smaller classes have no meaningful p99: that of 20 requests is almost their maximum."""
_MIN_MEASURED_RATIO = 0.5
"""Minimum share of completed requests with a time to first token. Responses that are not streamed have none,
and if most have none, the others do not represent the traffic."""

ObjectiveKind = Literal["slo", "paper"]


@settings
class ObjectiveSettings:
    """Objective of the tuner.

    Attributes:
        kind: the reward function.
        targets: limits by class; both rewards report attainment, but only `slo` depends on it.
        min_requests: minimum number of requests; a share of 30 requests is uncertain by a tenth or two.
    """

    kind: ObjectiveKind = "slo"
    targets: ClassTargets = field(default_factory=ClassTargets)
    min_requests: Annotated[int, at_least(1)] = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """Reward of an interval.

    Attributes:
        value: higher is better; None if it could not be measured.
        terms: unweighted terms by name.
        requests: number of judged requests.
        reason: why there is no value; empty if there is one.
    """

    value: float | None
    terms: Mapping[str, float] = field(default_factory=dict)
    requests: int = 0
    reason: str = ""


def finite(reward: float | None) -> float | None:
    """Return the reward, or None if it is not finite, as from a broken objective."""
    return reward if reward is not None and math.isfinite(reward) else None


def reward_of(records: Sequence[RequestRecord], settings: ObjectiveSettings) -> Reward:
    """Return the reward of an interval, given each request that arrived in it once, in any order."""
    targets = settings.targets
    # Excludes client errors, and completed requests without a known first token. A cancelled request counts
    # if it had waited longer than its limit for a first token.
    judged = [
        record
        for record in records
        if targets.is_attributable(record) and (record.ttft_s is not None or not record.completed)
    ]
    reason = _why_unmeasured(records, judged, settings)
    if reason:
        return Reward(value=None, requests=len(judged), reason=reason)
    if settings.kind == "paper":
        terms, weights = _paper_terms(judged), _PAPER_WEIGHTS
    else:
        terms, weights = _slo_terms(judged, targets), _SLO_WEIGHTS
    value = finite(sum(weight * terms[name] for name, weight in weights.items()))
    reason = "the reward is not finite" if value is None else ""
    return Reward(value=value, terms=terms, requests=len(judged), reason=reason)


def _why_unmeasured(
    records: Sequence[RequestRecord], judged: Sequence[RequestRecord], settings: ObjectiveSettings
) -> str:
    """Return why these requests have no reward; empty if they have one."""
    if len(judged) < settings.min_requests:
        return f"{len(judged)} requests can be evaluated, {settings.min_requests} are needed"
    completed = sum(record.completed for record in records)
    measured_ratio = sum(record.completed for record in judged) / completed if completed else 1.0
    if measured_ratio < _MIN_MEASURED_RATIO:
        return f"only {measured_ratio:.0%} of the completed requests have a time to first token"
    sent = [record for record in judged if record.dispatched_at is not None]
    # Without names there would seem to be no queues at all, which is optimal under the paper's objective.
    if settings.kind == "paper" and sum(not record.length_queue for record in sent) > len(sent) / 2:
        return "most requests have no length queue"
    return ""


def _slo_terms(judged: Sequence[RequestRecord], targets: ClassTargets) -> dict[str, float]:
    late: dict[str, list[float]] = {}
    for record in judged:
        late.setdefault(targets.class_of(record), []).append(targets.lateness(record))
    large = [sorted(each) for each in late.values() if len(each) >= _MIN_CLASS_REQUESTS] or [
        sorted(value for each in late.values() for value in each)
    ]
    jain = jain_of_tenants(judged)
    return {
        "attainment": sum(map(targets.met_by, judged)) / len(judged),
        "tail": max(percentile(each, 99) for each in large),
        "slowness": statistics.fmean(statistics.fmean(each) for each in large),
        # Without any service, nothing is unfair.
        "unfairness": 0.0 if jain is None else 1.0 - jain,
    }


def _paper_terms(judged: Sequence[RequestRecord]) -> dict[str, float]:
    """Return C, L, S and U. A request that was never dispatched waited until its end and is in no queue."""
    queues: dict[str, list[int]] = {}
    for record in judged:
        if record.length_queue:
            queues.setdefault(record.length_queue, []).append(record.prompt_tokens)
    sizes = [len(members) for members in queues.values()]
    # Weighted by requests, because otherwise a queue of 3 would count as much as one of 1,000.
    squares = sum(len(lengths) * statistics.pvariance(lengths) for lengths in queues.values())
    variance = squares / sum(sizes) if sizes else 0.0
    variation = statistics.pstdev(sizes) / statistics.fmean(sizes) if sizes else 0.0
    wait_s = statistics.fmean(
        record.e2e_s if record.queue_wait_s is None else record.queue_wait_s for record in judged
    )
    return {
        "compactness": 1 / (1 + variance / _VARIANCE_SCALE),
        "balance": 1 / (1 + variation),
        "proliferation": len(queues) / _MAX_QUEUES,
        "latency": wait_s / _WAIT_SCALE_S,
    }

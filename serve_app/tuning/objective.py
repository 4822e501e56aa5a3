"""The reward: one number for how well the requests of an interval were served.

The digital twin and trials in production call the same function, so a candidate wins in both by the same
measure. A reward that cannot be measured is None, never a number. Too few requests, or too few of them with
the necessary timestamps, say nothing, and that must not look like an improvement.

The default, `slo` (the definition is our own), is made of what clients notice:

    R = attainment - 0.25 * tail - 0.25 * slowness - 0.25 * unfairness

All four terms lie between 0 and 1 and have no unit:

- `attainment`: share of the requests served within the targets of their class. It is goodput over offered
  load, so windows of different rates compare.
- `tail`: the worst class's 99th percentile of lateness (`ClassTargets.lateness`): 0.5 is a p99 at its target.
- `slowness`: mean lateness, each class counting alike. It still tells settings apart when all targets are
  kept, or none, and as a mean it has far less noise than a percentile.
- `unfairness`: 1 less Jain's index over each tenant's part of its fair share (`metrics.fairness`).

`paper` is that of EWSJF (arXiv 2601.21758), section 4.4: how well the queues fit the lengths, and how long
requests wait.

    R = l1 * C + l2 * L - l3 * S - l4 * U        (Eq 5)

- C, compactness: `1 / (1 + v / v0)`, with v the variance of prompt lengths inside their queue, in tokens
  squared, averaged over requests, and v0 a million, a spread of 1,000 tokens. 0 to 1.
- L, load balance: `1 / (1 + CV)`, with CV the coefficient of variation of how many requests each queue got.
  0 to 1.
- S, queue proliferation: queues that got requests, over 32. From near 0 up; 1 at the limit.
- U, latency: mean wait in the queue over 10 s. From 0 up, without a bound.

The weights 1, 1, 0.5, 1 and the forms of C, L, S and U are those of secondary readings. Averaging v over
requests is our choice: the sources name the variance only. Queues are told apart by the name under which a
request was dispatched, so the partition should not change within the interval.

A service class is a priority class by prompt size. Size is part of it for two reasons. Clients accept a later
answer to a long prompt. And the method trades short requests against long ones, so a figure of both together
would hide which of them pays.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import jain_of_tenants, percentile
from serve_app.core.metrics.targets import ClassTargets
from serve_app.core.settings_base import at_least, settings

# A p99 that grows from its target to three times that costs as much as 1 request of 16 out of its SLO.
# Halving every time to first token from its target is worth 4 requests of 100. One of two tenants getting all
# service costs as much as 1 request of 8.
_SLO_WEIGHTS = {"attainment": 1.0, "tail": -0.25, "slowness": -0.25, "unfairness": -0.25}
_PAPER_WEIGHTS = {"compactness": 1.0, "balance": 1.0, "proliferation": -0.5, "latency": -1.0}
_VARIANCE_SCALE, _MAX_QUEUES, _WAIT_SCALE_S = 1e6, 32, 10.0
_MIN_CLASS_REQUESTS = 20
"""A smaller class has no meaningful p99: that of 20 requests is nearly their maximum."""
_MIN_MEASURED_RATIO = 0.5
"""Share of the completed requests that must have a time to first token. Answers that are not streamed have
none, and where most have none, the others are no sample of the traffic."""

ObjectiveKind = Literal["slo", "paper"]


@settings
class ObjectiveSettings:
    """What the tuner works for.

    Attributes:
        kind: which of the two rewards.
        targets: limits by class; both rewards report against them, only `slo` is computed from them.
        min_requests: fewer say nothing: a share of 30 requests is known to a tenth or two.
    """

    kind: ObjectiveKind = "slo"
    targets: ClassTargets = field(default_factory=ClassTargets)
    min_requests: Annotated[int, at_least(1)] = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFigures:
    """How one service class was served.

    Attributes:
        requests: judged, whatever their outcome.
        attainment_ratio: share of them within the targets.
        ttft_p50_s, ttft_p99_s: of those that completed; None if none did.
    """

    requests: int
    attainment_ratio: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None

    def as_json(self) -> dict[str, Any]:
        """The figures by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The reward of an interval.

    Attributes:
        value: higher is better; None when it could not be measured.
        terms: its terms by name, without weights.
        classes: figures of each service class, by its name.
        requests: how many were judged.
        reason: why there is no value; empty when there is one.
    """

    value: float | None
    terms: Mapping[str, float] = field(default_factory=dict)
    classes: Mapping[str, ClassFigures] = field(default_factory=dict)
    requests: int = 0
    reason: str = ""


def finite(reward: float | None) -> float | None:
    """The reward; None when it is None or not finite, as from a broken objective."""
    return reward if reward is not None and math.isfinite(reward) else None


def reward_of(records: Sequence[RequestRecord], settings: ObjectiveSettings) -> Reward:
    """The reward of these requests.

    Args:
        records: every request that arrived in the interval exactly once, in any order, with its outcome.
    """
    targets = settings.targets
    # Left out are requests refused for what they are, and those that completed without a known first token. A
    # cancelled request counts when it had waited past its limit for a first token.
    judged = [
        record
        for record in records
        if targets.judges(record) and (record.ttft_s is not None or not record.completed)
    ]
    members: dict[str, list[RequestRecord]] = {}
    for record in judged:
        members.setdefault(targets.class_of(record), []).append(record)
    classes = {name: _figures(each, targets) for name, each in sorted(members.items())}
    reason = _why_unmeasured(records, judged, settings)
    if reason:
        return Reward(value=None, classes=classes, requests=len(judged), reason=reason)
    if settings.kind == "paper":
        terms, weights = _paper_terms(judged), _PAPER_WEIGHTS
    else:
        terms, weights = _slo_terms(judged, members, targets), _SLO_WEIGHTS
    value = finite(sum(weight * terms[name] for name, weight in weights.items()))
    reason = "the reward is not finite" if value is None else ""
    return Reward(value=value, terms=terms, classes=classes, requests=len(judged), reason=reason)


def _why_unmeasured(
    records: Sequence[RequestRecord], judged: Sequence[RequestRecord], settings: ObjectiveSettings
) -> str:
    """Why these requests have no reward; empty when they have one."""
    if len(judged) < settings.min_requests:
        return f"{len(judged)} requests can be judged, {settings.min_requests} are needed"
    completed = sum(record.completed for record in records)
    measured_ratio = sum(record.completed for record in judged) / completed if completed else 1.0
    if measured_ratio < _MIN_MEASURED_RATIO:
        return f"only {measured_ratio:.0%} of the completed requests have a time to first token"
    sent = [record for record in judged if record.dispatched_at is not None]
    # Without names there would seem to be no queues at all, which the paper's objective takes as ideal.
    if settings.kind == "paper" and sum(not record.length_queue for record in sent) > len(sent) / 2:
        return "most requests lack the name of the length queue in which they waited"
    return ""


def _figures(members: Sequence[RequestRecord], targets: ClassTargets) -> ClassFigures:
    ttfts = sorted(record.ttft_s for record in members if record.completed and record.ttft_s is not None)
    return ClassFigures(
        requests=len(members),
        attainment_ratio=sum(map(targets.met_by, members)) / len(members),
        ttft_p50_s=percentile(ttfts, 50) if ttfts else None,
        ttft_p99_s=percentile(ttfts, 99) if ttfts else None,
    )


def _slo_terms(
    judged: Sequence[RequestRecord], classes: Mapping[str, Sequence[RequestRecord]], targets: ClassTargets
) -> dict[str, float]:
    late = {name: sorted(map(targets.lateness, members)) for name, members in classes.items()}
    large = [each for each in late.values() if len(each) >= _MIN_CLASS_REQUESTS] or [
        sorted(value for each in late.values() for value in each)
    ]
    jain = jain_of_tenants(judged)
    return {
        "attainment": sum(map(targets.met_by, judged)) / len(judged),
        "tail": max(percentile(each, 99) for each in large),
        "slowness": statistics.fmean(statistics.fmean(each) for each in large),
        # Without any service, there is no unevenness.
        "unfairness": 0.0 if jain is None else 1.0 - jain,
    }


def _paper_terms(judged: Sequence[RequestRecord]) -> dict[str, float]:
    """C, L, S and U. A request that was never dispatched waited to its end, and is in no known queue."""
    queues: dict[str, list[int]] = {}
    for record in judged:
        if record.length_queue:
            queues.setdefault(record.length_queue, []).append(record.prompt_tokens)
    sizes = [len(members) for members in queues.values()]
    # As a mean over requests: over queues, a queue of 3 would weigh as one of 1,000.
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

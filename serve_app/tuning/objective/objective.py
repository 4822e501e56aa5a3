"""The reward: one number for how well the requests of an interval were served.

The digital twin and the live canary call the same function, so a candidate wins in both by the same measure.
A reward that cannot be measured is None, never a number. Too few requests, or too few of them with the
necessary timestamps, say nothing, and that must not look like an improvement.

Two objectives:

- `paper`: Eq 5 of EWSJF (arXiv 2601.21758), section 4.4, see `paper_reward`.
- `slo` (ours, the default): goodput against targets by class, less penalties, see `slo_reward`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from serve_app.metrics.record import RequestRecord
from serve_app.metrics.targets import ClassTargets
from serve_app.settings_base import ADVANCED, POSITIVE_SHARE, at_least, settings
from serve_app.tuning.objective.paper_reward import PaperObjective, paper_terms
from serve_app.tuning.objective.service_class import ClassFigures, by_class, judged
from serve_app.tuning.objective.slo_reward import SloObjective, slo_terms

Kind = Literal["slo", "paper"]


@settings(block="objective")
class ObjectiveSettings:
    """What the tuner works for.

    Attributes:
        kind: which of the two objectives.
        targets: limits by class; both objectives report against them, only `slo` is computed from them.
    """

    kind: Annotated[Kind, ADVANCED] = "slo"
    targets: ClassTargets = field(default_factory=ClassTargets)
    slo: Annotated[SloObjective, ADVANCED] = field(default_factory=SloObjective)
    paper: Annotated[PaperObjective, ADVANCED] = field(default_factory=PaperObjective)
    # Fewer requests say nothing: a share of 30 requests is known to a tenth or two.
    min_requests: Annotated[int, at_least(1), ADVANCED] = 30
    # Share of the completed requests that must have a time to first token. Answers that are not streamed have
    # none, and where most have none, the others are no sample of the traffic.
    min_measured_ratio: Annotated[float, POSITIVE_SHARE, ADVANCED] = 0.5


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
    counted = judged(records, settings.targets)
    classes = by_class(counted, settings.targets)
    reason = _why_unmeasured(records, counted, settings)
    if reason:
        return Reward(value=None, classes=classes, requests=len(counted), reason=reason)
    if settings.kind == "paper":
        terms = paper_terms(counted, settings.paper)
        value = settings.paper.value(terms)
    else:
        terms = slo_terms(counted, settings.targets, settings.slo)
        value = settings.slo.value(terms)
    if not math.isfinite(value):
        reason = f"the reward is not finite: {value}"
        return Reward(value=None, classes=classes, requests=len(counted), reason=reason)
    return Reward(value=value, terms=terms, classes=classes, requests=len(counted))


def _why_unmeasured(
    records: Sequence[RequestRecord], counted: Sequence[RequestRecord], settings: ObjectiveSettings
) -> str:
    """Why these requests have no reward; empty when they have one."""
    if len(counted) < settings.min_requests:
        return f"{len(counted)} requests can be judged, {settings.min_requests} are needed"
    completed = sum(record.completed for record in records)
    measured_ratio = sum(record.completed for record in counted) / completed if completed else 1.0
    if measured_ratio < settings.min_measured_ratio:
        return f"only {measured_ratio:.0%} of the completed requests have a time to first token"
    sent = [record for record in counted if record.dispatched_at is not None]
    # Without names there would seem to be no queues at all, which the paper's objective takes as ideal.
    if settings.kind == "paper" and sum(not record.length_queue for record in sent) > len(sent) / 2:
        return "most requests lack the name of the length queue in which they waited"
    return ""

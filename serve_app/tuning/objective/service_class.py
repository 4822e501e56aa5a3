"""Service classes: priority class by prompt size, with latency targets and figures for each.

Size is part of the class for two reasons. Nobody expects the answer to a long prompt within a second. And the
method trades short requests against long ones, so a figure of both together would hide who pays.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from serve_app.errors import Outcome
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.slo import Slo
from serve_app.metrics.statistics import percentile
from serve_app.metrics.summary import SHORT_AT_TOKENS
from serve_app.request import PriorityClass
from serve_app.settings_base import ADVANCED, FINITE_POSITIVE, at_least, settings

NOT_OURS = frozenset(
    {
        Outcome.REJECTED_INVALID,
        Outcome.REJECTED_UNAUTHORISED,
        Outcome.REJECTED_UNKNOWN_MODEL,
        Outcome.REJECTED_BODY_TOO_LARGE,
        Outcome.REJECTED_TOO_LONG,
        Outcome.REJECTED_RATE_LIMITED,
    }
)
"""Outcomes that no order of service could have changed."""


@settings(block="targets")
class ClassTarget:
    """Latency limits of one priority class, in seconds.

    Attributes:
        ttft_s: time to first token of short prompts.
        long_ttft_s: time to first token of all others.
        tpot_s: time per output token after the first; None sets no limit.
    """

    ttft_s: Annotated[float, FINITE_POSITIVE] = 1.0
    long_ttft_s: Annotated[float, FINITE_POSITIVE] = 10.0
    tpot_s: Annotated[float | None, FINITE_POSITIVE] = 0.1


@settings(block="targets")
class ClassTargets:
    """The targets of every priority class.

    Attributes:
        short_at_tokens: longest short prompt.
    """

    interactive: ClassTarget = field(default_factory=ClassTarget)
    default: ClassTarget = field(default_factory=ClassTarget)
    # Nobody waits for a batch answer; one minute and five keep the class from being starved.
    batch: ClassTarget = field(
        default_factory=lambda: ClassTarget(ttft_s=60.0, long_ttft_s=300.0, tpot_s=None)
    )
    short_at_tokens: Annotated[int, at_least(1), ADVANCED] = SHORT_AT_TOKENS

    def is_short(self, record: RequestRecord) -> bool:
        """Whether the prompt counts as short."""
        return record.prompt_tokens <= self.short_at_tokens

    def class_of(self, record: RequestRecord) -> str:
        """The name of its class, such as `default short`."""
        return f"{record.priority.value} {'short' if self.is_short(record) else 'long'}"

    def ttft_limit_s(self, record: RequestRecord) -> float:
        """The limit on its time to first token."""
        target = self._of(record.priority)
        return target.ttft_s if self.is_short(record) else target.long_ttft_s

    def met_by(self, record: RequestRecord) -> bool:
        """Whether the request completed within the limits of its class."""
        slo = Slo(ttft_s=self.ttft_limit_s(record), tpot_s=self._of(record.priority).tpot_s)
        return slo.met_by(record)

    def lateness(self, record: RequestRecord) -> float:
        """`ttft / (ttft + limit)`: 0 at once, 0.5 at the limit, 1 without an answer.

        Unlike seconds it is bounded, so one lost request cannot outweigh a thousand. Unlike the SLO it falls
        with every second saved, also where all limits are kept, or none.
        """
        if not record.completed or record.ttft_s is None:
            return 1.0
        return record.ttft_s / (record.ttft_s + self.ttft_limit_s(record))

    def _of(self, priority: PriorityClass) -> ClassTarget:
        target: ClassTarget = getattr(self, priority.value)
        return target


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFigures:
    """How one class was served.

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


def judged(records: Iterable[RequestRecord], targets: ClassTargets) -> list[RequestRecord]:
    """The requests whose latency depends on the order of service.

    Left out are requests that were refused for what they are, and those that completed without a known first
    token. A cancelled request counts when it had waited past its limit for a first token; before that, the
    client had its own reasons.
    """
    return [record for record in records if _counts(record, targets)]


def _counts(record: RequestRecord, targets: ClassTargets) -> bool:
    if record.outcome in NOT_OURS:
        return False
    if record.completed:
        return record.ttft_s is not None
    if record.outcome is Outcome.CANCELLED:
        waited_s = record.e2e_s if record.ttft_s is None else record.ttft_s
        return waited_s > targets.ttft_limit_s(record)
    return True


def by_class(counted: Sequence[RequestRecord], targets: ClassTargets) -> dict[str, ClassFigures]:
    """The figures of each class that occurs, by name."""
    return {
        name: _figures(members, targets) for name, members in sorted(members_of(counted, targets).items())
    }


def members_of(counted: Sequence[RequestRecord], targets: ClassTargets) -> dict[str, list[RequestRecord]]:
    """The requests of each class that occurs, by name."""
    members: dict[str, list[RequestRecord]] = {}
    for record in counted:
        members.setdefault(targets.class_of(record), []).append(record)
    return members


def _figures(members: Sequence[RequestRecord], targets: ClassTargets) -> ClassFigures:
    ttfts = sorted(record.ttft_s for record in members if record.completed and record.ttft_s is not None)
    return ClassFigures(
        requests=len(members),
        attainment_ratio=sum(targets.met_by(record) for record in members) / len(members),
        ttft_p50_s=percentile(ttfts, 50) if ttfts else None,
        ttft_p99_s=percentile(ttfts, 99) if ttfts else None,
    )

"""Service classes: priority class by prompt size, with latency targets and figures for each.

Size is part of the class for two reasons. Nobody expects the answer to a long prompt within a second. And the
method trades short requests against long ones, so a figure of both together would hide who pays.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from serve_app.metrics.record import RequestRecord
from serve_app.metrics.summary import percentile
from serve_app.metrics.targets import ClassTargets


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
    return [
        record
        for record in records
        if targets.judges(record) and (record.ttft_s is not None or not record.completed)
    ]


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

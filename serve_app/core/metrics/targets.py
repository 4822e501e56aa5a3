"""Targets: SLOs by priority class, and the reasons why a request missed them.

The tuner's objective and the gateways' metric of SLO attainment use the same targets.
"""

import enum
from dataclasses import field
from typing import Annotated

from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import SHORT_AT_TOKENS, Slo
from serve_app.core.settings_base import ADVANCED, FINITE_POSITIVE, at_least, settings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass

NOT_ATTRIBUTABLE = frozenset(
    {
        Outcome.REJECTED_INVALID,
        Outcome.REJECTED_UNAUTHORISED,
        Outcome.REJECTED_UNKNOWN_MODEL,
        Outcome.REJECTED_UNKNOWN_RESPONSE,
        Outcome.REJECTED_BODY_TOO_LARGE,
        Outcome.REJECTED_TOO_LONG,
        Outcome.REJECTED_RATE_LIMITED,
    }
)
"""Outcomes that no scheduling decision could have changed."""


class Miss(enum.StrEnum):
    """A reason why a request missed the targets of its class."""

    TTFT = "ttft"
    TPOT = "tpot"
    EXPIRED = "expired"
    """Its queue timeout ended."""
    REJECTED = "rejected"
    """It was rejected for lack of capacity or of a replica."""
    FAILED = "failed"
    """Its engine failed."""
    ABANDONED = "abandoned"
    """Its client disconnected after the limit for a first token."""


_MISSES = {
    Outcome.EXPIRED: Miss.EXPIRED,
    Outcome.FAILED: Miss.FAILED,
    Outcome.CANCELLED: Miss.ABANDONED,
}


@settings(block="targets")
class ClassTarget:
    """Latency limits of one priority class, in seconds.

    Attributes:
        ttft_s: time to first token of short prompts.
        long_ttft_s: time to first token of all others.
        tpot_s: time per output token after the first; None sets no limit.
    """

    ttft_s: Annotated[float, FINITE_POSITIVE] = 1.0
    long_ttft_s: Annotated[float, FINITE_POSITIVE, ADVANCED] = 10.0
    tpot_s: Annotated[float | None, FINITE_POSITIVE] = 0.1


@settings(block="targets")
class ClassTargets:
    """The targets of all priority classes.

    Attributes:
        short_at_tokens: maximum length of a short prompt.
    """

    interactive: ClassTarget = field(default_factory=ClassTarget)
    default: ClassTarget = field(default_factory=ClassTarget)
    # No user waits for batch answers; one and five minutes prevent the class from starving.
    batch: ClassTarget = field(
        default_factory=lambda: ClassTarget(ttft_s=60.0, long_ttft_s=300.0, tpot_s=None)
    )
    short_at_tokens: Annotated[int, at_least(1), ADVANCED] = SHORT_AT_TOKENS

    def is_short(self, record: RequestRecord) -> bool:
        """Return whether the prompt counts as short."""
        return record.prompt_tokens <= self.short_at_tokens

    def class_of(self, record: RequestRecord) -> str:
        """Return the name of the request's class and length, such as `default short`."""
        return f"{record.priority.value} {'short' if self.is_short(record) else 'long'}"

    def ttft_limit_s(self, record: RequestRecord) -> float:
        """Return the limit on the request's time to first token, in seconds."""
        target = self._of(record.priority)
        return target.ttft_s if self.is_short(record) else target.long_ttft_s

    def met_by(self, record: RequestRecord) -> bool:
        """Return whether the request completed within the limits of its class."""
        slo = Slo(ttft_s=self.ttft_limit_s(record), tpot_s=self._of(record.priority).tpot_s)
        return slo.met_by(record)

    def lateness(self, record: RequestRecord) -> float:
        """Return `ttft / (ttft + limit)`: 0 for an immediate answer, 0.5 at the limit, 1 without an answer.

        It is bounded, unlike seconds, so one lost request cannot outweigh a thousand. Unlike SLO attainment
        it improves with every second saved, even if all limits are met, or none.
        """
        if not record.completed or record.ttft_s is None:
            return 1.0
        return record.ttft_s / (record.ttft_s + self.ttft_limit_s(record))

    def is_attributable(self, record: RequestRecord) -> bool:
        """Return whether the scheduler is responsible for the request's latency.

        False if it was rejected for its content or its key's limit, or if its client disconnected before the
        limit for a first token.
        """
        if record.outcome in NOT_ATTRIBUTABLE:
            return False
        if record.outcome is Outcome.CANCELLED:
            waited_s = record.e2e_s if record.ttft_s is None else record.ttft_s
            return waited_s > self.ttft_limit_s(record)
        return True

    def missed_by(self, record: RequestRecord) -> tuple[Miss, ...]:
        """Return the reasons why a request missed its targets; latencies as in `Slo.met_by`."""
        if not record.completed:
            return (_MISSES.get(record.outcome, Miss.REJECTED),)
        target = self._of(record.priority)
        ttft_s = record.ttft_s
        misses: tuple[Miss, ...] = ()
        if ttft_s is None:
            return misses
        if ttft_s > self.ttft_limit_s(record):
            misses = (Miss.TTFT,)
        if target.tpot_s is not None and (tpot_s := record.tpot_s) is not None and tpot_s > target.tpot_s:
            misses = (*misses, Miss.TPOT)
        return misses

    def _of(self, priority: PriorityClass) -> ClassTarget:
        target: ClassTarget = getattr(self, priority.value)
        return target

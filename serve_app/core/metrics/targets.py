"""Targets: what each priority class is owed, and what kept a request from it.

The tuner's objective and the gateways' count of requests served well go by the same targets.
"""

import enum
from dataclasses import field
from typing import Annotated

from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.slo import Slo
from serve_app.core.metrics.summary import SHORT_AT_TOKENS
from serve_app.core.settings_base import ADVANCED, FINITE_POSITIVE, at_least, settings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass

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


class Miss(enum.StrEnum):
    """What kept a request from the targets of its class."""

    TTFT = "ttft"
    TPOT = "tpot"
    EXPIRED = "expired"
    """Its time in the queue was over."""
    REFUSED = "refused"
    """It was refused for lack of capacity, or of an engine."""
    FAILED = "failed"
    """Its engine failed."""
    ABANDONED = "abandoned"
    """Its client left after the limit for a first token."""


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
    """The targets of every priority class.

    Attributes:
        short_at_tokens: longest short prompt.
    """

    interactive: ClassTarget = field(default_factory=ClassTarget)
    default: ClassTarget = field(default_factory=ClassTarget)
    # Batch answers have no reader who waits; one minute and five keep the class from starving.
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

    def judges(self, record: RequestRecord) -> bool:
        """Whether its latency was ours to keep.

        Not where it was refused for what it is, nor where its client left before the limit for a first token.
        """
        if record.outcome in NOT_OURS:
            return False
        if record.outcome is Outcome.CANCELLED:
            waited_s = record.e2e_s if record.ttft_s is None else record.ttft_s
            return waited_s > self.ttft_limit_s(record)
        return True

    def missed_by(self, record: RequestRecord) -> tuple[Miss, ...]:
        """What kept a request from its targets; nothing where it kept them all.

        A latency that a record cannot have misses no target, as in `Slo.met_by`.
        """
        if not record.completed:
            return (_MISSES.get(record.outcome, Miss.REFUSED),)
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

"""Nobody waits for ever: whoever has waited `max_wait_s` goes first, at a bounded rate.

Under lasting overload everybody has waited too long, and promoting all of them would turn any policy back
into FCFS. So at most `promoted_share` of all dispatches are promotions. The bound that follows: a request is
dispatched at the latest `max_wait_s` after it came, plus the time in which the scheduler makes `(those
promoted before it + 1) / promoted_share` dispatches.

Ours; EWSJF's own proof that nobody starves (Theorem A.1) gives no usable bound.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from serve_app.request import PriorityClass
from serve_app.scheduling.request import ScheduledRequest

# Promotions that may be saved up while nobody needs one.
_SAVED = 4.0
# One that was refused, and came back when it was told to, was promised to be served in time: it goes
# first after this share of its time in the queue, whatever the policy makes of it. The rest is for its turn
# among those promoted.
_PROMISED_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionSettings:
    """Seconds after which each class goes first, and how often."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    # Longer than any length queue waits below saturation, shorter than people and programs give up.
    interactive_s: float = 15.0
    default_s: float = 60.0
    batch_s: float = 1_800.0
    # A fifth of the dispatches at most: short requests keep the rest in overload.
    promoted_share: float = 0.2

    def __post_init__(self) -> None:
        for name in ("interactive_s", "default_s", "batch_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"promotion.{name} must be positive, got {getattr(self, name)}")
        if not 0 < self.promoted_share <= 1:
            raise ValueError(
                f"promotion.promoted_share must be above 0 and at most 1, got {self.promoted_share}"
            )

    def max_wait_s(self, priority: PriorityClass) -> float:
        """Seconds after which a request of this class goes first."""
        seconds: float = getattr(self, f"{priority.value}_s")
        return seconds


class Promotion:
    """Puts those who have waited too long first, as often as is allowed."""

    def __init__(self, settings: PromotionSettings) -> None:
        self._settings = settings
        self._allowed = 1.0

    @property
    def is_due(self) -> bool:
        """Whether somebody may be promoted now."""
        return self._allowed >= 1.0

    def first(self, heads: Iterable[ScheduledRequest], now: float) -> ScheduledRequest | None:
        """The head that is longest past its time; None when none is."""
        overdue = [head for head in heads if self.is_overdue(head, now)]
        return min(overdue, key=lambda head: (head.request.arrived_at, head.sequence), default=None)

    def on_dispatch(self, scheduled: ScheduledRequest, now: float, *, room_was_kept: bool = False) -> None:
        """Count a dispatch.

        Args:
            room_was_kept: others have stood back for it, and have their turns before anybody is promoted
                again.
        """
        if room_was_kept:
            self._allowed = 0.0
        elif self._allowed >= 1.0 and self.is_overdue(scheduled, now):
            self._allowed -= 1.0
        self._allowed = min(_SAVED, self._allowed + self._settings.promoted_share)

    def overdue_at(self, scheduled: ScheduledRequest) -> float:
        """When the request will have waited as long as its class may, or as it was promised."""
        request = scheduled.request
        wait_s = self._settings.max_wait_s(request.priority)
        if scheduled.claimed:
            wait_s = min(wait_s, _PROMISED_SHARE * (request.expires_at - request.arrived_at))
        return request.arrived_at + wait_s

    def is_overdue(self, scheduled: ScheduledRequest, now: float) -> bool:
        """Whether the request has waited longer than its class may."""
        return now > self.overdue_at(scheduled)

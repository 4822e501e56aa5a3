"""Promotion: the starvation bound, beyond which queued requests are served first.

A request is promoted after the `max_wait_s` of its class: it is first in its tenant's turn. It passes no
tenant whose turn is earlier, because the backlog of one tenant would otherwise delay all others. In sustained
overload every request exceeds its bound, and promoting all of them would turn any policy into FCFS. So at
most `promoted_share` of a tenant's dispatches are promotions. The resulting bound: a request is dispatched at
most `max_wait_s` after its arrival, plus the time of `(own requests promoted before it + 1) / promoted_share`
dispatches of its tenant. The time between these dispatches follows from the tenant's share (`fairness`).

Source: ours; the proof of EWSJF that no request starves (Theorem A.1) gives no usable bound.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from serve_app.core.request import ScheduledRequest
from serve_app.core.settings_base import POSITIVE, POSITIVE_SHARE, settings
from serve_app.request import PriorityClass

if TYPE_CHECKING:
    from serve_app.core.queueing.request_queue import RequestQueue

# Promotions that accumulate while no request needs one.
_SAVED = 4.0
# Share of the queue timeout after which a request with a claimed retry reservation is promoted, whatever its
# score, because it was promised service in time. The rest is for its wait among promoted requests.
_CLAIMED_SHARE = 0.5


@settings(block="promotion")
class PromotionSettings:
    """Starvation bound of each class, in seconds, and the share of promotions."""

    # Longer than any length queue waits below saturation, shorter than users and programs wait.
    interactive_s: Annotated[float, POSITIVE] = 15.0
    # Programs wait longer than users.
    default_s: Annotated[float, POSITIVE] = 60.0
    # Half an hour: batch work may wait for idle capacity, but not indefinitely.
    batch_s: Annotated[float, POSITIVE] = 1_800.0
    # At most a fifth of a tenant's dispatches: its short requests retain the rest in overload.
    promoted_share: Annotated[float, POSITIVE_SHARE] = 0.2

    def max_wait_s(self, priority: PriorityClass) -> float:
        """Return the seconds after which a request of this class is promoted."""
        seconds: float = getattr(self, f"{priority.value}_s")
        return seconds


class Promotion:
    """Selects the requests to promote, at a bounded rate for each tenant and class."""

    def __init__(self, settings: PromotionSettings, queue: "RequestQueue") -> None:
        self._settings = settings
        self._queue = queue
        self._max_wait_s = {priority: settings.max_wait_s(priority) for priority in PriorityClass}

    def among(self, turn: Iterable[ScheduledRequest], now: float) -> list[ScheduledRequest]:
        """Return the requests to promote: the oldest beyond its bound of each tenant that is due."""
        starved = sorted((head for head in turn if now > head.starved_at), key=_by_arrival)
        oldest: dict[str, ScheduledRequest] = {}
        for head in starved:
            oldest.setdefault(head.request.tenant, head)
        return [head for head in oldest.values() if self._is_due(head)]

    def on_dispatch(
        self, scheduled: ScheduledRequest, now: float, *, capacity_was_reserved: bool = False
    ) -> None:
        """Count a dispatch of a tenant. The count ends with its backlog.

        Args:
            capacity_was_reserved: capacity was withheld from others for it; they precede the next promotion.
        """
        tenant = self._queue.tenant_queues(scheduled.request)
        if tenant is None:
            return
        if capacity_was_reserved:
            tenant.promotions = 0.0
        elif tenant.promotions >= 1.0 and now > scheduled.starved_at:
            tenant.promotions -= 1.0
        tenant.promotions = min(_SAVED, tenant.promotions + self._settings.promoted_share)

    def starved_at(self, scheduled: ScheduledRequest) -> float:
        """Return the time at which the wait reaches the bound of the class or of the claimed reservation."""
        request = scheduled.request
        wait_s = self._max_wait_s[request.priority]
        if scheduled.claimed:
            wait_s = min(wait_s, _CLAIMED_SHARE * (request.expires_at - request.arrived_at))
        return request.arrived_at + wait_s

    def _is_due(self, head: ScheduledRequest) -> bool:
        tenant = self._queue.tenant_queues(head.request)
        return tenant is not None and tenant.promotions >= 1.0


def _by_arrival(head: ScheduledRequest) -> tuple[float, int]:
    return (head.request.arrived_at, head.sequence)

"""Priority classes: their starvation bounds, their floors, and their priorities in engines.

- `Promotion`: the starvation bound, beyond which queued requests are served first.
- `ClassFloors`: the minimum share of dispatches of a lower class while it has queued requests.
- `EnginePriorities`: priority values for engines that schedule their own queue by priority.

`Promotion`. A request is promoted after the `max_wait_s` of its class: it is first in its tenant's turn. It
passes no tenant whose turn is earlier, because the backlog of one tenant would otherwise delay all others. In
sustained overload every request exceeds its bound, and promoting all of them would turn any policy into FCFS.
So at most `promoted_share` of a tenant's dispatches are promotions. The resulting bound: a request is
dispatched at most `max_wait_s` after its arrival, plus the time of `(own requests promoted before it + 1) /
promoted_share` dispatches of its tenant. The time between these dispatches follows from the tenant's share
(`fairness`).

Source: ours; the proof of EWSJF that no request starves (Theorem A.1) gives no usable bound.

`ClassFloors`. Higher classes are dispatched first. But of the dispatches made while a lower class waits, it
gets its floor share, or the share of promotions while one of its requests is beyond its starvation bound.
Credit for them accumulates up to a small bound.

`EnginePriorities`. An engine serves the higher class first. Within a class it serves the request whose tenant
has fewer requests in the engines: a tenant's first request is numbered 0, the next ones 1, 2, 3. So the first
request of a new tenant passes all but the first one of a tenant that sent a hundred at once.

Inputs: the class, and the number of the tenant's requests of that class in any engine. Requests of another
class do not count. Their band orders them already, and a batch job must not delay the same tenant's chat.
Ties: the engine's own rule, which is the order of arrival.
Starvation: engines have no ageing. A lower class waits as long as a higher one fills the engine, and the
number of a request does not change after its dispatch.

Source: TNG, "Efficient Request Queueing", backend-side priority scheduling; vLLM's `scheduling_policy` (lower
values first). The bands are ours.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Annotated

from serve_app.core.request import ScheduledRequest
from serve_app.core.settings_base import (
    ADVANCED,
    INTERNAL,
    POSITIVE,
    POSITIVE_SHARE,
    at_least,
    between,
    settings,
)
from serve_app.request import PriorityClass, Request

if TYPE_CHECKING:
    from serve_app.core.queueing.request_queue import RequestQueue


# Maximum credit of a class; more would be a burst ahead of the higher classes.
_SAVED_DISPATCHES = 2.0


@settings(block="class_floors")
class ClassFloorSettings:
    """Minimum shares of the dispatches while a class has queued requests."""

    # Share of the default class. A tenth prevents timeouts behind a flood of interactive requests.
    default_share: Annotated[float, between(0, 0.5)] = 0.1
    # Share of the batch class. It ensures progress, not early completion.
    batch_share: Annotated[float, between(0, 0.5)] = 0.02

    def share(self, priority: PriorityClass) -> float:
        """Return the floor share of a class. That of the highest class is 0, as no class precedes it."""
        shares = {PriorityClass.DEFAULT: self.default_share, PriorityClass.BATCH: self.batch_share}
        return shares.get(priority, 0.0)


class ClassFloors:
    """Counts the dispatches of each class, and determines which classes are owed one."""

    def __init__(self, settings: ClassFloorSettings, promoted_share: float = 0.0) -> None:
        self._settings = settings
        self._promoted_share = promoted_share
        self._credit = dict.fromkeys(PriorityClass, 0.0)

    def owed(self) -> list[PriorityClass]:
        """Return the classes that are owed a dispatch before the others, the highest first."""
        return [priority for priority, credit in self._credit.items() if credit >= 1.0]

    def on_dispatch(
        self,
        priority: PriorityClass,
        waiting: Iterable[PriorityClass],
        starved: Collection[PriorityClass] = (),
    ) -> None:
        """Count a dispatch of one class while the `waiting` classes have queued requests.

        Args:
            starved: classes with a request beyond its starvation bound.
        """
        if self._credit[priority] >= 1.0:
            self._credit[priority] -= 1.0
        for other in waiting:
            if other is not priority:
                promoted_share = self._promoted_share if other in starved else 0.0
                credit = self._credit[other] + max(self._settings.share(other), promoted_share)
                self._credit[other] = min(_SAVED_DISPATCHES, credit)


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


# Far above the requests in flight of any tenant, so that the bands of two classes do not overlap.
BAND = 1_000_000


@settings(block="engine_priority")
class EnginePrioritySettings:
    """Priorities sent to engines, and the engine queue lengths that they allow."""

    # Requires engines with `scheduling_policy: priority`. Other engines reject requests with a priority.
    enabled: bool = False
    # This and the next settings replace those of `backpressure`. Requests in the engine's queue can still be
    # passed, so the queue may be long enough that late reports never idle the engine. Length queues, scores
    # and shares act only on requests outside it: the longer it is, the more the engine decides the order.
    target_waiting: Annotated[int, at_least(1), ADVANCED] = 32
    # Prefill of a lower class delays a higher one by at most the current iteration.
    max_prefill_backlog_s: Annotated[float, POSITIVE, INTERNAL] = 30.0


class EnginePriorities:
    """Numbers requests by how many of the same tenant and class are in the engines."""

    def __init__(self, settings: EnginePrioritySettings) -> None:
        self._enabled = settings.enabled
        self._pending: Counter[tuple[str, PriorityClass]] = Counter()

    def __repr__(self) -> str:
        return f"<EnginePriorities {self._pending.total()} of {len(self._pending)} tenants and classes>"

    def on_dispatch(self, request: Request) -> int | None:
        """Count a request sent to an engine. Return its priority, or None if priorities are disabled."""
        if not self._enabled:
            return None
        key = (request.tenant, request.priority)
        before = self._pending[key]
        self._pending[key] = before + 1
        return request.priority.rank * BAND + min(before, BAND - 1)

    def on_departure(self, request: Request) -> None:
        """Remove a request that has ended or was put back."""
        if not self._enabled:
            return
        key = (request.tenant, request.priority)
        self._pending[key] -= 1
        if not self._pending[key]:
            del self._pending[key]

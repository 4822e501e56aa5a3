"""How much of the queue each may take, and how sure a refusal at the door must be."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """Who may wait, besides the bound `max_waiting` on all of them.

    Attributes:
        deadline_margin_ratio: a request is let in when its predicted wait and this much more of it end before
            its deadline.
        min_observations: waits of its class and length that must have been seen before a prediction refuses.
        probe_interval_s: after this long without an observation a kind is believed in no more, and one
            request of it is let in whatever is predicted.
        tenant_share: share of `max_waiting` that one tenant can fill when it is alone.
        reserved_share: share of `max_waiting` kept for each higher class: `default` leaves it free for
            `interactive`, `batch` leaves it free twice.
        max_reservations: refused requests whose return is expected, at any time.
        reservation_early_s: how long before its time a reservation may be claimed.
        reservation_grace_s: how long after its time it is kept.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    # The drain rate of a saturated fleet wanders by 10-20 % from one half-minute to the next.
    deadline_margin_ratio: float = 0.2
    # A single wait is off by a third or more; the mean of five is not.
    min_observations: int = 5
    # Well above the time between two dispatches of one kind under load, well below a client's patience.
    probe_interval_s: float = 10.0
    # A fifth is left for whoever comes later; with two heavy tenants each gets 44 %, a ninth is left.
    tenant_share: float = 0.8
    reserved_share: float = 0.1
    # Twice as many as may wait by default; about half a kilobyte each.
    max_reservations: int = 4_000
    # Clients that read whole seconds of Retry-After come up to a second late, never early.
    reservation_early_s: float = 0.25
    reservation_grace_s: float = 3.0

    def __post_init__(self) -> None:
        for name in ("deadline_margin_ratio", "reservation_early_s", "reservation_grace_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"admission.{name} must not be negative, got {getattr(self, name)}")
        if not self.probe_interval_s > 0:
            raise ValueError(f"admission.probe_interval_s must be positive, got {self.probe_interval_s}")
        if self.min_observations < 1:
            raise ValueError(f"admission.min_observations must be at least 1, got {self.min_observations}")
        if self.max_reservations < 0:
            raise ValueError(f"admission.max_reservations must not be negative, got {self.max_reservations}")
        if not 0 < self.tenant_share <= 1:
            raise ValueError(f"admission.tenant_share must be above 0 and at most 1, got {self.tenant_share}")
        if not 0 <= self.reserved_share < 0.5:
            raise ValueError(
                f"admission.reserved_share must be at least 0 and below 0.5, got {self.reserved_share}: "
                "batch leaves it free twice"
            )

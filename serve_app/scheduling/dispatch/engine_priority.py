"""What an engine is told of a request's urgency, where engines order their own queues by priority.

Question: which of two requests that both wait inside one engine shall it take first? The one of the higher
class; within a class, the one whose tenant has fewer requests with the engines. A tenant's first is numbered
0, its next 1, 2, 3, so a newcomer's first passes all but the first of whoever sent a hundred at once.

Inputs: the class, and how many of the tenant's requests of that class have been sent to engines and have not
ended, wherever they run. Requests of another class do not count: their band orders them already, and a tenant
with a batch job under way must not lose its turn in a chat by it.
At ties: the engine's own rule, the order of arrival.
When it starves whom: an engine knows no ageing. A lower class waits as long as a higher one keeps the engine
full, and the number of a request stays as it was when it was sent.

Source: TNG, "Efficient Request Queueing", backend-side priority scheduling; vLLM's `scheduling_policy`
(lower value first). The bands are ours.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from serve_app.request import PriorityClass, Request

# Far more than any tenant has in flight, so that the last of a class comes before the first of the next.
BAND = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrioritySettings:
    """Whether engines are told a priority, and how long their queues may be when they are."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    # Needs engines that run with `scheduling_policy: priority`; any other refuses requests with a priority.
    enabled: bool = False
    # These take the place of their likes in `backpressure`. A request in an engine's
    # queue can still be passed, so the queue may be long: long enough that late news never idles the engine.
    # Length queues, scores and shares act on what waits outside, so the longer it is, the more the order is
    # the engine's.
    target_waiting: int = 32
    # Share of that queue which batch work may fill: were it all, those who would pass it could not come in.
    batch_share: float = 0.5
    # Prefill of a lower class does not delay that of a higher one, beyond the iteration under way.
    max_prefill_backlog_s: float = 30.0

    def __post_init__(self) -> None:
        if self.target_waiting < 1:
            raise ValueError(f"engine_priority.target_waiting must be at least 1, got {self.target_waiting}")
        if not 0 <= self.batch_share <= 1:
            raise ValueError(f"engine_priority.batch_share must be from 0 to 1, got {self.batch_share}")
        if not self.max_prefill_backlog_s > 0:
            raise ValueError(
                f"engine_priority.max_prefill_backlog_s must be positive, got {self.max_prefill_backlog_s}"
            )


class EnginePriorities:
    """Numbers requests by those that are pending with the engines, which it counts by tenant and class."""

    def __init__(self, settings: EnginePrioritySettings) -> None:
        self._enabled = settings.enabled
        self._pending: Counter[tuple[str, PriorityClass]] = Counter()

    def __repr__(self) -> str:
        return f"<EnginePriorities {self._pending.total()} of {len(self._pending)} tenants and classes>"

    def on_dispatch(self, request: Request) -> int | None:
        """Count a request that goes to an engine; return what that is to be told, None for nothing."""
        if not self._enabled:
            return None
        key = (request.tenant, request.priority)
        before = self._pending[key]
        self._pending[key] = before + 1
        return request.priority.rank * BAND + min(before, BAND - 1)

    def on_departure(self, request: Request) -> None:
        """A request that was sent has ended, or has come back from its engine."""
        if not self._enabled:
            return
        key = (request.tenant, request.priority)
        self._pending[key] -= 1
        if not self._pending[key]:
            del self._pending[key]

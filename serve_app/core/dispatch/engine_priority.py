"""Engine priorities: priority values for engines that schedule their own queue by priority.

An engine serves the higher class first. Within a class it serves the request whose tenant has fewer requests
in the engines: a tenant's first request is numbered 0, the next ones 1, 2, 3. So the first request of a new
tenant passes all but the first one of a tenant that sent a hundred at once.

Inputs: the class, and the number of the tenant's requests of that class in any engine. Requests of another
class do not count. Their band orders them already, and a batch job must not delay the same tenant's chat.
Ties: the engine's own rule, which is the order of arrival.
Starvation: engines have no ageing. A lower class waits as long as a higher one fills the engine, and the
number of a request does not change after its dispatch.

Source: TNG, "Efficient Request Queueing", backend-side priority scheduling; vLLM's `scheduling_policy` (lower
values first). The bands are ours.
"""

from collections import Counter
from typing import Annotated

from serve_app.core.settings_base import ADVANCED, INTERNAL, POSITIVE, at_least, settings
from serve_app.request import PriorityClass, Request

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

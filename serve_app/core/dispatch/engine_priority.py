"""Engine priorities: the number that orders a request in an engine that schedules its own queue by priority.

Of two requests that wait in one engine, the higher class is served first. Within a class, it is the one whose
tenant has fewer requests in the engines. A tenant's first is numbered 0, the next 1, 2, 3. So the first
request of a new tenant passes all but the first of a tenant that sent a hundred at once.

Inputs: the class, and how many of the tenant's requests of that class are in any engine. Requests of another
class do not count. Their band orders them already, and a batch job must not delay the same tenant's chat.
Ties: the engine's own rule, the order of arrival.
Starvation: engines have no ageing. A lower class waits as long as a higher one keeps the engine full, and the
number of a request does not change after its dispatch.

Source: TNG, "Efficient Request Queueing", backend-side priority scheduling; vLLM's `scheduling_policy` (lower
values first). The bands are ours.
"""

from collections import Counter
from typing import Annotated

from serve_app.core.settings_base import ADVANCED, INTERNAL, POSITIVE, SHARE, at_least, settings
from serve_app.request import PriorityClass, Request

# Far more than any tenant has in flight, so that the last of a class is ordered before the first of the next.
BAND = 1_000_000


@settings(block="engine_priority")
class EnginePrioritySettings:
    """Whether engines get a priority for each request, and how long their queues may be then."""

    # Needs engines that run with `scheduling_policy: priority`; any other refuses requests with a priority.
    enabled: bool = False
    # These replace their counterparts in `backpressure`. A request in an engine's queue can still be passed,
    # so the queue may be long enough that late reports never idle the engine. Length queues, scores and
    # shares act only on what waits outside it, so the longer it is, the more the order is the engine's.
    target_waiting: Annotated[int, at_least(1), ADVANCED] = 32
    # Share of that queue that batch work may fill; the rest is for requests that pass it.
    batch_share: Annotated[float, SHARE, INTERNAL] = 0.5
    # Prefill of a lower class does not delay that of a higher one, beyond the iteration under way.
    max_prefill_backlog_s: Annotated[float, POSITIVE, INTERNAL] = 30.0


class EnginePriorities:
    """Numbers requests by how many of their tenant and class are pending in the engines."""

    def __init__(self, settings: EnginePrioritySettings) -> None:
        self._enabled = settings.enabled
        self._pending: Counter[tuple[str, PriorityClass]] = Counter()

    def __repr__(self) -> str:
        return f"<EnginePriorities {self._pending.total()} of {len(self._pending)} tenants and classes>"

    def on_dispatch(self, request: Request) -> int | None:
        """Count a request that is sent to an engine; returns the priority to send, None for none."""
        if not self._enabled:
            return None
        key = (request.tenant, request.priority)
        before = self._pending[key]
        self._pending[key] = before + 1
        return request.priority.rank * BAND + min(before, BAND - 1)

    def on_departure(self, request: Request) -> None:
        """A request that was sent has ended, or was returned by its engine."""
        if not self._enabled:
            return
        key = (request.tenant, request.priority)
        self._pending[key] -= 1
        if not self._pending[key]:
            del self._pending[key]
